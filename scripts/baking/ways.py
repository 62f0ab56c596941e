"""Ways to make a model act as if it had a context, one interface: learn from examples, then act for a `with`.

Sources: [T] arXiv 2510.08734 (thought vectors, averages of token patches), [P] arXiv 2609.39329 (output-map ridge).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from baking.judge import Judge
from baking.material import Material
from contextfold.anatomy import Block, Bound, first_output
from contextfold.bake import EMPHASIS, LAM0, TOL, Example, Frame, bake, joints_of
from contextfold.bake.joint import ATTENTION, OUTPUT, OuterJoint
from contextfold.bake.moments import Moments
from contextfold.bake.solve import kept_span, pairs_of, visited
from contextfold.lowrank import LowRank
from contextfold.overlays import Written, lending
from contextfold.patch import MatrixEdit, Patch, Site
from contextfold.runtime import materialised

BATCH = 16
CHOOSE_BY = 8
"""Calibration questions by which a free number of a baseline is chosen."""


Acting = Callable[[], AbstractContextManager[object]]
"""What a model does inside the `with` it does with the way acting."""

K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Learnt:
    """Something that can act, and what a reader should know of it."""

    acting: Acting
    remarks: Mapping[str, Any] = field(default_factory=dict)
    patch: Patch | None = None


@dataclass(frozen=True)
class Way(ABC):
    """A way to learn a context from examples."""

    name: str
    kind: str = "baseline"

    @abstractmethod
    def learn(self, bound: Bound, frame: Frame, examples: Sequence[Example]) -> Learnt:
        """Learn what makes `bound` answer as if `frame.context` stood before the question."""


class Nothing(Way):
    """The model alone."""

    def learn(self, bound: Bound, frame: Frame, examples: Sequence[Example]) -> Learnt:
        return Learnt(nullcontext)


@dataclass(frozen=True)
class Bake(Way):
    """One of the estimators of `contextfold.bake`."""

    method: str = ""
    answers: int = 1
    """To each question: the greedy one, and a sampled one."""
    anchors: int = 0
    """Neutral questions that join the solve."""
    questions: int | None = None
    """So many of them alone."""
    emphasis: float = EMPHASIS

    @property
    def stands_alone(self) -> bool:
        """Whether it is an estimator as users have it, and no point of a curve."""
        return self.anchors == 0 and self.questions is None and self.emphasis == EMPHASIS

    def chosen(self, stuff: Material) -> tuple[Example, ...]:
        """What it learns from."""
        parts = (stuff.calibration, stuff.sampled)[: self.answers]
        return (*(e for part in parts for e in part[: self.questions]), *stuff.anchors[: self.anchors])

    def learn(self, bound: Bound, frame: Frame, examples: Sequence[Example]) -> Learnt:
        ask = {"method": self.method, "batch": BATCH, "emphasis": self.emphasis}
        with TemporaryDirectory() as store:  # as the command has one
            patch = bake(bound, frame, examples, store=Path(store), **ask).patch
        return Learnt(partial(materialised, bound, patch), {"patch_bytes": patch.nbytes}, patch)


class Steering(Way):
    """A constant added to the residual stream behind attention: the mean of `v_C − v`, the thought vector of [T].

    Added at every layer, at every layer what is new there, or at the middle layer alone; which of them and how strong,
    calibration decides. The kept tokens stay as they are.
    """

    STRENGTHS = (0.1, 0.3, 1.0)

    def learn(self, bound: Bound, frame: Frame, examples: Sequence[Example]) -> Learnt:
        joints = [joint for block in bound.blocks for joint in joints_of(bound.model, block, (OUTPUT,))]
        means = [
            torch.cat([joint.joined(full) - joint.joined(reduced) for full, reduced in stops]).mean(0)
            for joint, stops in visited(joints, pairs_of(bound.model, frame, examples, BATCH))
        ]
        zero = torch.zeros_like(means[0])
        middle = len(means) // 2
        shapes = {
            "every layer": means,
            "what is new at every layer": [m - b for m, b in zip(means, [zero, *means[:-1]], strict=True)],
            "the middle layer": [m if i == middle else zero for i, m in enumerate(means)],
        }
        options = {
            (where, strength): partial(added, bound.blocks, [strength * v for v in vectors], frame.kept.numel())
            for where, vectors in shapes.items()
            for strength in self.STRENGTHS
        }
        where, strength = best_of(bound, frame, examples, options)
        return Learnt(options[where, strength], {"chosen": f"{where}, strength {strength:g}"})


@contextmanager
def added(blocks: Sequence[Block], vectors: Sequence[Tensor], kept: int) -> Iterator[None]:
    """Add a vector `(d,)` per block to what attention gives, from position `kept` on."""

    def hook(vector: Tensor, _m: nn.Module, _a: tuple[Any, ...], output: Any) -> Any:
        given = first_output(output)
        moved = torch.cat([given[..., :kept, :], given[..., kept:, :] + vector.to(given)], -2)
        return moved if isinstance(output, Tensor) else (moved, *output[1:])

    with ExitStack() as stack:
        for block, vector in zip(blocks, vectors, strict=True):
            assert block.attention_output is not None, "the built-in models name it"
            module = block.norm_attention or block.attention_output.module
            stack.callback(module.register_forward_hook(partial(hook, vector)).remove)
        yield


class TokenAverage(Way):
    """The mean of the rank-1 patches of all tokens, on the output map: `dW = mean_i t_i h_iᵀ / ‖h_i‖²`.

    Layer by layer, each under the means below it. Its length is chosen on calibration.
    """

    STRENGTHS = (1.0, 3.0, 10.0)

    def learn(self, bound: Bound, frame: Frame, examples: Sequence[Example]) -> Learnt:
        joints = [joint for block in bound.blocks for joint in joints_of(bound.model, block, (OUTPUT,))]
        for joint, stops in visited(joints, pairs_of(bound.model, frame, examples, BATCH)):
            assert isinstance(joint, OuterJoint)
            sides = [joint.wanted(full, reduced) for full, reduced in stops]
            h, t = (torch.cat(side).double() for side in zip(*sides, strict=True))
            mean = (t / h.square().sum(1, keepdim=True)).T @ h / h.shape[0]
            joint.delta = LowRank(torch.eye(mean.shape[0]), mean.float())
        edits = {site: edit for joint in joints for site, edit in joint.edits().items()}
        options = {
            s: partial(lending, Written, bound.model, {p: e.scaled(s) for p, e in edits.items()})
            for s in self.STRENGTHS
        }
        strength = best_of(bound, frame, examples, options)
        return Learnt(options[strength], {"chosen": f"strength {strength:g}"})


class Batch(Way):
    """Two sites as [T] solves a batch: every place from what the model does without any edit, for its own change.

    All places could be solved at once; nothing makes up for what the edits below leave or do to what a place reads.
    """

    def learn(self, bound: Bound, frame: Frame, examples: Sequence[Example]) -> Learnt:
        joints = [joint for block in bound.blocks for joint in joints_of(bound.model, block, (ATTENTION, OUTPUT))]
        edits: dict[Site, MatrixEdit] = {}
        for joint, stops in visited(joints, pairs_of(bound.model, frame, examples, BATCH)):
            assert isinstance(joint, OuterJoint)
            moments = Moments(joint.shape[1], joint.shape[0], kept_span(joint, stops))
            for full, reduced in stops:
                moments.add(reduced.source, full.output - reduced.output)
            delta = moments.solve(LAM0, TOL).delta
            edits[joint.linear.site] = MatrixEdit(LowRank(delta.B.float(), delta.A.float()))
        return Learnt(partial(lending, Written, bound.model, edits))


def best_of(bound: Bound, frame: Frame, examples: Sequence[Example], options: Mapping[K, Acting]) -> K:
    """The option under which the first calibration questions are nearest to the in-context model."""
    judge = Judge.of(bound, frame, [e for e in examples if e.moves][:CHOOSE_BY])
    found = {}
    for name, acting in options.items():
        with acting():
            found[name] = judge().mean
    return min(found, key=found.__getitem__)
