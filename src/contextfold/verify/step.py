"""The proof for one token: patched, unpatched, perturbed, and controls, all against the in-context logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound
from contextfold.errors import InputError
from contextfold.fold import SINK, Folded, LayerReport, Spans, Split, digest, fold_token, split, token_targets
from contextfold.patch import Patch, ScaleEdit
from contextfold.runtime import applied, materialised, recording, run
from contextfold.verify.controls import negative_controls
from contextfold.verify.metrics import Comparison, compare, margin

__all__ = ["Step", "prove_patch", "prove_token", "rounding_noise"]


@dataclass(frozen=True)
class Step:
    """One folded token."""

    in_context: int
    """Token id that the in-context model prefers."""
    margin: float
    """By how many logits it does."""
    written: Comparison
    """The patch written into the weights, unmodified model."""
    action: Comparison
    """The patch as a low-rank action beside the weights (solved as such, where it is solved here)."""
    perturbed: Comparison
    """The written patch with the embeddings off by one rounding: how fragile the exactness is."""
    unpatched: Comparison
    scatter: Comparison
    """The in-context model with its cache, against itself without."""
    controls: Mapping[str, Comparison]
    max_abs_dm: float
    patch_bytes: int
    layers: tuple[LayerReport, ...]
    top: Mapping[str, tuple[tuple[int, float], ...]]
    """Five first tokens with their probability: `in_context`, `unpatched`, `patched`."""
    prompt: int = 0
    """Which of the prompts it belongs to."""


def prove_token(
    bound: Bound,
    context: Tensor,
    query: Tensor,
    cached: Tensor,
    *,
    keep: Spans = SINK,
    rule: str,
    fallback: str | None = None,
    with_controls: bool = True,
    other: Tensor | None = None,
) -> tuple[Step, Patch]:
    """Fold one token and test the patch in every way.

    `cached (V,)`: in-context logits from a cached run. `other`: another context for the control, random tokens
    when None. Raises what `fold_token` raises.
    """
    targets = token_targets(bound, context, query)
    folded = fold_token(bound, context, query, keep=keep, rule=rule, fallback=fallback, targets=targets)
    action = fold_token(bound, context, query, keep=keep, rule=rule, fallback=fallback, written=False, targets=targets)
    controls: Mapping[str, Comparison] = {}
    if with_controls:
        controls = negative_controls(bound, folded, context, query, keep, rule, fallback, other)
    return _tested(bound, folded, action.patch, cached, controls), folded.patch


def prove_patch(
    bound: Bound, patch: Patch, context: Tensor, query: Tensor, cached: Tensor, *, keep: Spans, rule: str,
    other: Tensor | None = None,
) -> Step:  # fmt: skip
    """Test a patch that exists already, as written and as action, on the tokens that it was folded for.

    Raises `InputError` when it was folded for other tokens, positions or kept spans, and `PatchMismatch` for
    another model.
    """
    parts = split(bound, context, query, keep, "absolute")
    check_tokens(parts, patch)
    with recording(bound.blocks, slice(-1, None), "y") as wanted:
        in_context = run(bound.model, parts.full)[0]
    with materialised(bound, patch), recording(bound.blocks, slice(-1, None), "y") as got:
        run(bound.model, parts.reduced)
    layers = tuple(
        _measured(bound, patch, i, got[i]["y"][0].double(), wanted[i]["y"][0].double())
        for i in range(len(bound.blocks))
    )
    folded = Folded(patch, parts, in_context, layers)
    controls = negative_controls(bound, folded, context, query, keep, rule, None, other)
    return _tested(bound, folded, patch, cached, controls)


def check_tokens(parts: Split, patch: Patch) -> None:
    """Refuse tokens that the patch was not folded for. Raises `InputError`."""
    if digest(parts.reduced) != patch.header.tokens_digest or digest(parts.full) != patch.header.context_digest:
        raise InputError(
            "the patch was folded for another context, query or kept span (the digests of the token ids differ); "
            "give the texts and --keep that it was made with"
        )


def _measured(bound: Bound, patch: Patch, layer: int, y: Tensor, y_C: Tensor) -> LayerReport:
    """What a stored patch does at one layer; what only the solve knew is not a number."""
    unknown = float("nan")
    sizes = bound.weights.sizes
    mine = patch.select([layer])
    ratios = [e.size() / sizes[s] for s, e in mine.edits.items() if s in sizes]
    scales = [e for e in mine.edits.values() if isinstance(e, ScaleEdit)]
    return LayerReport(
        layer=layer,
        relative_error=float((y - y_C).norm() / y_C.norm()),
        absolute_error=float((y - y_C).abs().max()),
        weight_ratio=max(ratios, default=0.0),
        max_abs_dm=mine.max_abs_dm,
        min_abs_u=unknown,
        min_abs_m=min((float(e.base.abs().min()) for e in scales), default=unknown),
        cos_z=unknown,
        condition=unknown,
        findings=(),
    )


def _tested(bound: Bound, folded: Folded, action: Patch, cached: Tensor, controls: Mapping[str, Comparison]) -> Step:
    reduced, wanted = folded.split.reduced, folded.in_context
    with materialised(bound, folded.patch) as model:
        written = run(model, reduced)[0]
        with rounding_noise(model):
            perturbed = run(model, reduced)[0]
    with applied(bound, action) as model:
        acting = run(model, reduced)[0]
    unpatched = run(bound.model, reduced)[0]
    return Step(
        in_context=int(wanted.argmax()),
        margin=margin(wanted),
        written=compare(wanted, written),
        action=compare(wanted, acting),
        perturbed=compare(wanted, perturbed),
        unpatched=compare(wanted, unpatched),
        scatter=compare(wanted, cached),
        controls=controls,
        max_abs_dm=folded.patch.max_abs_dm,
        patch_bytes=folded.patch.nbytes,
        layers=folded.layers,
        top={"in_context": _top(wanted), "unpatched": _top(unpatched), "patched": _top(written)},
    )


def _top(logits: Tensor) -> tuple[tuple[int, float], ...]:
    best = torch.softmax(logits.double(), 0).topk(min(5, logits.numel()))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@contextmanager
def rounding_noise(model: nn.Module) -> Iterator[None]:
    """Every embedding entry off by a random relative amount of the dtype's machine epsilon, seed fixed.

    An exact patch may still amplify rounding: what other kernels, another machine or a cached run would do to it
    is measured rather than hoped for.
    """

    def shake(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(output.shape, generator=generator).to(output.device)
        return (output.double() * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(shake)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()
