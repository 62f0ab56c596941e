"""A folder that plain `AutoModelForCausalLM.from_pretrained` loads: the patch written into the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from contextfold.errors import NotExportable
from contextfold.export.base import Exporter, Proof, Source
from contextfold.export.proof import gap, logits, rounding_gap
from contextfold.runtime import Run, materialised

__all__ = ["Checkpoint"]

LOST = Path("rounding") / "lost.safetensors"
"""In a folder of its own: servers read every safetensors file that lies beside the weights."""

REFUSALS = (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, NotImplementedError, ImportError)
"""What transformers was seen to raise for models that it cannot write or read back."""


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
        with _refusals("cannot be written"), _no_bars(), materialised(source.bound, source.patch):
            model.save_pretrained(folder, max_shard_size=self.shard_size)
            if source.save_tokenizer is not None:
                source.save_tokenizer(str(folder))
            written = {name: model.get_parameter(name).data for name in _touched(source)}
        lost = _lost(source, written)
        narrow = torch.finfo(source.bound.dtype).bits < torch.finfo(torch.float32).bits
        if narrow:
            (folder / LOST).parent.mkdir()
            save_file(lost, folder / LOST, metadata={"format": "pt"})
        return {
            "edited_parameters": len(written),
            "largest_rounding": max((float(t.abs().max()) for t in lost.values()), default=0.0),
            "rounding_file": LOST.as_posix() if narrow else None,
        }

    def check(self, source: Source, folder: Path, probe: Run) -> Proof:
        """Load with transformers, compare every tensor bit by bit, and the logits."""
        model: Any = source.bound.model
        with _refusals("cannot be loaded"), _no_bars():
            loaded = _load(model, folder)
            found = logits(loaded, probe)
        state = loaded.state_dict()
        with materialised(source.bound, source.patch):
            ours = logits(model, probe)
            wrong = tuple(name for name, value in model.state_dict().items() if not _same(state.get(name), value))
            total = len(model.state_dict())
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


def _touched(source: Source) -> dict[str, None]:
    return dict.fromkeys(f"{site.module}.{site.parameter}" for site in source.patch.edits)


def _lost(source: Source, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`exact − stored` per edited parameter, float32; the exact sum in float64."""
    exact = {name: source.bound.model.get_parameter(name).data.double() for name in written}
    for site, edit in source.patch.edits.items():
        name = f"{site.module}.{site.parameter}"
        exact[name] = edit.merged(exact[name], site)
    return {name: (exact[name] - stored.double()).float().cpu().contiguous() for name, stored in written.items()}


def _load(model: Any, folder: Path) -> Any:
    """The folder as a model, run by the same implementations as the one that it came from."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    loaded, report = factory.from_pretrained(
        str(folder), dtype="auto", trust_remote_code=False, use_safetensors=True, local_files_only=True,
        output_loading_info=True,
        attn_implementation=model.config._attn_implementation,
    )  # fmt: skip
    if report["missing_keys"]:
        raise ValueError(f"{len(report['missing_keys'])} parameters are missing, {min(report['missing_keys'])} first")
    loaded.set_experts_implementation(model.get_experts_implementation())
    return loaded.to(next(model.parameters()).device).eval()


def _same(found: Tensor | None, wanted: Tensor) -> bool:
    """Equal bit by bit, so that a NaN or a signed zero counts as what it is."""
    if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return bool(torch.equal(_bits(found), _bits(wanted)))


def _bits(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _ties(model: nn.Module) -> set[tuple[str, str]]:
    """Pairs of names that share one parameter."""
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
    except REFUSALS as error:
        raise NotExportable(
            f"the checkpoint {what} by transformers {version('transformers')}: {' '.join(str(error).split())}"
        ) from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """No progress bars of transformers inside; as it was afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
