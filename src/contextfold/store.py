"""Places that are solved already, on disk: work that was stopped goes on where it was, with the same bits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.anatomy.sharded import refuse_sharded
from contextfold.errors import InputError
from contextfold.versions import versions

__all__ = ["Store", "clear", "key_of"]

SOLVED, PART = ".solved", ".solving"
"""Endings of a file that is there whole, and of one that is being written."""


def key_of(bound: Bound, *asked: object) -> str:
    """SHA-256 of the weights, of how and by what the model runs, and of what is asked of it, by the text of each.

    Raises `UnsupportedModel` for a model that processes share: they might not find the same places solved.
    """
    refuse_sharded(bound.model, "work that is kept and goes on later")
    parts = (bound.fingerprint, bound.attention, bound.device, sorted(versions().items()), asked)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Store:
    """A folder with one safetensors file per solved place, all made from what `key` is the digest of.

    Raises `InputError` where nothing can be kept.
    """

    folder: Path
    key: str

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refused(error.strerror) from error

    def put(self, place: str, tensors: Mapping[str, Tensor], report: Mapping[str, Any]) -> None:
        """Keep what was solved at `place`: the file is there whole, or not at all."""
        part = self.folder / f"{place}.{os.getpid()}{PART}"
        found, words = {name: each.contiguous().cpu() for name, each in tensors.items()}, json.dumps(report)
        metadata = {"key": self.key, "report": words, "digest": _digest(found, words)}
        try:
            save_file(found, part, metadata=metadata)
            os.replace(part, self.folder / f"{place}{SOLVED}")
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise self._refused(str(error)) from error

    def get(self, place: str, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was solved there under this key; a file of other work is no help, nor is a damaged one."""
        try:
            with safe_open(self.folder / f"{place}{SOLVED}", framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != self.key:
                    return None
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if metadata.get("digest") != _digest(found, metadata.get("report", "")):
                    return None
                # Copied: a mapped file is not aligned as fresh memory is, and products then round otherwise.
                parts = {name: each.to(device, copy=True) for name, each in found.items()}
        except (OSError, SafetensorError):
            return None
        return parts, json.loads(metadata["report"])

    def _refused(self, why: str | None) -> InputError:
        return InputError(f"cannot keep work in {self.folder}: {why}; choose another folder")


def _digest(tensors: Mapping[str, Tensor], report: str) -> str:
    """SHA-256 of what is kept: a bit that a disk has changed would look like a solution."""
    whole = hashlib.sha256(report.encode())
    for name, each in sorted(tensors.items()):
        whole.update(f"{name} {each.dtype} {tuple(each.shape)} ".encode())
        whole.update(each.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def clear(folder: Path) -> None:
    """Take away what was kept in `folder` and in folders inside it, and each of them if nothing else is in it."""
    for file in (*folder.rglob(f"*{SOLVED}"), *folder.rglob(f"*{PART}")):
        file.unlink()
    for inner in sorted((folder, *(each for each in folder.rglob("*") if each.is_dir())), reverse=True):
        if inner.is_dir() and not any(inner.iterdir()):
            inner.rmdir()
