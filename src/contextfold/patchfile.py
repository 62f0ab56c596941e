"""Patch <-> safetensors, with a versioned header in the metadata. No pickle anywhere; writes are atomic."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contextfold.errors import InputError, PatchFileDamaged, PatchFileForeign, PatchFileNewer
from contextfold.lowrank import LowRank
from contextfold.patch import BiasEdit, Edit, Header, MatrixEdit, Patch, ScaleEdit, Site

__all__ = ["FORMAT", "VERSION", "load", "packed", "save", "unpacked"]

FORMAT = "contextfold-patch"
VERSION = 1

T = TypeVar("T")

_TENSORS = {"matrix": ("B", "A"), "bias": ("delta",), "scale": ("base", "value")}


def save(patch: Patch, path: str | os.PathLike[str]) -> Path:
    """Write `patch` to `path`: the old file or the new one, never half of one.

    Raises `InputError` when the folder does not exist or cannot be written.
    """
    target = Path(path)
    tensors, sites = packed(patch.edits)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "header": json.dumps(asdict(patch.header)),
        "sites": json.dumps(sites),
    }
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(handle)
    except OSError as error:
        raise InputError(f"cannot write to {target.parent}: {error.strerror}; choose another --out") from error
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {target}: {error}; nothing was changed there") from error
    finally:
        Path(temporary).unlink(missing_ok=True)  # gone already when the rename went through
    return target


def load(path: str | os.PathLike[str]) -> Patch:
    """Read a patch.

    Raises `InputError` when there is no such file, `PatchFileForeign` when it is something else,
    `PatchFileNewer` when a newer version of the format wrote it, and `PatchFileDamaged` when it is truncated,
    corrupted, or does not agree with its own header. Reads tensors only; nothing in the file is executed.
    """
    source = Path(path)
    if not source.is_file():
        raise InputError(f"there is no patch file at {source}")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_format(source, metadata)
            # Copied, as fresh memory: mapped tensors are aligned otherwise, and fail with the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise PatchFileDamaged(f"{source} is truncated or not a safetensors file: {error}") from error
    try:
        header = _header(json.loads(metadata["header"]))
        edits = unpacked(json.loads(metadata["sites"]), tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PatchFileDamaged(f"{source} does not agree with its own header: {error!r}; make it again") from error
    return Patch(header, edits)


def packed(edits: Mapping[Site, Edit]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Copies of all tensors by a name of their own, contiguous, and per site a row of plain data."""
    tensors: dict[str, Tensor] = {}
    rows = []
    for index, (site, edit) in enumerate(sorted(edits.items(), key=lambda item: item[0])):
        kind, parts, extra = _pack(edit)
        rows.append({**asdict(site), "edit": kind, **extra})
        tensors |= {f"{index}.{name}": part.detach().cpu().contiguous().clone() for name, part in parts.items()}
    return tensors, rows


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_format(source: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise PatchFileForeign(
            f"{source} is a safetensors file, but not a contextfold patch (format {metadata.get('format')!r}); "
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
    if value not in (0, 1) or isinstance(value, bool):
        raise ValueError(f"offset {value!r} is neither 0 nor 1")
    return int(value == 1)


def unpacked(rows: object, tensors: Mapping[str, Tensor]) -> dict[Site, Edit]:
    """The edits of `packed`. Raises `KeyError`, `TypeError` or `ValueError` where rows and tensors do not agree."""
    if not isinstance(rows, list):
        raise TypeError("sites are not a list")
    edits: dict[Site, Edit] = {}
    used: set[str] = set()
    for index, row in enumerate(rows):
        site = Site(
            layer=_typed(row["layer"], int),
            module=_typed(row["module"], str),
            parameter=_typed(row["parameter"], str),
            transposed=_typed(row["transposed"], bool),
            expert=None if row["expert"] is None else _typed(row["expert"], int),
            experts=_typed(row["experts"], int),
        )
        names = {part: f"{index}.{part}" for part in _TENSORS[_typed(row["edit"], str)]}
        parts = {part: _checked(tensors[name]) for part, name in names.items()}
        used |= set(names.values())
        if site in edits:
            raise ValueError(f"site {site.name} stands twice")
        edits[site] = _consistent(_UNPACK[row["edit"]](parts, row))
    if used != set(tensors):
        raise ValueError(f"tensors without a site: {sorted(set(tensors) - used)[:3]}")
    return edits


def _consistent(edit: Edit) -> Edit:
    match edit:
        case ScaleEdit(base, value, _) if base.shape != value.shape or base.dim() != 1:
            raise ValueError(f"scale {tuple(value.shape)} over base {tuple(base.shape)}")
        case BiasEdit(delta) if delta.dim() != 1:
            raise ValueError(f"bias of shape {tuple(delta.shape)}")
        case _:
            return edit


def _checked(tensor: Tensor) -> Tensor:
    if not tensor.dtype.is_floating_point or not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"a tensor of dtype {tensor.dtype} holds values that are not finite numbers")
    return tensor


def _typed(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, met {value!r}")
    return value


def _header(row: dict[str, Any]) -> Header:
    names = {f.name for f in fields(Header)}
    if set(row) != names:
        raise ValueError(f"header fields {sorted(set(row) ^ names)} are missing or unknown")
    read: dict[str, Any] = {name: tuple(_typed(v, int) for v in row[name]) for name in ("positions", "exact_at")}
    read["plan"] = tuple(_typed(v, str) for v in row["plan"])
    read["versions"] = {_typed(k, str): _typed(v, str) for k, v in dict(row["versions"]).items()}
    read["materialised"] = _typed(row["materialised"], bool)
    read |= {name: _typed(row[name], str) for name in names - set(read)}
    return Header(**read)
