"""Places that are solved already, on disk: work that was stopped goes on where it was, with the same bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.anatomy.sharded import refuse_sharded
from contextfold.errors import NotWritten
from contextfold.files import replacing
from contextfold.scratch import sweep
from contextfold.versions import versions

__all__ = ["Store", "clear", "key_of"]

SOLVED = ".solved"
"""Ending of the file of a place."""

ADVICE = "choose another folder"


def key_of(bound: Bound, *asked: object) -> str:
    """SHA-256 of the weights, of how and by what the model runs, and of what is asked of it, by the text of each.

    The number of threads is part of it, since they share out sums, which then round otherwise.

    Raises `UnsupportedModel` for a model that processes share: they might not find the same places solved.
    """
    refuse_sharded(bound.model, "work that is kept and goes on later")
    how = (bound.attention, bound.device, torch.get_num_threads(), sorted(versions().items()))
    parts = (bound.fingerprint, *how, asked)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Store:
    """A folder with one safetensors file per solved place, all made from what `key` is the digest of.

    Raises `NotWritten` where nothing can be kept.
    """

    folder: Path
    key: str

    def __post_init__(self) -> None:
        self._make()

    def put(self, place: str, tensors: Mapping[str, Tensor], report: Mapping[str, Any]) -> None:
        """Keep what was solved at `place`: the file is there whole, or not at all."""
        found, words = {name: each.contiguous().cpu() for name, each in tensors.items()}, json.dumps(report)
        metadata = {"key": self.key, "report": words, "digest": _digest(found, words)}
        self._make()  # gone when another process, which was asked the same, is done and cleared it
        with replacing(self.folder / f"{place}{SOLVED}", ADVICE) as part:
            save_file(found, part, metadata=metadata)

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

    def places(self, prefix: str) -> list[str]:
        """Names of the places in the folder, of this work or other, that begin so."""
        return sorted(path.name.removesuffix(SOLVED) for path in self.folder.glob(f"{prefix}*{SOLVED}"))

    def _make(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NotWritten(f"cannot keep work in {self.folder}: {error.strerror}; {ADVICE}") from error


def _digest(tensors: Mapping[str, Tensor], report: str) -> str:
    """SHA-256 of what is kept: a bit that a disk has changed would look like a solution."""
    whole = hashlib.sha256(report.encode())
    for name, each in sorted(tensors.items()):
        whole.update(f"{name} {each.dtype} {tuple(each.shape)} ".encode())
        whole.update(each.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def clear(folder: Path) -> None:
    """Take away what was kept in `folder` and in folders inside it, and each of them if nothing else is in it.

    As far as that goes: another process may clear it too, or write what it solves there, and the disk may be read-only.
    """
    for inner in sorted((folder, *(each for each in folder.rglob("*") if each.is_dir())), reverse=True):
        sweep(inner, age=0.0)
        for file in inner.glob(f"*{SOLVED}"):
            with suppress(OSError):
                file.unlink()
        with suppress(OSError):
            inner.rmdir()
