"""What a growing context does to the weights of a small trained block, and whether the vanilla theorem holds there.

Source: arXiv 2507.16003 (theorem 2.3; implicit dynamics; static thought patches).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.blocks import Parts, UserBlock, fold_blocks, patched
from contextfold.calculus import Pointwise, Skip
from contextfold.fold.dynamics import growing
from contextfold.reproduce.engine import Bench
from contextfold.reproduce.regression import Batch, Recipe, RegressionBlock, Regressor, Shape, draw, smoothed, trained
from contextfold.solving import solved

__all__ = ["describe", "errors", "measure_block", "measure_stack", "new_tasks"]

RULES = ("input weight", "output bias")
"""The vanilla theorem, and the bias that a skip needs besides (theorem B.2)."""

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Rates of SGD, in half decades; which is best depends on the mixer."""

DIVERGED = 1e3
"""Squared error from which SGD is said to have diverged; y has variance 2 or so."""


def describe(block: RegressionBlock) -> UserBlock:
    """The block as stages, from the stream behind the mixer."""
    parts, gelu = Parts(block), Pointwise("gelu", nn.functional.gelu)
    branch = parts.linear("up") >> gelu
    for k in range(len(block.middle)):
        branch = branch >> parts.linear(f"middle.{k}") >> gelu
    branch = branch >> parts.linear("down")
    if isinstance(block.norm2, nn.LayerNorm):
        branch = parts.norm("norm2") >> branch
    return UserBlock(block, parts.read_by("norm2", "v") >> (Skip() + branch if block.skip else branch))


def _theorem(model: Regressor, tokens: Tensor) -> dict[str, list[float]]:
    """Per task of `tokens (B, n + 1, k + 1)`, L2 to the last output with the context: patched, by the patch of the task
    before, and unpatched. Weights are written and the model runs."""
    blocks = [describe(block) for block in model.blocks if isinstance(block, RegressionBlock)]
    found: dict[str, list[float]] = {"patched": [], "other_task": [], "unpatched": []}
    before = None
    for whole in tokens[:, None]:
        query = whole[:, -1:]
        wanted = model(whole)[0, -1]
        folded = fold_blocks(model, blocks, partial(model, whole), partial(model, query), rules=RULES)
        for name, patch in (("patched", folded.patch), ("other_task", before)):
            if patch is not None:
                with patched(model, patch):
                    found[name].append(float((model(query)[0, -1] - wanted).norm()))
        found["unpatched"].append(float((model(query)[0, -1] - wanted).norm()))
        before = folded.patch
    return found


@torch.no_grad()
def measure_stack(
    bench: Bench, advance: Callable[[], None], *, shape: dict[str, Any], recipe: dict[str, Any], tasks: int, seed: int
) -> dict[str, Any]:
    """The theorem on a trained stack of blocks, solved block by block; see `_theorem`."""
    model, losses = trained(Shape(**shape), Recipe(**recipe), seed, advance)
    batch = new_tasks(recipe, tasks, seed)
    return {"loss": errors(model, batch, losses), "theorem": _theorem(model, batch.tokens)}


@torch.no_grad()
def measure_block(
    bench: Bench, advance: Callable[[], None], *, shape: dict[str, Any], recipe: dict[str, Any], tasks: int, seed: int,
    queries: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """One trained block without a skip: theorem, course of the updates, SGD beside them, and static patches.

    `queries` are the numbers of calibration queries of a static patch.
    """
    model, losses = trained(Shape(**shape), Recipe(**recipe), seed, advance)
    batch = new_tasks(recipe, tasks, seed)
    states = _states(model, batch.tokens)
    return {
        "loss": errors(model, batch, losses),
        "theorem": _theorem(model, batch.tokens),
        "step_norm": _step_norms(model, states),
        "sgd": _beside_sgd(model, batch, states),
        "static": _static(model, batch, queries),
    }


def new_tasks(recipe: dict[str, Any], tasks: int, seed: int) -> Batch:
    """Tasks that no step of training saw."""
    return draw(tasks, recipe["points"], recipe["inputs"], torch.Generator().manual_seed(10_000 + seed))


def errors(model: Regressor, batch: Batch, losses: Sequence[float]) -> dict[str, float]:
    """Mean squared errors: at the end of training, on new tasks with the context, and without it."""

    def error(tokens: Tensor) -> float:
        return float((model.answer(model(tokens)[:, -1]) - batch.y).square().mean())

    return {
        **({"trained": smoothed(losses, 20)} if losses else {}),
        "with_context": error(batch.tokens),
        "without": error(batch.tokens[:, -1:]),
    }


def _block(model: Regressor) -> RegressionBlock:
    block = model.blocks[0]
    assert isinstance(block, RegressionBlock)
    return block


def _states(model: Regressor, tokens: Tensor) -> Tensor:
    """`(B, n + 1, width)`: what the MLP reads at the query with the first i points in front of it, i = 0 to n."""
    block = _block(model)
    prefixes = (torch.cat([tokens[:, :i], tokens[:, -1:]], 1) for i in range(tokens.shape[1]))
    return torch.stack([block.norm2(block.stream(model.embed(prefix))[:, -1]) for prefix in prefixes], 1)


def _step_norms(model: Regressor, states: Tensor) -> list[list[float]]:
    """Per task, `‖W_(i+1) - W_i‖_F` of the first map while the context grows."""
    W = _block(model).up.weight
    return [growing(W, each).step_norm.tolist() for each in states]


def _with_weight(model: Regressor, W: Tensor, a: Tensor) -> Tensor:
    """Answers `(B,)` of the block with maps `W (B, f, d)` in place of its first, reading `a (B, d)`."""
    block = _block(model)
    h = nn.functional.gelu(torch.einsum("bfd,bd->bf", W, a) + block.up.bias)
    for linear in block.middle:
        h = nn.functional.gelu(linear(h))
    return model.answer(block.down(h))


def _beside_sgd(model: Regressor, batch: Batch, states: Tensor) -> dict[str, Any]:
    """Squared error at the query after i points, by implicit updates and by as many steps of SGD on the same map.

    SGD sees the points one after the other, each as a query of its own. Per rate the curve, null where it diverged;
    cosines are between the whole updates, averaged over tasks.
    """
    block, (tasks, n, _) = _block(model), batch.tokens.shape
    W0 = block.up.weight.expand(tasks, -1, -1)
    a0 = states[:, 0]
    implicit = [float((_with_weight(model, W0, a) - batch.y).square().mean()) for a in states.unbind(1)]
    points = batch.tokens[:, :-1].clone()
    asked, wanted = points.clone(), points[..., -1]
    asked[..., -1] = 0
    alone = block.norm2(block.stream(model.embed(asked.flatten(0, 1)[:, None]))[:, 0]).unflatten(0, (tasks, n - 1))
    whole = torch.einsum("fd,bd->bf", block.up.weight, states[:, -1] - a0)[..., None] * a0[:, None]
    curves: dict[str, list[float] | None] = {}
    cosines: dict[str, float | None] = {}
    for rate in RATES:
        W = W0.clone()
        curve = [implicit[0]]
        for k in range(n - 1):
            with torch.enable_grad():
                W.requires_grad_(True)
                error = 0.5 * (_with_weight(model, W, alone[:, k]) - wanted[:, k]).square().sum()
                (gradient,) = torch.autograd.grad(error, W)
            W = (W - rate * gradient).detach()
            curve.append(float((_with_weight(model, W, a0) - batch.y).square().mean()))
        settled = all(error <= DIVERGED for error in curve)
        cosine = float(torch.cosine_similarity((W - W0).flatten(1), whole.flatten(1)).mean())
        curves[f"{rate:g}"], cosines[f"{rate:g}"] = (curve, cosine) if settled else (None, None)
    return {"implicit": implicit, "sgd": curves, "cosine": cosines}


def _static(model: Regressor, batch: Batch, queries: Sequence[int], tests: int = 100) -> dict[str, list[float]]:
    """Error of one static patch per context on `tests` new queries, as a share of the unpatched, by its number of
    calibration queries; medians over the contexts.

    `Delta = W D`, `D = argmin Σ ‖D a_k - (a_k with the context - a_k)‖²`, of least norm.
    """
    generator = torch.Generator().manual_seed(5)
    block, inputs = _block(model), batch.weights.shape[1]
    shares: list[list[float]] = []
    for context in batch.tokens[:, :-1]:
        asked = torch.zeros(max(queries) + tests, 1, inputs + 1)
        asked[..., :-1] = torch.randn(len(asked), 1, inputs, generator=generator)
        both = torch.cat([context.expand(len(asked), -1, -1), asked], 1)
        a, a_C = (block.norm2(block.stream(model.embed(t))[:, -1]) for t in (asked, both))
        W = block.up.weight.expand(tests, -1, -1)
        wanted = _with_weight(model, W, a_C[-tests:])
        bare = (_with_weight(model, W, a[-tests:]) - wanted).norm()
        row = []
        for count in queries:
            D = solved(torch.linalg.lstsq, a[:count].double(), (a_C - a)[:count].double(), driver="gelsd")[0].T
            moved = a[-tests:] + (a[-tests:].double() @ D.T).float()
            row.append(float((_with_weight(model, W, moved) - wanted).norm() / bare))
        shares.append(row)
    return {"queries": list(queries), "share": torch.tensor(shares).median(0).values.tolist()}
