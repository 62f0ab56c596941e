"""Exact patches for one token: the layer-by-layer algorithm of the main paper, as one hooked forward.

v and z of a block are known just before its MLP runs, so each block is solved and patched while the forward of the
reduced run passes through it. The next block then reads what the patched one really gave, rounding included.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from contextfold.anatomy import Bound, ExpertBlock, bind
from contextfold.calculus import Expression
from contextfold.errors import InputError
from contextfold.fold.block import BlockFold, LayerReport
from contextfold.fold.header import header_of
from contextfold.fold.split import SINK, Positions, Spans, Split, split
from contextfold.fold.targets import TokenTargets, seen
from contextfold.forms import expressions
from contextfold.notebook import card, short
from contextfold.patch import Patch
from contextfold.rules import (
    REFERENCES,
    Choice,
    EvenShare,
    LeastNorm,
    OutputOnly,
    Reference,
    SharedExpert,
    choose,
)
from contextfold.runtime import Action, InTurn, run

__all__ = ["DEFAULT_RULE", "Folded", "fold_token", "reference"]

DEFAULT_RULE: Final = REFERENCES[0].name

SHARINGS: Final = (LeastNorm, EvenShare, SharedExpert, OutputOnly)
"""How the output maps of a mixture may share a wanted change, the default first."""


@dataclass(frozen=True, eq=False)
class Folded:
    """A patch, the in-context logits it was aimed at, and a report per layer."""

    patch: Patch
    split: Split
    in_context: Tensor
    """`(V,)`, from the full run."""
    layers: tuple[LayerReport, ...]

    def _repr_html_(self) -> str:
        """The patch and how every layer was met, for a notebook."""
        rows = [
            (str(r.layer), short(r.relative_error), short(r.weight_ratio), short(r.max_abs_dm), r.outcome)
            for r in self.layers
        ]
        worst = max((r.relative_error for r in self.layers), default=float("nan"))
        sentence = f"Every layer is met within {worst:.1g}, relative; a verdict proves the whole."
        return card(repr(self.patch), sentence, ("layer", "error", "‖dW‖/‖W‖", "max |dm|", "outcome"), rows)


def reference(name: str) -> Reference:
    """The member of the post-norm class called `name`. Raises `InputError`."""
    for member in REFERENCES:
        if member.name == name:
            return member
    raise InputError(f"rule {name!r} is unknown; choose one of {', '.join(r.name for r in REFERENCES)}")


def _choices(bound: Bound, rule: str, experts: str | None) -> list[Choice]:
    """What is planned for every block. Raises `InputError`, and `NoWay` where a block cannot be met as asked."""
    names = [sharing.name for sharing in SHARINGS]
    if experts not in (None, *names):
        raise InputError(f"rule {experts!r} for mixtures of experts is unknown; choose one of {', '.join(names)}")
    asked = [[rule, experts] if experts and isinstance(block, ExpertBlock) else [rule] for block in bound.blocks]
    forms = expressions(bound)
    plans: dict[Expression, Choice] = {}  # most blocks of a model are alike
    for form, wanted in zip(forms, asked, strict=True):
        if form not in plans:
            plans[form] = choose(form, 1, wanted)
    return [plans[form] for form in forms]


def fold_token(
    model: Bound | nn.Module,
    context: Tensor,
    query: Tensor,
    *,
    keep: Spans = SINK,
    rule: str = DEFAULT_RULE,
    fallback: str | None = None,
    experts: str | None = None,
    positions: Positions = "absolute",
    written: bool = True,
    targets: TokenTargets | None = None,
) -> Folded:
    """A patch that makes the model without the dropped context answer, after the last query token, as with it.

    Algorithm 1 of arXiv 2511.17864, aimed at the measured in-context output of every block. Exact for the last
    token of `query` and this context; other tokens are moved too.

    Arguments:
        model: a bound model, or a transformers model, which is then bound and proven first.
        context: token ids `(c,)`, with BOS where the model wants one.
        query: token ids `(n,)` that follow it.
        keep: spans of the context that stay in the reduced run; by default its first token, the sink, which the
            matrix edits leave where it was. `()` drops the context wholly, as the paper does.
        rule: reference scale of the post-norm class (`balanced`, `floored`, `theorem`, `appendix`, `scalar`, `flat`);
            blocks without a norm after the MLP have one rule only.
        fallback: rule for blocks where `rule` is undefined; None refuses.
        experts: rule by which the output maps of a mixture share the wanted change (`experts by least norm`, the
            default; `experts by even share`; `shared expert alone`; `experts, output only`).
        positions: `absolute` (kept tokens keep theirs) or `renumbered`.
        written: measure on weights that are written and rounded to their dtype, so that the patch is right when
            materialised; False measures the low-rank action instead.
        targets: from `token_targets`, when the model with its context has run already; None runs it.

    Returns the patch with a report per layer. The model is unchanged.

    Raises `InputError`, `UnsupportedModel`, and `NotControllable` where no exact edit exists.
    """
    bound = model if isinstance(model, Bound) else bind(model)
    members = (reference(rule), None if fallback is None else reference(fallback))
    choices = _choices(bound, rule, experts)
    parts = split(bound, context, query, keep, positions)
    wanted = seen(bound, parts.full) if targets is None else targets.check(bound, parts)
    sizes = wanted.weights.sizes
    folds = [
        BlockFold(bound.model, block, state, parts.sink, members, sizes, choice.outer, inner_skipped=not choice.inner)
        for block, state, choice in zip(bound.blocks, wanted.states, choices, strict=True)
    ]
    sites = [site for block in bound.blocks for site in block.sites]
    overlay = (InTurn if written else Action)(bound.model, sites)
    with ExitStack() as stack:
        for fold in folds:
            fold.listen(stack, overlay)
        with overlay:
            run(bound.model, parts.reduced, last=0)
    exact = (int(parts.reduced.positions[-1]),)
    plan = tuple(dict.fromkeys(name for choice in choices for name in choice.names))
    patch = Patch(header_of(bound, parts, "token", exact, plan, written), overlay.edits)
    return Folded(patch, parts, wanted.logits, tuple(fold.report() for fold in folds))
