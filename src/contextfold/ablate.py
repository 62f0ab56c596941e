"""What each part of a prompt is worth: the cost of removing it alone, and the patch that absorbs the removal.

The rest of the prompt stays where it was, at its own positions. The cost is measured on the model without the part;
the patch is solved in closed form, written into the weights, and measured beside it: an attribution that was not
proven would be a story.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound, bind
from contextfold.compare import norm
from contextfold.errors import InputError
from contextfold.fold import Folded, LayerReport, Spans, fold_token, token_targets
from contextfold.notebook import card, short
from contextfold.patch import MatrixEdit, Patch
from contextfold.runtime import materialised, run
from contextfold.verify import Comparison, compare
from contextfold.verify.receipt import receipt_of
from contextfold.verify.verdict import EXACT

__all__ = ["FALLBACK", "RULE", "Ablation", "PartAblation", "Removal", "ablate"]

RULE: Final = "appendix"
FALLBACK: Final = "floored"
"""Through a norm after the MLP a patch is only a measure if it is zero when nothing is missing. Of the rules that hold
for one position, `appendix` is the one that stays nearest to the present weights; `balanced` sets the scales anew, at a
price that hides the part. Blocks where a scale is zero fall back, and say so."""


@dataclass(frozen=True, eq=False)
class Removal:
    """One part gone, at one token of the answer."""

    position: int
    """Absolute position after which the token is chosen."""
    answer: int
    """Token id that the model with the whole prompt prefers."""
    answer_nats: float
    """Log-probability that the answer loses; negative when it gains."""
    removed: Comparison
    """Without the part, weights as they are."""
    patched: Comparison
    """Without the part, the patch written into the weights."""
    patch: Patch
    layers: tuple[LayerReport, ...]

    @property
    def patch_norm(self) -> float:
        """Frobenius norm of all matrix changes together."""
        return norm(self.patch, (MatrixEdit,))

    @property
    def weight_ratio(self) -> float:
        """Largest `‖dW‖ / ‖W‖`."""
        return max(layer.weight_ratio for layer in self.layers)

    def layer_norms(self) -> list[float]:
        """`patch_norm`, layer by layer."""
        return [norm(self.patch.select([layer.layer]), (MatrixEdit,)) for layer in self.layers]


@dataclass(frozen=True, eq=False)
class PartAblation:
    """One part, over the tokens of the answer. Sums over the tokens follow from the chain rule of log-probability."""

    name: str
    spans: Spans
    """What was removed: token ranges of the context."""
    keeps_sink: bool
    """The part holds the first token of the sequence, which stayed."""
    removals: tuple[Removal, ...]
    rank: int = 0
    """1 for the part whose removal costs the largest divergence."""
    patch_rank: int = 0
    """1 for the part that takes the largest patch."""

    @property
    def dropped(self) -> int:
        """Number of tokens that went."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def kl_nats(self) -> float:
        return sum(r.removed.kl_nats for r in self.removals)

    @property
    def answer_nats(self) -> float:
        return sum(r.answer_nats for r in self.removals)

    @property
    def top1_changes(self) -> int:
        return sum(not r.removed.top1_match for r in self.removals)

    @property
    def logit_gap(self) -> float:
        return max(r.removed.logit_gap for r in self.removals)

    @property
    def patched_logit_gap(self) -> float:
        return max(r.patched.logit_gap for r in self.removals)

    @property
    def patch_norm(self) -> float:
        """Mean over the tokens of the answer."""
        return statistics.fmean(r.patch_norm for r in self.removals)

    @property
    def layer_norms(self) -> list[float]:
        """Mean over the tokens of the answer, layer by layer."""
        return [statistics.fmean(column) for column in zip(*(r.layer_norms() for r in self.removals), strict=True)]

    @property
    def weight_ratio(self) -> float:
        return max(r.weight_ratio for r in self.removals)

    @property
    def max_abs_dm(self) -> float:
        return max(r.patch.max_abs_dm for r in self.removals)


@dataclass(frozen=True, eq=False)
class Ablation:
    """Every part of a prompt, in the order of the prompt."""

    model_type: str
    dtype: torch.dtype
    rule: str
    fallback: str | None
    answer: tuple[int, ...]
    """Greedy answer of the model with the whole prompt, token ids."""
    parts: tuple[PartAblation, ...]
    receipt: Mapping[str, Any]

    @property
    def limit(self) -> float:
        """Logit gap that still counts as exact, from the largest gap that any removal opened.

        A part that matters little opens a gap of the size of rounding, which is no measure for itself.
        """
        return EXACT[self.dtype] * max(part.logit_gap for part in self.parts)

    def proves(self, part: PartAblation) -> bool:
        """Whether the written patches of `part` close what its removal opened."""
        return part.patched_logit_gap <= self.limit and all(r.patched.top1_match for r in part.removals)

    @property
    def proven(self) -> bool:
        return all(self.proves(part) for part in self.parts)

    def ranked(self) -> list[PartAblation]:
        """The most costly removal first."""
        return sorted(self.parts, key=lambda part: part.rank)

    def _repr_html_(self) -> str:
        """The parts, the most costly first, for a notebook."""
        ranked = self.ranked()
        worst = max(part.patched_logit_gap for part in ranked)
        words = "Proven" if self.proven else "Not proven"
        sentence = f"{words}: written into the weights, every patch leaves a gap of at most {worst:.2g}."
        rows = [
            (p.name, str(p.dropped), short(p.kl_nats), short(p.logit_gap), short(p.patched_logit_gap),
             short(p.patch_norm))
            for p in ranked
        ]  # fmt: skip
        columns = ("part", "tokens", "KL, nats", "gap", "gap patched", "‖dW‖")
        return card(f"{self.model_type}: what each part is worth", sentence, columns, rows, self.proven)

    def to_json(self) -> dict[str, Any]:
        """Stable keys; documented in `docs/json.md`."""
        return {
            "model_type": self.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "rule": self.rule,
            "fallback": self.fallback,
            "proven": self.proven,
            "exact_limit": self.limit,
            "answer": list(self.answer),
            "ranking": [part.name for part in self.ranked()],
            "parts": [{**_part_json(part), "proven": self.proves(part)} for part in self.parts],
            "receipt": dict(self.receipt),
        }


def ablate(
    model: Bound | nn.Module,
    context: Tensor,
    query: Tensor,
    parts: Mapping[str, Spans],
    *,
    rule: str = RULE,
    fallback: str | None = FALLBACK,
    tokens: int = 1,
    progress: Callable[[Removal], None] = lambda removal: None,
) -> Ablation:
    """Remove each part of the context alone, and fold it into the weights instead.

    The patches are those of `fold_token`, one for each part and token of the answer, with everything kept but the
    part: exact, and smallest where the rule is. Kept tokens keep their positions. The history is forced: every token
    of the answer follows the tokens that the model with the whole prompt preferred.

    Arguments:
        model: a bound model, or a transformers model, which is then bound and proven first.
        context: token ids `(c,)`, with BOS where the model wants one.
        query: token ids `(n,)` that follow it and always stay.
        parts: token ranges of the context by name. Tokens in no part always stay, and parts may overlap. The first
            token of the sequence is the sink and stays too, whichever part it is in.
        rule, fallback: as for `fold_token`, with a default that makes patches comparable.
        tokens: length of the answer.
        progress: called after each removal.

    Raises `InputError`, `UnsupportedModel`, and `NotControllable` where no exact edit exists.
    """
    bound = model if isinstance(model, Bound) else bind(model)
    if not parts or tokens < 1:
        raise InputError("nothing to remove: give at least one part and one token of the answer")
    started = time.monotonic()
    masks = {name: _mask(name, spans, context.numel()) for name, spans in parts.items()}
    found: dict[str, list[Removal]] = {name: [] for name in parts}
    answer: list[int] = []
    for _ in range(tokens):
        asked = torch.cat([query, torch.tensor(answer, dtype=query.dtype)])
        targets = token_targets(bound, context, asked)  # one run with everything, for all parts
        fold = partial(fold_token, bound, context, asked, rule=rule, fallback=fallback, targets=targets)
        for name, mask in masks.items():
            found[name].append(_removal(bound, fold(keep=_spans(~mask))))
            progress(found[name][-1])
        answer.append(found[name][-1].answer)
    reports = [
        PartAblation(name, _spans(mask), any(start == 0 for start, _ in parts[name]), tuple(found[name]))
        for name, mask in masks.items()
    ]
    receipt = receipt_of(bound, time.monotonic() - started)
    return Ablation(bound.model_type, bound.dtype, rule, fallback, tuple(answer), _with_ranks(reports), receipt)


def _removal(bound: Bound, folded: Folded) -> Removal:
    reduced, wanted = folded.split.reduced, folded.in_context
    without = run(bound.model, reduced)[0]
    with materialised(bound, folded.patch) as model:
        patched = run(model, reduced)[0]
    answer = int(wanted.argmax())
    before, after = (torch.log_softmax(logits.double(), 0)[answer] for logits in (wanted, without))
    return Removal(
        position=int(folded.split.full.positions[-1]),
        answer=answer,
        answer_nats=float(before - after),
        removed=compare(wanted, without),
        patched=compare(wanted, patched),
        patch=folded.patch,
        layers=folded.layers,
    )


def _mask(name: str, spans: Spans, length: int) -> Tensor:
    """`(c,)` bool: what goes with the part."""
    goes = torch.zeros(length, dtype=torch.bool)
    for start, stop in spans:
        if not 0 <= start < stop <= length:
            raise InputError(f"part {name!r}: span {start}:{stop} is not inside the context of {length} tokens")
        goes[start:stop] = True
    goes[:1] = False
    if not bool(goes.any()):
        raise InputError(
            f"part {name!r} has no token but the first of the sequence, which stays because attention rests on it; "
            "make the part longer, or leave it out"
        )
    return goes


def _spans(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """The runs of True, as half-open ranges."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32))
    starts, stops = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    return tuple(zip(starts, stops, strict=True))


def _with_ranks(parts: Sequence[PartAblation]) -> tuple[PartAblation, ...]:
    by_cost = sorted(parts, key=lambda part: -part.kl_nats)
    by_patch = sorted(parts, key=lambda part: -part.patch_norm)
    return tuple(replace(p, rank=by_cost.index(p) + 1, patch_rank=by_patch.index(p) + 1) for p in parts)


def _part_json(part: PartAblation) -> dict[str, Any]:
    return {
        "name": part.name,
        "spans": [list(span) for span in part.spans],
        "dropped": part.dropped,
        "keeps_sink": part.keeps_sink,
        "rank": part.rank,
        "patch_rank": part.patch_rank,
        "kl_nats": part.kl_nats,
        "answer_nats": part.answer_nats,
        "top1_changes": part.top1_changes,
        "logit_gap": part.logit_gap,
        "patched_logit_gap": part.patched_logit_gap,
        "patch_norm": part.patch_norm,
        "weight_ratio": part.weight_ratio,
        "max_abs_dm": part.max_abs_dm,
        "positions": [_removal_json(removal) for removal in part.removals],
    }


def _removal_json(removal: Removal) -> dict[str, Any]:
    layers = zip(removal.layers, removal.layer_norms(), strict=True)
    return {
        "position": removal.position,
        "answer": removal.answer,
        "without": removal.removed.top1,
        "patched": removal.patched.top1,
        "kl_nats": removal.removed.kl_nats,
        "answer_nats": removal.answer_nats,
        "top1_match": removal.removed.top1_match,
        "logit_gap": removal.removed.logit_gap,
        "patched_top1_match": removal.patched.top1_match,
        "patched_kl_nats": removal.patched.kl_nats,
        "patched_logit_gap": removal.patched.logit_gap,
        "patch_norm": removal.patch_norm,
        "weight_ratio": removal.weight_ratio,
        "max_abs_dm": removal.patch.max_abs_dm,
        "layers": [
            {
                "layer": layer.layer,
                "patch_norm": size,
                "weight_ratio": layer.weight_ratio,
                "max_abs_dm": layer.max_abs_dm,
                "relative_error": layer.relative_error,
                "outcome": layer.outcome,
            }
            for layer, size in layers
        ],
    }
