"""A folder that plain `AutoModelForCausalLM.from_pretrained` loads: the patch written into the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from contextfold.anatomy.wrapped import device_of, is_offloaded, value_of
from contextfold.errors import NotExportable, one_line
from contextfold.export.base import Exporter, Proof, Source
from contextfold.export.proof import gap, logits, rounding_gap
from contextfold.export.rounding import lost, write_float32
from contextfold.incoming import UNREADABLE
from contextfold.runtime import Run, materialised

__all__ = ["Checkpoint"]

LOST = Path("rounding") / "lost.safetensors"
"""In a folder of its own: servers read every safetensors file that lies beside the weights."""


@final
@dataclass(frozen=True)
class Checkpoint(Exporter):
    """Weights in the storage dtype, sharded at `shard_size` (as transformers writes it: `2GB`)."""

    name: ClassVar[str] = "checkpoint"
    title: ClassVar[str] = "A checkpoint"

    shard_size: str = "4GB"

    def write(self, source: Source, folder: Path) -> Mapping[str, Any]:
        """transformers writes its own format; tied weights stay tied, since edits never touch them.

        Where the storage dtype is narrower than float32, what rounding took from the edited parameters is written
        beside them, in float32: the sum of both is the patched weight.
        """
        model: Any = source.bound.model
        with _refusals("cannot be written"), _quiet(), materialised(source.bound, source.patch):
            model.save_pretrained(folder, max_shard_size=self._shard(model))
            if source.save_tokenizer is not None:
                source.save_tokenizer(str(folder))
        narrow = torch.finfo(source.bound.dtype).bits < torch.finfo(torch.float32).bits
        largest: list[float] = []
        if narrow:
            (folder / LOST).parent.mkdir()
            write_float32(folder / LOST, source, lambda part: largest.append(float(part.abs().max())))
        else:
            largest += [float(part.abs().max()) for _, part in lost(source)]
        return {
            "edited_parameters": len(largest),
            "largest_rounding": max(largest, default=0.0),
            "rounding_file": LOST.as_posix() if narrow else None,
        }

    def _shard(self, model: nn.Module) -> str | int:
        """A file is put together in memory; so where weights are kept out of it, a file is as large as the largest."""
        if not any(is_offloaded(module) for module in model.modules()):
            return self.shard_size
        return max(p.nbytes for p in model.parameters())

    def check(self, source: Source, folder: Path, probe: Run) -> Proof:
        """Load with transformers, compare every tensor bit by bit, and the logits."""
        model: Any = source.bound.model
        with _refusals("cannot be loaded"), _quiet():
            loaded = _load(model, folder)
            found = logits(loaded, probe)
        held = loaded.state_dict().keys()
        with materialised(source.bound, source.patch):
            ours = logits(model, probe)
            names = model.state_dict().keys()
            wrong = tuple(name for name in names if name not in held or not _same(loaded, model, name))
            total = len(names)
        if _ties(loaded) != _ties(model):
            wrong = (*wrong, "tied embeddings")
            total += 1
        return Proof(
            target=self.name,
            loader=f"transformers {version('transformers')}",
            expected=total,
            matched=total - len(wrong),
            missing=wrong,
            tokens=probe.ids.numel(),
            logit_gap=gap(found, ours),
            rounding_gap=rounding_gap(source.bound, source.patch, probe),
            base_gap=gap(logits(model, probe), ours),
        )


def _load(model: Any, folder: Path) -> Any:
    """The folder as a model, run by the same implementations as the one that it came from, and placed as it is."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    loaded, report = factory.from_pretrained(
        str(folder), dtype="auto", trust_remote_code=False, use_safetensors=True, local_files_only=True,
        output_loading_info=True, device_map=vars(model).get("hf_device_map"),
        attn_implementation=model.config._attn_implementation,
    )  # fmt: skip
    if report["missing_keys"]:
        raise ValueError(f"{len(report['missing_keys'])} parameters are missing, {min(report['missing_keys'])} first")
    loaded.set_experts_implementation(model.get_experts_implementation())
    return loaded.eval() if "hf_device_map" in vars(model) else loaded.to(device_of(model)).eval()


def _same(loaded: nn.Module, model: nn.Module, name: str) -> bool:
    """Equal bit by bit, so that a NaN or a signed zero counts as what it is."""
    with value_of(loaded, name) as found, value_of(model, name) as wanted:
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return False
        return bool(torch.equal(_bits(found), _bits(wanted)))


def _bits(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _ties(model: nn.Module) -> set[tuple[str, str]]:
    """Pairs of names that share one parameter; where weights come for a call, as the model itself says."""
    if any(is_offloaded(module) for module in model.modules()):
        return set(vars(model).get("all_tied_weights_keys", {}).items())
    first: dict[int, str] = {}
    return {
        (first.setdefault(id(parameter), name), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise NotExportable(
            f"the checkpoint {what} by transformers {version('transformers')}: {one_line(error)}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers inside, nor warnings that weights lie elsewhere; as it was afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    placing = getLogger("accelerate.big_modeling")
    level = placing.level
    placing.setLevel(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
            yield
    finally:
        placing.setLevel(level)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
