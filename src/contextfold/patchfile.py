"""Patch <-> safetensors, with a versioned header in the metadata. No pickle anywhere; writes are atomic."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contextfold.errors import InputError, PatchFileDamaged, PatchFileForeign, PatchFileNewer, one_line
from contextfold.files import parsed_json, replacing
from contextfold.lowrank import LowRank
from contextfold.patch import BiasEdit, Edit, Header, MatrixEdit, Patch, ScaleEdit, Site

__all__ = ["FORMAT", "VERSION", "load", "packed", "save", "unpacked"]

FORMAT = "contextfold-patch"
VERSION = 1

T = TypeVar("T")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that the tensors of a file may have."""

LARGEST = torch.finfo(torch.float32).max
"""No entry is larger, float64 ones included: norms and products of what a file holds stay finite in float64."""

HEADER = 32 * 2**20
"""Bytes of text in a file that are still parsed; the sites of 100,000 experts stay below."""

_TENSORS = {"matrix": ("B", "A"), "bias": ("delta",), "scale": ("base", "value")}


def save(patch: Patch, path: str | os.PathLike[str]) -> Path:
    """Write `patch` to `path`: the old file or the new one, never half of one; the same bytes for the same patch.

    Raises `NotWritten` when the folder does not exist or cannot be written, and `InputError` when the patch holds what
    `load` would refuse, such as a NaN.
    """
    target = Path(path)
    tensors, sites = packed(patch.edits)
    for site, edit in patch.edits.items():
        _check_storable(site, edit)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "header": json.dumps(asdict(patch.header)),
        "sites": json.dumps(sites),
    }
    with replacing(target, "choose another --out") as part:
        save_file(tensors, part, metadata=metadata)
        _order(part)
    return target


def load(path: str | os.PathLike[str]) -> Patch:
    """Read a patch.

    Raises `InputError` when there is no such file, `PatchFileForeign` when it is something else,
    `PatchFileNewer` when a newer version of the format wrote it, and `PatchFileDamaged` when it is truncated,
    corrupted, or does not agree with its own header. Reads tensors only; nothing in the file is executed.
    """
    source = Path(path)
    if not os.path.isfile(source):
        raise InputError(f"there is no patch file at {source}")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_format(source, metadata)
            header, rows = _parsed(source, metadata)
            names = _names(rows)
            if set(names) != set(file.keys()):
                raise ValueError(f"tensors {sorted(set(names) ^ set(file.keys()))[:3]} are missing or without a site")
            # Copied, as fresh memory: mapped tensors are aligned otherwise, and fail with the file.
            tensors = {name: file.get_tensor(name).clone() for name in names}
        return Patch(header, unpacked(rows, tensors))
    except (SafetensorError, OSError) as error:
        why = one_line(error)
        raise PatchFileDamaged(f"{source} is truncated or not a safetensors file: {why}; make it again") from error
    except (KeyError, TypeError, ValueError) as error:
        why = one_line(repr(error))
        raise PatchFileDamaged(f"{source} does not agree with its own header: {why}; make it again") from error


def _parsed(source: Path, metadata: Mapping[str, str]) -> tuple[Header, list[Any]]:
    texts = metadata["header"], metadata["sites"]
    if sum(map(len, texts)) > HEADER:
        raise PatchFileDamaged(f"{source} has a header of more than {HEADER} bytes, which no patch has; make it again")
    header, rows = _header(parsed_json(texts[0])), parsed_json(texts[1])
    if not isinstance(rows, list):
        raise TypeError("sites are not a list")
    return header, rows


def _check_storable(site: Site, edit: Edit) -> None:
    try:
        for part in edit.tensors:
            _checked(part)
        _consistent(edit)
    except ValueError as error:
        raise InputError(f"the edit of {site.name} cannot be kept: {error}; nothing was written") from error


def packed(edits: Mapping[Site, Edit]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Copies of all tensors by a name of their own, contiguous, and per site a row of plain data."""
    tensors: dict[str, Tensor] = {}
    rows = []
    for index, (site, edit) in enumerate(sorted(edits.items(), key=lambda item: item[0])):
        kind, parts, extra = _pack(edit)
        rows.append({**asdict(site), "edit": kind, **extra})
        tensors |= {f"{index}.{name}": part.detach().cpu().contiguous().clone() for name, part in parts.items()}
    return tensors, rows


def _order(file: Path) -> None:
    """Sort the metadata of a safetensors file: they are written in another order every time, at the same length."""
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        stream.seek(8)
        stream.write(text.ljust(size))


def _check_format(source: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise PatchFileForeign(
            f"{source} is a safetensors file, but not a contextfold patch (format "
            f"{one_line(repr(metadata.get('format')), 40)}); "
            "expected a file written by `contextfold fold --out`"
        )
    version = metadata.get("version", "")
    if not version.isascii() or not version.isdigit() or len(version) > 9:
        raise PatchFileDamaged(f"{source} names no readable format version ({version[:20]!r})")
    if int(version) > VERSION:
        raise PatchFileNewer(
            f"{source} has format version {version}, this contextfold reads up to {VERSION}; upgrade contextfold"
        )


def _pack(edit: Edit) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    match edit:
        case MatrixEdit(delta):
            return "matrix", {"B": delta.B, "A": delta.A}, {}
        case BiasEdit(delta):
            return "bias", {"delta": delta}, {}
        case ScaleEdit(base, value, offset):
            return "scale", {"base": base, "value": value}, {"offset": offset}


_UNPACK: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], Edit]] = {
    "matrix": lambda parts, _: MatrixEdit(LowRank(parts["B"], parts["A"])),
    "bias": lambda parts, _: BiasEdit(parts["delta"]),
    "scale": lambda parts, row: ScaleEdit(parts["base"], parts["value"], _offset(row["offset"])),
}


def _offset(value: object) -> int:
    if _typed(value, int) not in (0, 1):
        raise ValueError(f"offset {value!r} is neither 0 nor 1")
    return _typed(value, int)


def unpacked(rows: object, tensors: Mapping[str, Tensor]) -> dict[Site, Edit]:
    """The edits of `packed`. Raises `KeyError`, `TypeError` or `ValueError` where rows and tensors do not agree."""
    if not isinstance(rows, list):
        raise TypeError("sites are not a list")
    edits: dict[Site, Edit] = {}
    for index, row in enumerate(rows):
        site = _site(row)
        parts = {part: _checked(tensors[f"{index}.{part}"]) for part in _TENSORS[row["edit"]]}
        if site in edits:
            raise ValueError(f"site {site.name} stands twice")
        edits[site] = _consistent(_UNPACK[row["edit"]](parts, row))
    if len(_names(rows)) != len(tensors):
        raise ValueError(f"tensors without a site: {sorted(set(tensors) - set(_names(rows)))[:3]}")
    return edits


def _names(rows: list[Any]) -> list[str]:
    """What the tensors of the rows are called."""
    return [f"{index}.{part}" for index, row in enumerate(rows) for part in _TENSORS[_text(row["edit"])]]


def _site(row: Mapping[str, Any]) -> Site:
    site = Site(
        layer=_count(row["layer"]),
        module=_text(row["module"]),
        parameter=_text(row["parameter"]),
        transposed=_typed(row["transposed"], bool),
        expert=None if row["expert"] is None else _count(row["expert"]),
        experts=_count(row["experts"]),
    )
    if site.expert is not None and site.expert >= site.experts:
        raise ValueError(f"expert {site.expert} of {site.experts}")
    return site


def _consistent(edit: Edit) -> Edit:
    match edit:
        case MatrixEdit(delta) if 0 in delta.shape:
            raise ValueError(f"a matrix of shape {delta.shape}")
        case ScaleEdit(base, value, _) if base.shape != value.shape or base.dim() != 1:
            raise ValueError(f"scale {tuple(value.shape)} over base {tuple(base.shape)}")
        case BiasEdit(delta) if delta.dim() != 1:
            raise ValueError(f"bias of shape {tuple(delta.shape)}")
        case _:
            return edit


def _checked(tensor: Tensor) -> Tensor:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"a tensor of dtype {tensor.dtype}; supported are {', '.join(map(str, DTYPES))}")
    if not bool((tensor.abs() <= LARGEST).all()):
        raise ValueError(f"a tensor holds values that are not finite numbers, or larger than {LARGEST:.3g}")
    return tensor


def _typed(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, met {value!r}")
    return value


def _count(value: object) -> int:
    """A layer, a position, a number of experts."""
    if not 0 <= _typed(value, int) < 2**31:
        raise ValueError(f"{value!r} is no number of a layer, a position or an expert")
    return _typed(value, int)


def _position(value: object) -> int:
    """Of a sequence, or counted from its end."""
    if not -(2**31) < _typed(value, int) < 2**31:
        raise ValueError(f"{value!r} is no position")
    return _typed(value, int)


def _text(value: object) -> str:
    """A name that can be printed: no line break, and nothing that a terminal would act on."""
    if not _typed(value, str).isprintable():
        raise ValueError(f"the text {value!a} cannot be printed")
    return _typed(value, str)


def _header(row: dict[str, Any]) -> Header:
    names = {f.name for f in fields(Header)}
    if set(row) != names:
        raise ValueError(f"header fields {sorted(set(row) ^ names)} are missing or unknown")
    # Blocks of the user's own are met at the last positions, counted from the end.
    position = _position if row["kind"] == "blocks" else _count
    read: dict[str, Any] = {name: tuple(position(v) for v in row[name]) for name in ("positions", "exact_at")}
    read["plan"] = tuple(_text(v) for v in row["plan"])
    read["versions"] = {_text(k): _text(v) for k, v in dict(row["versions"]).items()}
    read["materialised"] = _typed(row["materialised"], bool)
    read |= {name: _text(row[name]) for name in names - set(read)}
    return Header(**read)
