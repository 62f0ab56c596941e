"""A ceiling on memory: which weights stay, which are read from their files at every call, and what was really used.

A model may be several times larger than the ceiling. Its linear maps and its vocabulary then stay in the safetensors
files that they came in, and accelerate brings each of them for the time of one call, mapped from the file and not
copied. What is kept besides the weights is a matter of the work: activations, solves, the patch.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from contextfold.errors import InputError
from contextfold.incoming import laid_out

__all__ = [
    "Placement",
    "peak_memory",
    "place",
    "proc_status",
    "read_size",
    "reset_peak",
    "size_text",
    "used_memory",
]

UNITS: dict[str, int] = {"": 1, "B": 1, **{f"{p}B": 1000**k for k, p in enumerate("KMGT", 1)}}
UNITS |= {f"{p}IB": 1024**k for k, p in enumerate("KMGT", 1)}
"""Bytes per unit, in capitals."""

MARGIN = 128 * 2**20
"""Bytes for code that is imported later and for the activations of a short text, whatever the model."""

GRAIN = 16 * 2**20
"""A ceiling that is asked for instead is rounded up to a multiple of this, since processes differ by a few MiB."""


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model lie under a ceiling. Sizes in bytes."""

    ceiling: int
    """What the whole process may use at its peak."""
    resident: int
    """Weights that stay in memory."""
    streamed: int
    """Weights that are read from their files at every call."""
    needed: int
    """The smallest ceiling under which the model can be loaded in this process."""
    device_map: Mapping[str, str] = field(repr=False)
    """Of every module with weights or buffers of its own: `cpu` or `disk`."""


def read_size(text: str) -> int:
    """`8GiB`, `500MB`, `1.5 gib` or plain bytes. Raises `InputError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE | re.ASCII)
    if match is None or match[2].upper() not in UNITS or not float(match[1]):
        raise InputError(f"the size {text!r} is not one: write bytes, or a number with a unit, like 8GiB or 500MB")
    return math.ceil(float(match[1]) * UNITS[match[2].upper()])


def size_text(size: int) -> str:
    """In MiB, or in GiB from 10 GiB on."""
    return f"{size / 2**30:.1f} GiB" if size >= 10 * 2**30 else f"{math.ceil(size / 2**20)} MiB"


def used_memory() -> int:
    """Bytes of this process that are in memory now, mapped files included."""
    return proc_status("VmRSS") or peak_memory() or 0


def peak_memory() -> int | None:
    """The most bytes of this process that were ever in memory at once, mapped files included; None where the system
    does not say."""
    found = proc_status("VmHWM")
    if found is not None or importlib.util.find_spec("resource") is None:
        return found
    import resource

    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def proc_status(name: str) -> int | None:
    """A figure of Linux's /proc/self/status, bytes; None on other systems."""
    path = Path("/proc/self/status")
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE) if path.exists() else None
    return None if found is None else int(found[1]) * 1024


def reset_peak() -> None:
    """Linux forgets the peak of a process when told so; elsewhere the peak since the start stands."""
    file = Path("/proc/self/clear_refs")
    if file.exists():
        file.write_text("5")


def place(name: str, source: str, dtype: torch.dtype, ceiling: int, **options: Any) -> Placement:
    """Where the weights of `source` (a folder or hub id, called `name` in messages) lie under a ceiling of bytes.

    The process takes `used` by itself. At work it needs, besides: what cannot leave memory (norms, biases, stacks of
    experts, parameters that are no maps); the largest matrix, mapped; the largest map of a layer twice, in float32 or
    wider, for an edit that is merged into it and for reading it wide; and `MARGIN`. Half of what is left then holds
    weights, in the order of the layers and the vocabulary last; the other half is for activations, solves and patches.

    Raises `InputError` where this is not possible, with the smallest ceiling that would do.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise InputError(
            "a ceiling on memory needs the package accelerate, which is not installed; run: "
            "pip install 'contextfold[offload]'"
        )
    skeleton = _skeleton(source, dtype, options)
    import accelerate.big_modeling  # noqa: F401  # what it takes is part of what the process takes

    movable, stuck = _parts(skeleton)
    small = sum(tensor.nbytes for tensors in stuck.values() for tensor in tensors)
    sizes = {owner: sum(p.nbytes for p in module.parameters()) for owner, module in movable.items()}
    wide = torch.promote_types(dtype, torch.float32).itemsize
    edited = max((m.weight.numel() * wide for m in movable.values() if not isinstance(m, nn.Embedding)), default=0)
    needed = used_memory() + MARGIN + small + max(sizes.values(), default=0) + 2 * edited
    needed = max(needed, peak_memory() or 0)
    if ceiling < needed:
        smallest = math.ceil(needed / GRAIN + 1) * GRAIN
        raise InputError(
            f"a ceiling of {size_text(ceiling)} is too small for {name!r}: this process takes "
            f"{size_text(used_memory())} without weights, {size_text(small)} cannot leave memory, and its largest "
            f"matrix of {size_text(max(sizes.values(), default=0))} has to come in to be read and edited; the smallest "
            f"that will do is --max-memory {smallest // 2**20}MiB"
        )
    groups = _tied(skeleton, sizes)
    kept = _kept(skeleton, groups, sizes, (ceiling - needed) // 2)
    device_map = {owner: "cpu" if owner in kept else "disk" for owner in sizes} | dict.fromkeys(stuck, "cpu")
    resident = sum(sizes[group[0]] for group in groups if group[0] in kept)
    return Placement(ceiling, small + resident, sum(sizes[g[0]] for g in groups) - resident, needed, device_map)


def _skeleton(source: str, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    """The model without weights. Raises what transformers raises, and `InputError` for quantised weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(
            "the weights are quantised, and only plain ones can be left in their files; load the model without a "
            "ceiling, or give its unquantised weights"
        )
    return laid_out(config, dtype=dtype)


def _parts(skeleton: nn.Module) -> tuple[dict[str, Any], dict[str, list[torch.Tensor]]]:
    """Modules that can be brought for a call, and the tensors of those that cannot, by the names of modules.

    Of modules with a parameter and with modules inside, the whole stays: it would be brought as a whole. So does a
    mixture of experts, routers and shared experts included, since its edits are lent by writing them in memory.
    """
    movable: dict[str, Any] = {}
    stuck: dict[str, list[torch.Tensor]] = {}
    mixtures = _mixtures(skeleton)
    for name, module in skeleton.named_modules():
        if any(name.startswith(f"{outer}.") for outer in stuck):
            continue
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if name not in mixtures and _is_movable(module):
            movable[name] = module
        elif own or name in mixtures:
            stuck[name] = [*module.parameters(), *module.buffers()]
    return movable, stuck


def _mixtures(skeleton: nn.Module) -> set[str]:
    """Modules in which experts stand, told by their stacked parameters."""
    stacks = (
        name
        for name, module in skeleton.named_modules()
        if not isinstance(module, nn.modules.conv._ConvNd)
        and any(p.dim() > 2 for p in module.parameters(recurse=False))
    )
    return {name.rpartition(".")[0] for name in stacks}


def _is_movable(module: nn.Module) -> bool:
    """Linear maps and embeddings: nobody but their own call reads their weight. No maps with a forward of their own."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"


def _kept(skeleton: Any, groups: Sequence[Sequence[str]], sizes: Mapping[str, int], room: int) -> set[str]:
    """Owners of weights that fit into `room` bytes, layers first. A model reads all of them in turn, over and over, so
    it does not matter which; but of an embedding a call reads a few rows. Tied weights count once, and stay together.
    """
    kept: set[str] = set()
    for group in sorted(groups, key=lambda group: any(_is_vocabulary(skeleton, name) for name in group)):
        size = sizes[group[0]]
        if size <= room:
            kept.update(group)
            room -= size
    return kept


def _is_vocabulary(skeleton: Any, name: str) -> bool:
    module = skeleton.get_submodule(name)
    return isinstance(module, nn.Embedding) or module is skeleton.get_output_embeddings()


def _tied(skeleton: Any, names: Iterable[str]) -> list[list[str]]:
    """Owners in their order, those that share a weight together."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(id(skeleton.get_submodule(name).weight), []).append(name)
    return list(groups.values())
