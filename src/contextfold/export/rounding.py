"""What rounding took from edited parameters, one of them in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from contextfold.anatomy.wrapped import value_of
from contextfold.export.base import Source
from contextfold.lowrank import PARTS, LowRank
from contextfold.overlays import Written, lending
from contextfold.patch import Edit, MatrixEdit, Site

__all__ = ["lost", "write_float32"]


def lost(source: Source) -> Iterator[tuple[str, Tensor]]:
    """`exact − stored` per edited parameter, by name, float32; the exact sum in float64."""
    model = source.bound.model
    for name, edits in _by_parameter(source).items():
        yield name, _lost(model, name, edits)


def _lost(model: nn.Module, name: str, edits: dict[Site, Edit]) -> Tensor:
    with value_of(model, name) as parameter:
        original = parameter.data
    with lending(Written, model, edits), value_of(model, name) as stored:
        found = torch.empty(stored.shape, dtype=torch.float32, device=stored.device)
        match list(edits.items()):
            case [(site, MatrixEdit(delta))] if site.expert is None:
                into, W, written = (site.matrix(each) for each in (found, original, stored.data))
                _by_rows(into, W, written, delta.to(torch.float64))
            case _:
                exact = original.double()
                for site, edit in edits.items():
                    exact = edit.merged(exact, site)
                found.copy_(exact.sub_(stored.data))
    return found.cpu()


def _by_rows(found: Tensor, original: Tensor, stored: Tensor, delta: LowRank) -> None:
    """Matrices `(out, in)`: in float64 a map as a whole would take four times its memory."""
    parts = (each.chunk(PARTS) for each in (found, original, stored, delta.B))
    for into, W, written, B in zip(*parts, strict=True):
        into.copy_((W.double() + B @ delta.A).sub_(written))


def _by_parameter(source: Source) -> dict[str, dict[Site, Edit]]:
    """Slices of one parameter together."""
    found: dict[str, dict[Site, Edit]] = {}
    for site, edit in source.patch.edits.items():
        found.setdefault(f"{site.module}.{site.parameter}", {})[site] = edit
    return found


def write_float32(path: Path, source: Source, see: Callable[[Tensor], None]) -> None:
    """A safetensors file of what `lost` gives, written as it comes; `see` is shown each tensor.

    The format: the length of a JSON header in eight bytes, the header with a place for every tensor, then the bytes.
    """
    sizes = {name: source.bound.model.get_parameter(name).shape for name in _by_parameter(source)}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in sizes.items():
        stop = start + shape.numel() * torch.float32.itemsize
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in lost(source):
            see(tensor)
            file.write(tensor.numpy().data)
