"""Rows of finished jobs on disk, a file each, so that a sweep that was stopped goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contextfold.errors import InputError

__all__ = ["Kept"]


@dataclass(frozen=True)
class Kept:
    """A folder of rows, each under its job's digest. Raises `InputError` where nothing can be kept."""

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot keep work in {self.folder}: {error.strerror}; choose another --work") from error

    def get(self, digest: str) -> dict[str, Any] | None:
        """The row of that job; a damaged file, or one of another job, is no help."""
        try:
            row = json.loads(self._path(digest).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return row if isinstance(row, dict) and row.get("job") == digest else None

    def put(self, row: Mapping[str, Any]) -> None:
        """The file is there whole, or not at all. Raises `InputError` when it cannot be written."""
        path = self._path(row["job"])
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(row, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise InputError(f"cannot write {path}: {error.strerror}; choose another --work") from error

    def _path(self, digest: str) -> Path:
        return self.folder / f"job-{digest[:16]}.json"
