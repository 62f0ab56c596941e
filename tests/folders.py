"""Folders from elsewhere, spoilt as wholes: adapters and checkpoints that an export wrote, models, and what stands
where an export is to go. Each door reads one, and knows what is right."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

import tiny
from contextfold import models, prompts
from contextfold.anatomy import bind
from contextfold.errors import ContextfoldError
from contextfold.explain import explain
from contextfold.export import Checkpoint, Exporter, GgufAdapter, PeftFolder, Proof, Source, check, export
from contextfold.fold import fold_token
from contextfold.lowrank import LowRank
from contextfold.patch import MatrixEdit, Patch
from spoil import parts_of
from watched import kept
from wrecks import entries_of, small, spoil

__all__ = ["FOLDERS", "Folder", "ended"]

PAIRS = "adapter_model.safetensors"

LATEST = 60
"""Seconds; what is read takes less than one, and what is written has to reach a disk that others use."""

MULTIPLE = 64
"""Bytes in memory for one of the folder, at most; a constant besides."""


def _source() -> Source:
    bound = bind(tiny.build("llama", torch.float32))
    return Source(bound, fold_token(bound, tiny.tokens(11), tiny.tokens(3, seed=2)).patch, name="tiny")


def _matrices(source: Source) -> Source:
    """The same without biases, which GGUF adapters do not hold."""
    edits = {site: edit for site, edit in source.patch.edits.items() if isinstance(edit, MatrixEdit)}
    if not edits:
        generator = torch.Generator().manual_seed(0)
        for block in source.bound.blocks:
            out, inner = block.output_map.weight.shape
            B, A = torch.randn(out, 1, generator=generator), torch.randn(1, inner, generator=generator)
            edits[block.output_map.site] = MatrixEdit(LowRank(0.05 * B, A / inner**0.5))
    return Source(source.bound, Patch(source.patch.header, edits), name="tiny")


_made: dict[str, Any] = {}


def _once(name: str, make: Callable[[], Any]) -> Any:
    if name not in _made:
        _made[name] = make()
    return _made[name]


def _good(place: Path, name: str, write: Callable[[Path], object]) -> Path:
    """A well-formed folder, written once per place."""
    path = place / "good" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    return path


def _strict(found: object) -> None:
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()


def _tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> dtype, shape and bytes, read without the library that others read it with."""
    header, data = parts_of(path.read_bytes())
    return {
        name: (row["dtype"], row["shape"], data[slice(*row["data_offsets"])])
        for name, row in header.items()
        if name != "__metadata__"
    }


def _checked(exporter: Exporter, weights: str, source: Callable[[], Source]) -> Callable[[Path, Path], object]:
    """Prove the folder; what is called proven holds the weights that were written, bit for bit."""

    def call(folder: Path, good: Path) -> object:
        proof: Proof = check(source(), exporter, folder)
        _strict(proof.to_json())
        if len(proof.sentence().splitlines()) != 1:
            raise AssertionError("a verdict of several lines")
        if not proof.proven:
            return proof
        if weights.endswith(".gguf"):
            same = (folder / weights).read_bytes() == (good / weights).read_bytes()
        else:
            wanted, found = _tensors(good / weights), _tensors(folder / weights)
            same = all(found.get(name) == value for name, value in wanted.items())
        if not same:
            raise AssertionError("other weights were called proven")
        return proof

    return call


def _loaded(folder: Path, good: Path) -> object:
    """Explain it, and load it as a model; what its tensors are called is what they hold."""
    with contextlib.suppress(ContextfoldError):
        _strict(explain(str(folder)).to_json())
    found = models.load(str(folder))
    wanted = load_file(folder / "model.safetensors") if (folder / "model.safetensors").is_file() else {}
    state = found.model.state_dict()
    for name in wanted.keys() & state.keys():
        if not torch.allclose(wanted[name].to(state[name].dtype), state[name], rtol=0, atol=0, equal_nan=True):
            raise AssertionError(f"{name} is not what the file holds")
    if type(found.model).__module__.partition(".")[0] != "transformers":
        raise AssertionError(f"{type(found.model)} is no class of transformers")
    return prompts.encode(found.tokenizer, "abc", "de").query.tolist()


def _replaced(folder: Path, good: Path) -> object:
    """Export to where it stands; it is the new export afterwards, or as it was."""
    before = _digest(folder)
    source = _once("source", _source)
    try:
        proof = export(source, PeftFolder(), folder)
    except Exception:
        if _digest(folder) != before:
            raise AssertionError("refused, and changed") from None
        raise
    written, wanted = (_tensors(each / PAIRS) for each in (folder, good))
    if not proof.proven or written != wanted:
        raise AssertionError("replaced by something else")
    return proof


def _digest(folder: Path) -> str:
    """Of names, kinds, sizes and small contents; links are not followed, and pipes not opened."""
    found = hashlib.sha256()
    for entry in entries_of(folder):
        about = entry.stat(follow_symlinks=False)
        found.update(b"%s %o %d" % (entry.path, about.st_mode, about.st_size))
        if entry.is_file(follow_symlinks=False):
            found.update(small(entry))
    return found.hexdigest()


def _model(path: Path) -> None:
    tiny.letters().save_pretrained(path)
    tiny.build("llama", torch.float32).save_pretrained(path)


def _exported(exporter: Exporter, source: Callable[[], Source]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        if not export(source(), exporter, path).proven:
            raise AssertionError("the well-formed folder is not proven")

    return write


def _whole() -> Source:
    found: Source = _once("source", _source)
    return found


def _plain() -> Source:
    found: Source = _once("matrices", lambda: _matrices(_whole()))
    return found


@dataclass(frozen=True)
class Folder:
    """`write(path)` makes a well-formed one; `call(folder, good)` reads a spoilt copy, and raises where what it found
    is not right, which the good one tells."""

    name: str
    write: Callable[[Path], object]
    call: Callable[[Path, Path], object]
    writes: bool = False
    """Whether the call may change the folder; otherwise not a byte of it."""


FOLDERS = (
    Folder("PEFT adapter", _exported(PeftFolder(), _whole), _checked(PeftFolder(), PAIRS, _whole)),
    Folder("checkpoint", _exported(Checkpoint(), _whole), _checked(Checkpoint(), "model.safetensors", _whole)),
    Folder("GGUF adapter", _exported(GgufAdapter(), _plain), _checked(GgufAdapter(), "adapter.gguf", _plain)),
    Folder("model", _model, _loaded),
    Folder("place of an export", _exported(PeftFolder(), _whole), _replaced, writes=True),
)


def ended(door: Folder, place: Path, rng: Random, change: Callable[[Path, Random, Path], None] = spoil) -> str:
    """Spoil a copy, read it, and say how that ended; `place` is the door's own, and empty but for what is kept there.

    Raises `Broken` for what `watched.kept` does, and where something beside the folder, or in one that is only read,
    is not what it was.
    """
    good = _good(place, door.name.replace(" ", "-"), door.write)
    _once(f"warm {door.name}", lambda: door.call(_copied(good, place / "warm"), good))  # imports take memory
    try:
        return _tried(door, place, rng, change)
    finally:
        _cleared(place / "trial", place / "outside", place / "mark")


def _tried(door: Folder, place: Path, rng: Random, change: Callable[[Path, Random, Path], None]) -> str:
    good, trial, outside, mark = place / "good", place / "trial", place / "outside", place / "mark"
    good = good / door.name.replace(" ", "-")
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    shutil.copytree(good, trial)
    change(trial, rng, mark)
    before = _digest(outside), None if door.writes else _digest(trial)
    size = sum(512 * entry.stat(follow_symlinks=False).st_blocks for entry in entries_of(trial))
    allowed = place if door.writes else place / "nowhere"
    found = kept(lambda: door.call(trial, good), allowed, size=size, resident=MULTIPLE, deadline=LATEST)
    if mark.exists():
        raise AssertionError("code was run")
    if before != (_digest(outside), None if door.writes else _digest(trial)):
        raise AssertionError("something was changed")
    left = {path.name for path in place.iterdir()} - {"good", "warm", "trial", "outside"}
    if left:
        raise AssertionError(f"left {min(left)}")
    return found


def _copied(good: Path, path: Path) -> Path:
    return Path(shutil.copytree(good, path, dirs_exist_ok=True))


def _cleared(*paths: Path) -> None:
    """Also folders that are deeper than Python follows."""
    for path in paths:
        if not path.is_dir():
            path.unlink(missing_ok=True)
            continue
        entries = entries_of(path)
        for entry in reversed(entries):  # what is inside comes after its folder
            (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
        path.rmdir()
