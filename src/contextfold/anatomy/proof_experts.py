"""The proof for a mixture of experts, on single tokens: edit, call, compare."""

from __future__ import annotations

from torch import Tensor, nn

from contextfold.anatomy.block import ExpertBlock, LinearMap
from contextfold.anatomy.experts import Call, lent, observe, split_columns
from contextfold.anatomy.proof import Limits
from contextfold.lowrank import LowRank, min_norm_update

__all__ = ["prove_experts"]


def prove_experts(model: nn.Module, block: ExpertBlock, z: Tensor, branch: Tensor, call: Call, limits: Limits) -> None:
    """`z (n, d)` and what the branch gave in the model's own forward, `(n, d)`.

    Token by token: an extra call gives the same branch. Completeness of the input maps: edited so that one token is
    read as another, they give the other's branch. Output maps: their least-norm edit moves the branch as it should.

    Raises `ProbeFailed`.
    """
    here, there = z[0], z[1]
    seen = observe(model, block, here, call.at(0))
    other = observe(model, block, there, call.at(1))
    limits.same("the branch of one token alone", "its branch among others", seen.branch, branch[0])
    limits.same("the branch of one token alone", "its branch among others", other.branch, branch[1])
    wanted = observe(model, block, there, call.at(0)) if call.extras else other

    delta = min_norm_update(here.double()[None], (there - here).double()[None]).delta
    reading = [*block.input_maps, *(block.stacked_inputs[k] for k in sorted(wanted.inputs))]
    edits = [(linear, _steered(linear, delta)) for linear in reading]
    with lent(edits):
        steered = observe(model, block, here, call.at(0))
    limits.require(set(steered.hidden) == set(wanted.hidden), "input maps made to read another token route like it")
    limits.same("the branch with input maps made to read another token", "the branch of that token",
                steered.branch, wanted.branch)  # fmt: skip

    target = seen.branch.roll(1)
    row = seen.row(seen.columns)
    solved = min_norm_update(row, (target - seen.branch)[None]).delta
    moves = [(block.outputs[k], part) for k, part in split_columns(solved, seen.columns)]
    with lent(moves):
        moved = observe(model, block, here, call.at(0))
    limits.same("the branch after an edit of the output maps", "what the edit says", moved.branch, target)


def _steered(linear: LinearMap, delta: LowRank) -> LowRank:
    return linear.after(delta)
