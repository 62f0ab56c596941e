"""The implicit updates of a model's blocks as a context comes or goes, and at every position of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor, nn

from contextfold.anatomy import Block, Bound, DenseBlock, ExpertBlock, bind
from contextfold.errors import InputError
from contextfold.fold.dynamics import Course, alignment, effective_rank, growing, numerical_rank, removing
from contextfold.fold.split import split
from contextfold.lowrank import LowRank
from contextfold.rules import InputWeight
from contextfold.runtime import BlockState, Run, recording, run

__all__ = ["BlockCourse", "Dynamics", "Spreading", "dynamics", "dynamics_view"]

Direction = Literal["growing", "removing"]


@dataclass(frozen=True, eq=False)
class Spreading:
    """Token patches of one map at all n query positions, the whole context folded into each. [I]"""

    norms: Tensor
    """`‖dW_i‖_F (n,)`."""
    alignments: Tensor
    """Cosine between the patches of any two positions, `(n, n)`."""
    effective_rank: float
    """Of the sum over positions."""
    rank: int
    """Numerical rank of the sum over positions."""


@dataclass(frozen=True, eq=False)
class BlockCourse:
    """What the context does to one block."""

    layer: int
    site: str
    """Name of the map whose updates are followed: the first that reads z."""
    weight_norm: float
    """`‖W_0‖_F`."""
    course: Course
    """At the last query position, as context tokens come or go."""
    spreading: Spreading
    shift: Tensor | None
    """`‖v_i - v_0‖ (k + 1,)`, the size of the bias part; None where v does not stand in one place."""


@dataclass(frozen=True, eq=False)
class Dynamics:
    """Courses of all blocks that read z, as arrays."""

    direction: Direction
    tokens: tuple[int, ...]
    """The context tokens, in the order in which they come or go."""
    blocks: tuple[BlockCourse, ...]
    between_blocks: Tensor
    """Cosine between the total updates of any two blocks, `(L, L)`; NaN where their maps differ in shape."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        blocks = []
        for block in self.blocks:
            course, spreading = block.course, block.spreading
            arrays = ("eta", "gradient_norm", "loss", "step_norm", "total_norm", "effective_ranks", "alignments")
            blocks.append(
                {
                    "layer": block.layer,
                    "site": block.site,
                    "weight_norm": block.weight_norm,
                    **{name: getattr(course, name).tolist() for name in arrays},
                    "shift": None if block.shift is None else block.shift.tolist(),
                    "positions": {
                        "norms": spreading.norms.tolist(),
                        "alignments": spreading.alignments.tolist(),
                        "effective_rank": spreading.effective_rank,
                        "rank": spreading.rank,
                    },
                }
            )
        between = [[None if value != value else value for value in row] for row in self.between_blocks.tolist()]
        return {
            "direction": self.direction,
            "tokens": list(self.tokens),
            "blocks": blocks,
            "between_blocks": between,
        }


def dynamics(model: Bound | nn.Module, context: Tensor, query: Tensor, *, direction: Direction = "growing") -> Dynamics:
    """Follow the implicit updates of every block while the context comes or goes, one token at a time.

    Arguments:
        model: a bound model, or a transformers model, which is then bound and proven first.
        context: token ids `(c,)`; the first is the sink and stays throughout, the other k = c - 1 come or go.
        query: token ids `(n,)`.
        direction: `growing` adds tokens behind each other, `removing` takes them away from the left. Tokens keep
            the positions that they have in the full sequence.

    Runs the model k + 1 times. The model is unchanged. Raises `InputError` for a context of fewer than two tokens,
    `UnsupportedModel`, and `NotControllable` when a block reads a zero vector.
    """
    bound = model if isinstance(model, Bound) else bind(model)
    if direction not in ("growing", "removing"):
        raise InputError(f"direction {direction!r} is unknown; choose 'growing' or 'removing'")
    if context.numel() < 2:
        raise InputError("the context needs a second token: the first is the sink, which stays")
    blocks = [block for block in bound.blocks if block.reads_z is not None]
    runs = _runs(bound, context, query, direction)
    stages = [_states(bound, blocks, tokens, query.numel()) for tokens in runs]
    courses = tuple(_follow(block, [stage[i] for stage in stages], direction) for i, block in enumerate(blocks))
    totals = [course.course.total for course in courses]
    return Dynamics(direction, tuple(context[1:].tolist()), courses, _between(totals))


def _runs(bound: Bound, context: Tensor, query: Tensor, direction: Direction) -> list[Run]:
    """From a_0 to a_k."""
    c = context.numel()
    whole = split(bound, context, query, ((0, 1),)).full
    runs = []
    for gone in range(1, c):
        spans = ((0, gone),) if direction == "growing" else ((0, 1), *(((gone + 1, c),) if gone + 1 < c else ()))
        runs.append(split(bound, context, query, spans).reduced)
    return [*runs, whole] if direction == "growing" else [whole, *runs]


def _states(bound: Bound, blocks: Sequence[Block], tokens: Run, n: int) -> list[BlockState]:
    with recording(blocks, slice(-n, None), "zv") as states:
        run(bound.model, tokens, last=0)
    return states


def _follow(block: Block, states: Sequence[BlockState], direction: Direction) -> BlockCourse:
    assert isinstance(block, DenseBlock | ExpertBlock)
    W, site = block.input_maps[0].weight.double(), block.input_maps[0].site.name
    last = torch.stack([state["z"][-1].double() for state in states])
    course = growing(W, last) if direction == "growing" else removing(W, last)
    bare, full = (states[0], states[-1]) if direction == "growing" else (states[-1], states[0])
    shift = None
    if "v" in bare.letters:
        v = torch.stack([state["v"][-1].double() for state in states])
        shift = (v - v[0]).norm(dim=1)
    return BlockCourse(block.index, site, float(W.norm()), course, _spread(block, W, bare["z"], full["z"]), shift)


def _spread(block: Block, W: Tensor, z: Tensor, z_C: Tensor) -> Spreading:
    updates = [InputWeight().solve(block.name, z[i : i + 1], z_C[i : i + 1]).delta(W) for i in range(len(z))]
    whole = LowRank(torch.cat([u.B for u in updates], 1), torch.cat([u.A for u in updates], 0))
    norms = torch.tensor([update.norm() for update in updates], dtype=torch.float64)
    return Spreading(norms, alignment(updates), effective_rank(whole), numerical_rank(whole))


def _between(totals: Sequence[LowRank]) -> Tensor:
    cosines = torch.full((len(totals), len(totals)), float("nan"), dtype=torch.float64)
    for i, first in enumerate(totals):
        for j, second in enumerate(totals):
            if first.shape == second.shape:
                cosines[i, j] = alignment([first, second])[0, 1]
    return cosines


def dynamics_view(found: Dynamics) -> RenderableType:
    """One row per block, for the command line."""
    verb = "added" if found.direction == "growing" else "removed from the left"
    table = Table(
        title=f"{len(found.tokens)} context tokens {verb}, one at a time",
        caption="Norms as a fraction of the weight's. Step: ‖W_(i+1) − W_i‖. Loss: tr(gradientᵀ W), summed. Alignment: "
        "mean cosine between neighbours. Ranks: effective.",
        title_justify="left",
        caption_justify="left",
    )
    columns = (
        "layer", "total", "first step", "last step", "loss", "aligned steps", "aligned positions", "rank of total",
        "rank over positions",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for block in found.blocks:
        course, W = block.course, block.weight_norm
        table.add_row(
            str(block.layer), f"{float(course.total_norm[-1]) / W:.3f}", f"{float(course.step_norm[0]) / W:.3f}",
            f"{float(course.step_norm[-1]) / W:.3f}", f"{float(course.loss.sum()):.3g}",
            _neighbours(course.alignments), _neighbours(block.spreading.alignments),
            f"{float(course.effective_ranks[-1]):.2f}", f"{block.spreading.effective_rank:.2f}",
        )  # fmt: skip
    return Group(table)


def _neighbours(cosines: Tensor) -> str:
    """Mean over the first side diagonal."""
    return f"{float(cosines.diagonal(1).mean()):.2f}" if len(cosines) > 1 else "–"
