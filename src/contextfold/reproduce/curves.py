"""One prompt of the main paper's experiment: every update at every token, beside the model that has the context.

The run with the context is shared by all updates. Weights are written and the unmodified model runs; the low-rank
action beside the weights is measured too, on a patch that is solved as such.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.fold import Split, TokenTargets, fold_token, split, token_targets
from contextfold.magnitudes import EDGES, counts
from contextfold.outcomes import Outcome
from contextfold.overlays import Action, Written, lending
from contextfold.patch import Patch
from contextfold.reproduce.printed import fold_as_printed, in_context_states, is_plain
from contextfold.runtime import Decoder, Run, run
from contextfold.verify import compare, rounding_noise
from contextfold.verify.metrics import margin

__all__ = ["CURVES", "Curve", "Magnitudes", "Prompted", "Solved", "measure_prompt", "step_of"]


@dataclass(frozen=True, eq=False)
class Solved:
    """A patch, and what was met on the way: solves by outcome, all layers together."""

    patch: Patch
    met: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Prompted:
    """One step: what the model has seen, and what it said."""

    bound: Bound
    parts: Split
    targets: TokenTargets
    states: Sequence[Mapping[str, Tensor]]
    """For the updates as printed; empty where the model has other blocks than plain MLPs."""


Solve = Callable[[Prompted, bool], Solved]
"""A step, and whether weights are written, to a patch."""


@dataclass(frozen=True)
class Curve:
    """One update of the experiment."""

    name: str
    solve: Solve
    in_every_way: bool
    """Whether it is also measured as an action and under one rounding."""


def _measured_rule(rule: str, step: Prompted, written: bool) -> Solved:
    """A member of the post-norm class, aimed at what was measured; `floored` where the paper's own is undefined."""
    tokens = step.parts.full.ids
    fallback = None if rule == "balanced" else "floored"
    folded = fold_token(
        step.bound, tokens[:-1], tokens[-1:], keep=(), rule=rule, fallback=fallback, written=written,
        targets=step.targets,
    )  # fmt: skip
    return Solved(folded.patch, Counter(f.outcome.label for layer in folded.layers for f in layer.findings))


def _printed_rule(rule: str, step: Prompted, written: bool) -> Solved:
    found = fold_as_printed(step.bound, step.parts, step.states, rule, written=written)
    met = {Outcome.SECULAR_HARD_CASE.label: found.hard_cases, "division by zero": found.zero_divisions}
    return Solved(found.patch, {name: count for name, count in met.items() if count})


CURVES = (
    Curve("theorem", partial(_measured_rule, "theorem"), True),
    Curve("appendix", partial(_measured_rule, "appendix"), True),
    Curve("balanced", partial(_measured_rule, "balanced"), True),
    Curve("theorem as printed", partial(_printed_rule, "theorem"), False),
    Curve("appendix as printed", partial(_printed_rule, "appendix"), False),
)
"""The updates: the paper's two and our default, aimed at what was measured, and the paper's two as they are printed."""

HELD_FROM = (0, 10)
"""Steps whose patch is held over those that follow."""

HELD_OVER = 8
"""Steps over which a patch is held."""

HELD_RULES = ("theorem", "balanced")


@dataclass(eq=False)
class _Record:
    """Columns over the steps of a prompt, by name."""

    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)

    def against(self, wanted: Tensor, logits: Tensor) -> None:
        found = compare(wanted, logits)
        self.add(same=found.top1_match, top1=found.top1, logit_gap=found.logit_gap, kl_nats=found.kl_nats)


@dataclass(eq=False)
class Magnitudes:
    """How large the entries of u are, per layer, over the tokens: u is the in-context branch before its norm's scale.

    The theorem divides by each of them. A zero is one in the model's own dtype.
    """

    counts: list[list[int]] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)
    smallest: list[float] = field(default_factory=list)
    tokens_with_zeros: int = 0

    def add(self, bound: Bound, states: Sequence[Mapping[str, Tensor]]) -> None:
        """One token. Blocks without a norm after the MLP have no u."""
        pairs = zip(bound.blocks, states, strict=False)
        u = [block.norm_post.unscaled(state["q"]) for block, state in pairs if block.norm_post is not None]
        if not self.counts:
            self.counts = [[0] * (len(EDGES) + 1) for _ in u]
            self.zeros, self.smallest = [0] * len(u), [math.inf] * len(u)
        for k, values in enumerate(u):
            self.counts[k] = [a + b for a, b in zip(self.counts[k], counts(values), strict=True)]
            self.zeros[k] += int((values == 0).sum())
            self.smallest[k] = min(self.smallest[k], float(values.abs().min()))
        self.tokens_with_zeros += any(bool((values == 0).any()) for values in u)

    def result(self) -> dict[str, Any]:
        return vars(self)


@torch.no_grad()
def measure_prompt(
    bound: Bound,
    prompt: Tensor,
    tokens: int,
    curves: Sequence[Curve] = CURVES,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """`tokens` greedy steps after `prompt (p,)`; before each, everything but the current token is the context.

    Every update is measured on the history of the model that has the context (conditional agreement); from its first
    disagreement on, also on a history of its own (free running). Returns plain data.
    """
    curves = [curve for curve in curves if is_plain(bound) or "printed" not in curve.name]
    records: dict[str, dict[str, _Record]] = {curve.name: {} for curve in curves}
    bare, itself, branch = _Record(), _Record(), Magnitudes()
    decoder = Decoder(bound.model)
    decoder.extend(prompt[:-1])
    history, kept = prompt, {}
    for index in range(tokens):
        step = step_of(bound, history)
        wanted = step.targets.logits
        branch.add(bound, step.states)
        itself.against(wanted, decoder.extend(history[-1:]))
        bare.against(wanted, run(bound.model, step.parts.reduced)[0])
        bare.add(in_context=int(wanted.argmax()), margin=margin(wanted))
        for curve in curves:
            patch = _measure(step, curve, records[curve.name])
            if index in HELD_FROM and curve.name in HELD_RULES:
                kept[curve.name, index] = patch
        history = torch.cat([history, wanted.argmax()[None].cpu()])
        advance()
    return {
        "tokens": tokens,
        "unpatched": bare.columns,
        "itself": itself.columns,
        "curves": {
            curve.name: {
                **{way: record.columns for way, record in records[curve.name].items()},
                "free": _free(bound, prompt, curve, records[curve.name]["written"].columns["top1"], bare.columns),
            }
            for curve in curves
        },
        "u": branch.result(),
        "held": _held(bound, history, prompt.numel(), bare.columns["in_context"], kept),
    }


def step_of(bound: Bound, history: Tensor) -> Prompted:
    """The run with the context, once for all updates."""
    parts = split(bound, history[:-1], history[-1:], keep=())
    with ExitStack() as stack:
        states = stack.enter_context(in_context_states(bound)) if is_plain(bound) else []
        targets = token_targets(bound, history[:-1], history[-1:])
    return Prompted(bound, parts, targets, states)


def _measure(step: Prompted, curve: Curve, ways: dict[str, _Record]) -> Patch:
    """Solve, write, run; returns the patch that was written."""
    solved = curve.solve(step, True)
    reduced, wanted = step.parts.reduced, step.targets.logits
    written = ways.setdefault("written", _Record())
    with lending(Written, step.bound.model, solved.patch.edits) as model:
        written.against(wanted, run(model, reduced)[0])
        if curve.in_every_way:
            with rounding_noise(model):
                ways.setdefault("perturbed", _Record()).against(wanted, run(model, reduced)[0])
    largest = [solved.patch.select([block.index]).max_abs_dm for block in step.bound.blocks]
    written.add(max_abs_dm=largest, met=dict(solved.met))
    if curve.in_every_way:
        with lending(Action, step.bound.model, curve.solve(step, False).patch.edits) as model:
            ways.setdefault("action", _Record()).against(wanted, run(model, reduced)[0])
    return solved.patch


def _free(
    bound: Bound, prompt: Tensor, curve: Curve, top1: Sequence[int], bare: Mapping[str, Sequence[Any]]
) -> list[int]:
    """What the patched model says when its own choices go on: token ids.

    Up to the first disagreement its history is that of the model with the context, so those steps are known.
    """
    wanted = bare["in_context"]
    first = next((k for k, (a, b) in enumerate(zip(top1, wanted, strict=True)) if a != b), len(wanted))
    said = list(top1[: first + 1])
    while len(said) < len(wanted):
        step = step_of(bound, torch.cat([prompt, torch.tensor(said)]))
        with lending(Written, bound.model, curve.solve(step, True).patch.edits) as model:
            said.append(int(run(model, step.parts.reduced)[0].argmax()))
    return said


def _held(
    bound: Bound, history: Tensor, start: int, wanted: Sequence[int], kept: Mapping[tuple[str, int], Patch]
) -> dict[str, dict[str, list[list[bool]]]]:
    """Agreement under one patch over the steps after the one that it is for; rule -> window -> per patch, per step.

    `alone`: the current token only, as at the patch's own step. `since`: all tokens since that step are in the window.
    """
    found: dict[str, dict[str, list[list[bool]]]] = {}
    for (rule, index), patch in kept.items():
        same: dict[str, list[bool]] = {"alone": [], "since": []}
        with lending(Written, bound.model, patch.edits) as model:
            for k in range(index, min(index + HELD_OVER + 1, len(wanted))):
                at = start - 1 + k
                for window, first in (("alone", at), ("since", start - 1 + index)):
                    seen = torch.arange(first, at + 1)
                    same[window].append(int(run(model, Run(history[seen], seen))[0].argmax()) == wanted[k])
        for window, hits in same.items():
            found.setdefault(rule, {}).setdefault(window, []).append(hits)
    return found
