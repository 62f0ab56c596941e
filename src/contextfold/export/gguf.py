"""A GGUF LoRA adapter for llama.cpp, for families whose maps keep their names' meaning and their order there."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, final

import numpy as np
import torch

from contextfold.errors import InputError, NotExportable, one_line
from contextfold.export.base import Exporter, Proof, Source
from contextfold.export.layout import refuse_scales
from contextfold.export.proof import gap, logits, rounding_gap
from contextfold.export.ranks import padded
from contextfold.lowrank import LowRank
from contextfold.patch import MatrixEdit, Patch, Site
from contextfold.runtime import Run, applied

__all__ = ["ARCHITECTURES", "GgufAdapter"]

FILE = "adapter.gguf"

ARCHITECTURES = {"llama": "llama"}
"""Model type -> architecture of llama.cpp, for the families that `make interop-llama` compares in llama.cpp itself."""

HEADER = struct.Struct("<4sIQQ")
"""Magic, version, number of tensors, number of entries."""

ENTRIES, LONGEST = 16, 2**16
"""Of a header, at most: entries, and bytes of a text. Ours has four."""

TEXT, FLOAT32 = 8, 6
"""Kinds of entries that ours has."""

REORDERED = ("attn_q", "attn_k", "attn_qkv")
"""Maps whose rows llama.cpp's converter moves."""


@final
@dataclass(frozen=True)
class GgufAdapter(Exporter):
    """Pairs of one rank, padded with zeros, in float32; the base may be quantised."""

    name: ClassVar[str] = "gguf"
    title: ClassVar[str] = "A GGUF adapter (LoRA, for llama.cpp)"

    def write(self, source: Source, folder: Path) -> Mapping[str, Any]:
        gguf = _library()
        refuse_scales(source.patch)
        names = _names(source, gguf)
        deltas = _deltas(source.patch)
        rank = max((delta.rank for delta in deltas.values()), default=0)
        if rank == 0:
            raise NotExportable("the patch edits no matrix, and a GGUF adapter is made of such; export a checkpoint")
        writer = gguf.GGUFWriter(folder / FILE, ARCHITECTURES[source.bound.model_type])
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))  # over the rank, which is the same for all: 1
        for site, delta in deltas.items():
            pair = padded(delta, rank)
            for part, tensor in (("lora_a", pair.A), ("lora_b", pair.B)):
                writer.add_tensor(f"{names[site]}.{part}", tensor.detach().cpu().float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return {"rank": rank, "tensors": 2 * len(deltas), "llama_cpp": f"--lora {FILE}"}

    def check(self, source: Source, folder: Path, probe: Run) -> Proof:
        """Read the file with the gguf library, and apply what it holds beside our own weights."""
        gguf = _library()
        names = _names(source, gguf)
        deltas = _deltas(source.patch)
        try:
            with (folder / FILE).open("rb") as file:
                _check_header(file, 2 * len(deltas), gguf.GGUF_VERSION)
            found = {t.name: torch.from_numpy(np.array(t.data)) for t in gguf.GGUFReader(folder / FILE).tensors}
        except (OSError, ValueError, LookupError, struct.error) as error:
            raise InputError(f"{folder / FILE} cannot be read ({one_line(error)}); export the patch again") from error
        read: dict[Site, LowRank] = {}
        for site, name in names.items():
            if {f"{name}.lora_a", f"{name}.lora_b"} <= found.keys():
                read[site] = LowRank(found[f"{name}.lora_b"], found[f"{name}.lora_a"])
        missing = tuple(site.name for site in deltas if site not in read or not _same(read[site], deltas[site]))
        held = replace(source.patch, edits={site: MatrixEdit(delta) for site, delta in read.items()})
        with applied(source.bound, source.patch) as model:
            ours = logits(model, probe)
        with applied(source.bound, held) as model:
            theirs = logits(model, probe)
        return Proof(
            target=self.name,
            loader=f"gguf {version('gguf')}",
            expected=len(deltas),
            matched=len(deltas) - len(missing),
            missing=missing,
            tokens=probe.ids.numel(),
            logit_gap=gap(theirs, ours),
            rounding_gap=rounding_gap(source.bound, source.patch, probe),
            base_gap=gap(logits(source.bound.model, probe), ours),
            remarks=(
                "The file was read back by the gguf library and applied beside our own weights; llama.cpp itself was "
                "not run. `make interop-llama` does.",
            ),
        )


def _check_header(file: BinaryIO, tensors: int, version: int) -> None:
    """Refuse what ours does not say: the reader believes any count, and makes lists as long.

    Raises `ValueError`, and `struct.error` where the file ends before.
    """
    magic, found, count, entries = HEADER.unpack(file.read(HEADER.size))
    if (magic, found) != (b"GGUF", version) or count > tensors or entries > ENTRIES:
        raise ValueError("its header is not that of the adapter")
    for _ in range(entries):
        _read_text(file)
        (kind,) = struct.unpack("<I", file.read(4))
        if kind == TEXT:
            _read_text(file)
        elif kind == FLOAT32:
            file.read(4)
        else:
            raise ValueError(f"its header has an entry of kind {kind}")


def _read_text(file: BinaryIO) -> None:
    (size,) = struct.unpack("<Q", file.read(8))
    if size > LONGEST:
        raise ValueError(f"its header has a text of {size} bytes")
    file.read(size)


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise InputError("writing a GGUF adapter needs the package gguf; run: pip install gguf") from error
    return gguf


def _deltas(patch: Patch) -> dict[Site, LowRank]:
    return {site: edit.delta for site, edit in patch.edits.items() if isinstance(edit, MatrixEdit)}


def _names(source: Source, gguf: Any) -> dict[Site, str]:
    """The name of each edited weight in llama.cpp. Raises `NotExportable` where there is none, or another order."""
    model_type = source.bound.model_type
    if model_type not in ARCHITECTURES:
        raise NotExportable(
            f"GGUF adapters are written for {', '.join(ARCHITECTURES)}, which `make interop-llama` compares in "
            f"llama.cpp itself, and not for {model_type!r}; export to PEFT or a checkpoint, and convert that"
        )
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[model_type])
    table = gguf.get_tensor_name_map(arch, len(source.bound.blocks))
    names = {}
    for site in _deltas(source.patch):
        name = table.get_name(f"{site.module}.{site.parameter}", (".weight",))
        if name is None or site.expert is not None or site.transposed or any(word in name for word in REORDERED):
            raise NotExportable(f"{site.name} is no plain map of llama.cpp's {arch.name.lower()}; export to PEFT")
        names[site] = name
    return names


def _same(read: LowRank, delta: LowRank) -> bool:
    pair = padded(delta.to(torch.float32), read.rank)
    return torch.equal(read.B, pair.B.cpu()) and torch.equal(read.A, pair.A.cpu())
