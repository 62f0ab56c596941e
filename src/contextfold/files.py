"""Files that are there whole or not at all, and folders of finished work in JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contextfold.errors import InputError

__all__ = ["Kept", "replacing", "write_json"]


@contextmanager
def replacing(path: Path, advice: str) -> Iterator[Path]:
    """A file beside `path` to be written in the `with`; it takes the place of `path` when all went well.

    Raises `InputError` with `advice` when it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; {advice}") from error
    finally:
        part.unlink(missing_ok=True)  # gone already when the rename went through


COLUMN = re.compile(r'\[\n[^\[\]{}"]*\]')
"""A list in JSON that holds neither texts nor other lists; it begins a line, which nothing inside a text does."""


def write_json(path: Path, payload: Mapping[str, Any], advice: str = "choose another place") -> None:
    """JSON that a person can read: columns of numbers stay on one line each. Raises as `replacing` does."""
    text = json.dumps(payload, indent=1, ensure_ascii=False, allow_nan=False)
    with replacing(path, advice) as part:
        part.write_text(COLUMN.sub(lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Kept:
    """A folder with one JSON file per finished piece of work, under the key of all that the piece depends on.

    Raises `InputError` where nothing can be kept.
    """

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot keep work in {self.folder}: {error.strerror}; choose another --work") from error

    def get(self, name: str, key: str) -> dict[str, Any] | None:
        """What was kept under this key; a damaged file, or one of other work, is no help."""
        try:
            found = json.loads(self._path(name, key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.pop("key", None) == key else None

    def put(self, name: str, key: str, entry: Mapping[str, Any]) -> None:
        """The file is there whole, or not at all. Raises `InputError` when it cannot be written."""
        write_json(self._path(name, key), {"key": key, **entry}, "choose another --work")

    def _path(self, name: str, key: str) -> Path:
        return self.folder / f"{name}-{key[:16]}.json"
