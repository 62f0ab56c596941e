"""Updates at every position and block of a small trained stack: do they meet the model, and do they align.

Source: arXiv 2512.11255. A query-only run stands for position i of the full run once the block's first map and its last
bias are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from contextfold.fold.dynamics import alignment, implicit_update, numerical_rank, skip_bias
from contextfold.lowrank import LowRank
from contextfold.reproduce.engine import Bench
from contextfold.reproduce.implicit import errors, new_tasks
from contextfold.reproduce.regression import Batch, Recipe, RegressionBlock, Regressor, Shape, trained, untrained

__all__ = ["measure_positions"]


@torch.no_grad()
def measure_positions(
    bench: Bench, advance: Callable[[], None], *, shape: dict[str, Any], recipe: dict[str, Any], tasks: int,
    seeds: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Per seed a model; per task the updates that let the query-only run stand for each position of the full run.

    A block is taken as it runs in both, without edits below: `dW_i = W (z_i - z) zᵀ / ‖z‖²`, `db_i = v_i - v`, with z
    and v at the query alone. Means over tasks. `untrained` is the same before any training.
    """
    kind, how = Shape(**shape), Recipe(**recipe)
    found = [_measured(*trained(kind, how, seed, advance), new_tasks(recipe, tasks, seed)) for seed in seeds]
    before = untrained(kind, how.inputs, seeds[0])
    return {"seeds": found, "untrained": _measured(before, [], new_tasks(recipe, tasks, seeds[0]))}


def _measured(model: Regressor, losses: Sequence[float], batch: Batch) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for tokens in batch.tokens:
        whole, alone = model.embed(tokens[None]), model.embed(tokens[None, -1:])
        rows, updates = [], []
        for block in model.blocks:
            assert isinstance(block, RegressionBlock)
            patches, row = _block(block, whole, alone)
            rows.append(row)
            updates.append(patches)
            whole, alone = block(whole), block(alone)
        between = torch.stack([alignment(list(same)) for same in zip(*updates, strict=True)]).mean(0)
        found.append({"blocks": rows, "between": between})
    return {"loss": errors(model, batch, losses), **_means(found)}


def _block(block: RegressionBlock, whole: Tensor, alone: Tensor) -> tuple[list[LowRank], dict[str, Any]]:
    """One block, from what enters it with the context `(1, n + 1, width)` and at the query alone `(1, 1, width)`."""
    v_C, v = block.stream(whole)[0], block.stream(alone)[0, 0]
    z_C, z = block.norm2(v_C), block.norm2(v)
    wanted, bare = block(whole)[0], block(alone)[0, 0]
    patches = [implicit_update(block.up.weight, z, each) for each in z_C]
    given = torch.stack(
        [_patched(block, alone, patch, skip_bias(v, each)) for patch, each in zip(patches, v_C, strict=True)]
    )
    total = patches[0]
    for patch in patches[1:]:
        total = total + patch
    row = {
        "squared_gap": float((given - wanted).square().sum(-1).mean()),
        "unpatched_squared_gap": float((bare - wanted).square().sum(-1).mean()),
        "norms": torch.tensor([patch.norm() for patch in patches]),
        "alignment": alignment(patches),
        "rank": numerical_rank(total),
    }
    return patches, row


def _patched(block: RegressionBlock, alone: Tensor, patch: LowRank, shift: Tensor) -> Tensor:
    """The block's output `(width,)` at the query alone, its weights really changed for the call."""
    W, b = block.up.weight.data, block.down.bias.data
    block.up.weight.data = (W.double() + patch.B @ patch.A).to(alone)
    block.down.bias.data = (b.double() + shift).to(alone)
    given: Tensor = block(alone)[0, 0]
    block.up.weight.data, block.down.bias.data = W, b
    return given


def _means(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the tasks, per block; alignments of context positions with each other and with the last."""
    blocks = []
    for rows in zip(*(each["blocks"] for each in found), strict=True):
        cosines = torch.stack([row["alignment"] for row in rows]).mean(0)
        inner = cosines[:-1, :-1]
        apart = ~torch.eye(inner.shape[0], dtype=torch.bool)
        norms = torch.stack([row["norms"] for row in rows]).mean(0)
        blocks.append(
            {
                "squared_gap": sum(row["squared_gap"] for row in rows) / len(rows),
                "unpatched_squared_gap": sum(row["unpatched_squared_gap"] for row in rows) / len(rows),
                "norms": norms.tolist(),
                "alignment_context": float(inner[apart].mean()),
                "alignment_last": float(cosines[-1, :-1].mean()),
                "rank": max(row["rank"] for row in rows),
            }
        )
    return {"blocks": blocks, "between_blocks": torch.stack([each["between"] for each in found]).mean(0).tolist()}
