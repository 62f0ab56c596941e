"""The proof for one static patch over a whole sequence: every position, controls, and what it does to other text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound, bind
from contextfold.files import plain
from contextfold.fold import FoldedSequence, PatchSites, SequenceLayer, fold_sequence, sites_of, split
from contextfold.notebook import card, short
from contextfold.patch import Patch
from contextfold.runtime import Run, applied, materialised, run
from contextfold.verify.controls import RANDOM, other_tokens, random_like, wrong_contexts
from contextfold.verify.metrics import Comparison, compare, margin
from contextfold.verify.receipt import receipt_of
from contextfold.verify.step import check_tokens, rounding_noise
from contextfold.verify.suite import Prompt, Settings
from contextfold.verify.verdict import CONTROL_FACTOR, EXACT

__all__ = ["FOLDS", "SequenceVerdict", "fold_and_prove_sequence", "verify_sequence_patch"]

FOLDS = 4
"""A proof takes so many: written, as action, for another context, and for a shuffled one."""

Compared = tuple[Comparison, ...]
"""One comparison per position."""


@dataclass(frozen=True)
class SequenceVerdict:
    """What one static patch proved over a sequence. Gaps are in logits, divergences in nats."""

    model: str
    dtype: torch.dtype
    protocol: str
    sites: PatchSites
    positions: tuple[int, ...]
    """Absolute positions of the query tokens that were compared."""
    tokens: tuple[int, ...]
    """The query tokens there, as ids."""
    in_context: tuple[int, ...]
    """Token ids that the in-context model prefers next."""
    margins: tuple[float, ...]
    """By how many logits it does."""
    written: Compared
    action: Compared
    perturbed: Compared
    unpatched: Compared
    controls: Mapping[str, Compared]
    elsewhere: Compared
    """The patched model against the unpatched one on other text, which the patch was not made for."""
    layers: tuple[SequenceLayer, ...]
    max_abs_dm: float
    patch_bytes: int
    receipt: Mapping[str, Any]

    @property
    def worst_logit_gap(self) -> float:
        return max(_gaps(self.written))

    @property
    def unpatched_logit_gap(self) -> float:
        """Largest over the positions, without the patch."""
        return max(_gaps(self.unpatched))

    @property
    def drift(self) -> float:
        """Mean KL(unpatched ‖ patched) per token of other text, in nats."""
        return statistics.mean(c.kl_nats for c in self.elsewhere)

    def reasons(self) -> list[str]:
        """Why the verdict is not `proven`; empty when it is."""
        found = []
        if _matches(self.written) < len(self.written):
            found.append(f"top-1 agrees at {_matches(self.written)} of {len(self.written)} positions")
        limit = EXACT[self.dtype] * self.unpatched_logit_gap
        if not self.worst_logit_gap <= limit:
            found.append(f"the worst logit gap {self.worst_logit_gap:.3g} exceeds {limit:.3g}")
        for name, compared in self.controls.items():
            middle = statistics.median(_gaps(compared))
            if not middle > CONTROL_FACTOR * self.worst_logit_gap:
                found.append(f"control {name} comes as close as {middle:.3g} in the median")
        return found

    @property
    def proven(self) -> bool:
        return not self.reasons()

    def sentence(self) -> str:
        """The verdict in words, with what the patch costs elsewhere."""
        numbers = (
            f"one static patch, {_matches(self.written)} of {len(self.written)} positions agree, worst logit gap "
            f"{self.worst_logit_gap:.2g} (up to {self.unpatched_logit_gap:.3g} without the patch)"
        )
        cost = f" On other text it moves the model by {self.drift:.2g} nats per token: it is for this sequence only."
        if self.proven:
            return f"Proven: {numbers}; every negative control misses by far.{cost}"
        return f"Not proven: {numbers}; " + "; ".join(self.reasons()) + f".{cost}"

    def _repr_html_(self) -> str:
        """The runs and the controls, for a notebook."""
        runs = {
            "patched: weights written": self.written, "patched: beside the weights": self.action,
            "patched, input off by a rounding": self.perturbed, "without the patch (control)": self.unpatched,
            **{f"{name.replace('_', ' ')} (control)": compared for name, compared in self.controls.items()},
        }  # fmt: skip
        rows = [
            (name, short(max(_gaps(c))), short(statistics.median(_gaps(c))), f"{_matches(c)} / {len(c)}")
            for name, c in runs.items()
        ]
        title = f"{self.model}, {str(self.dtype).removeprefix('torch.')}, one static patch"
        return card(title, self.sentence(), ("run", "worst gap", "median gap", "same first token"), rows, self.proven)

    def to_json(self) -> dict[str, Any]:
        """Stable keys; documented in `docs/json.md`."""
        found = {
            "model": self.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "protocol": self.protocol,
            "sites": self.sites,
            "proven": self.proven,
            "verdict": self.sentence(),
            "tokens": len(self.written),
            "top1_matches": _matches(self.written),
            "worst_logit_gap": self.worst_logit_gap,
            "median_logit_gap": statistics.median(_gaps(self.written)),
            "unpatched_logit_gap": self.unpatched_logit_gap,
            "unpatched_top1_matches": _matches(self.unpatched),
            "max_abs_dm": self.max_abs_dm,
            "materialised": True,
            "action_worst_logit_gap": max(_gaps(self.action)),
            "perturbed_top1_matches": _matches(self.perturbed),
            "perturbed_worst_logit_gap": max(_gaps(self.perturbed)),
            "controls": {name: _summary(compared) for name, compared in self.controls.items()},
            "elsewhere": {
                **_summary(self.elsewhere),
                "mean_kl_nats": statistics.mean(c.kl_nats for c in self.elsewhere),
            },
            "positions": self._position_rows(),
            "layers": [_layer_row(layer) for layer in self.layers],
            "patch_bytes": self.patch_bytes,
            "receipt": dict(self.receipt),
        }
        return plain(found)

    def _position_rows(self) -> list[dict[str, Any]]:
        rows = zip(
            self.positions, self.tokens, self.in_context, self.margins, self.written, self.unpatched, strict=True
        )
        return [
            {
                "position": where,
                "token": token,
                "in_context": wanted,
                "unpatched": without.top1,
                "patched": patched.top1,
                "in_context_margin": ahead,
                "top1_match": patched.top1_match,
                "margin": patched.margin,
                "logit_gap": patched.logit_gap,
                "kl_nats": patched.kl_nats,
                "unpatched_logit_gap": without.logit_gap,
                "unpatched_kl_nats": without.kl_nats,
                "unpatched_top1_match": without.top1_match,
            }
            for where, token, wanted, ahead, patched, without in rows
        ]


def fold_and_prove_sequence(
    model: Bound | nn.Module,
    prompt: Prompt,
    settings: Settings = Settings(),
    *,
    at: Sequence[int] | None = None,
    sites: PatchSites = "output",
    typical: Tensor | None = None,
    strict: bool = False,
    store: Path | None = None,
    progress: Callable[[SequenceLayer], None] = lambda layer: None,
) -> tuple[Patch, SequenceVerdict]:
    """One static patch for the query of `prompt`, all positions or those `at`, and its verdict with controls.

    `settings.other` serves as the other context, and as the text on which the cost elsewhere is measured. `progress` is
    called with every layer of the `FOLDS` folds that this takes. `store` is a folder in which each of them has one for
    what it has solved. Raises what `fold_sequence` raises.
    """
    bound = model if isinstance(model, Bound) else bind(model)
    context, query = prompt.at(torch.empty(0, dtype=torch.int64))
    arguments: dict[str, Any] = {
        "keep": prompt.keep, "at": at, "sites": sites, "typical": typical, "strict": strict, "progress": progress,
    }  # fmt: skip
    folded = fold_sequence(bound, context, query, store=_inside(store, "written"), **arguments)
    action = fold_sequence(bound, context, query, store=_inside(store, "action"), written=False, **arguments).patch
    return folded.patch, _prove(bound, folded, action, prompt, settings, arguments, store)


def _inside(folder: Path | None, fold: str) -> Path | None:
    """Where one of the folds of a proof keeps what it has solved, if anywhere."""
    return None if folder is None else folder / fold


def verify_sequence_patch(
    bound: Bound, patch: Patch, prompt: Prompt, settings: Settings = Settings()
) -> SequenceVerdict:
    """Put a stored patch for a sequence to the test, at the positions for which it claims to be exact, or at all.

    Raises `InputError` for other tokens and `PatchMismatch` for another model or other weights.
    """
    context, query = prompt.at(torch.empty(0, dtype=torch.int64))
    parts = split(bound, context, query, prompt.keep)
    check_tokens(parts, patch)
    in_context = run(bound.model, parts.full, last=query.numel())
    exact = set(patch.header.exact_at)
    at = [i for i, where in enumerate(parts.reduced.positions[-query.numel() :].tolist()) if where in exact]
    folded = FoldedSequence(patch, parts, in_context, ())
    arguments = {"keep": prompt.keep, "at": at or None, "sites": sites_of(patch.header.plan)}
    return _prove(bound, folded, patch, prompt, settings, arguments)


def _prove(
    bound: Bound,
    folded: FoldedSequence,
    action: Patch,
    prompt: Prompt,
    settings: Settings,
    arguments: Mapping[str, Any],
    store: Path | None = None,
) -> SequenceVerdict:
    context, query = prompt.at(torch.empty(0, dtype=torch.int64))
    n = query.numel()
    at = arguments["at"]
    chosen = slice(None) if at is None else sorted(set(at))
    other = settings.other if settings.other is not None else other_tokens(context, prompt.keep, bound.vocabulary)
    reduced, wanted = folded.split.reduced, folded.in_context[chosen]

    def met(edited: nn.Module) -> Compared:
        """Compared at once: the logits of all positions are large, and only one set besides the wanted is held."""
        return _all(wanted, run(edited, reduced, last=n)[chosen])

    with materialised(bound, folded.patch) as edited:
        written = met(edited)
        with rounding_noise(edited):
            perturbed = met(edited)
    with applied(bound, action) as acting:
        acted = met(acting)
    positions = tuple(reduced.positions[-n:][chosen].tolist())
    return SequenceVerdict(
        model=settings.name or bound.model_type,
        dtype=bound.dtype,
        protocol=settings.protocol,
        sites=arguments["sites"],
        positions=positions,
        tokens=tuple(query[chosen].tolist()),
        in_context=tuple(wanted.argmax(-1).tolist()),
        margins=tuple(map(margin, wanted)),
        written=written,
        action=acted,
        perturbed=perturbed,
        unpatched=met(bound.model),
        controls=_controls(bound, folded, prompt, other, arguments, met, store),
        elsewhere=_elsewhere(bound, folded.patch, other),
        layers=tuple(_at(positions, folded.patch, layer) for layer in folded.layers),
        max_abs_dm=folded.patch.max_abs_dm,
        patch_bytes=folded.patch.nbytes,
        receipt=receipt_of(bound),
    )


def _at(positions: Sequence[int], patch: Patch, layer: SequenceLayer) -> SequenceLayer:
    """Without the sink, which is always solved for and rarely asked about."""
    rows = dict(zip(patch.header.exact_at, layer.actions, strict=True))
    return replace(layer, actions=tuple(rows[position] for position in positions))


def _elsewhere(bound: Bound, patch: Patch, other: Tensor) -> Compared:
    """What the patch does to text that it was not made for."""
    text, count = Run(other, torch.arange(other.numel())), other.numel()
    base = run(bound.model, text, last=count)
    with materialised(bound, patch) as edited:
        return _all(base, run(edited, text, last=count))


def _controls(
    bound: Bound,
    folded: FoldedSequence,
    prompt: Prompt,
    other: Tensor,
    arguments: Mapping[str, Any],
    met: Callable[[nn.Module], Compared],
    store: Path | None,
) -> dict[str, Compared]:
    """What wrong patches do, one after the other, so that no two of them are held."""
    context, query = prompt.at(torch.empty(0, dtype=torch.int64))
    asked = dict(arguments) | {"strict": False}

    def judged(patch: Patch) -> Compared:
        with materialised(bound, patch) as edited:
            return met(edited)

    found = {
        name: judged(fold_sequence(bound, tokens, query, store=_inside(store, name), **asked).patch)
        for name, tokens in wrong_contexts(context, prompt.keep, bound.vocabulary, other).items()
    }
    return {**found, RANDOM: judged(random_like(folded.patch))}


def _all(wanted: Tensor, logits: Tensor) -> Compared:
    return tuple(compare(p, q) for p, q in zip(wanted, logits, strict=True))


def _gaps(compared: Compared) -> list[float]:
    return [c.logit_gap for c in compared]


def _matches(compared: Compared) -> int:
    return sum(c.top1_match for c in compared)


def _summary(compared: Compared) -> dict[str, float]:
    gaps = _gaps(compared)
    return {
        "tokens": len(compared),
        "top1_matches": _matches(compared),
        "smallest_logit_gap": min(gaps),
        "median_logit_gap": statistics.median(gaps),
    }


def _layer_row(layer: SequenceLayer) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return value if value == value else None

    return {
        "layer": layer.layer,
        "rank": layer.rank,
        "condition": number(layer.condition),
        "weight_ratio": layer.weight_ratio,
        "scale_ratio_max": number(layer.scale_ratio_max),
        "max_abs_dm": layer.max_abs_dm,
        "relative_error": number(layer.relative_error),
        "length_change_max": layer.length_change_max,
        "outcome": layer.outcome,
        "actions": list(layer.actions),
    }
