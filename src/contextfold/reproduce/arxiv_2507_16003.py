"""arXiv 2507.16003: a context as an update of the first map, on in-context linear regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import torch

from contextfold.reproduce.engine import Paper, Part
from contextfold.reproduce.implicit import measure_block, measure_stack
from contextfold.reproduce.row import Missing, Row

__all__ = ["PAPER", "decay"]

MIXERS = ("attention", "gru")

DECAYS = -0.5
"""Exponent of a power law from which steps count as decaying; a mean over i points moves by 1/i, exponent -1."""

LEVEL = 1.5
"""An error within this factor of the smallest counts as level."""

FIRST = 4
"""Steps left out of the fit: with so few points everything moves."""

QUERIES = (1, 2, 3, 5, 8, 10, 15, 25, 50, 100)


def _parts(quick: bool) -> list[Part]:
    steps, tasks, layers = (8, 3, 2) if quick else (400, 100, 10)
    recipe = {"steps": steps, "tasks": 64, "points": 12 if quick else 50, "inputs": 2}
    stack = {"mixing": "attention", "layers": layers, "width": 16, "heads": 2, "hidden": 32, "norms": True}
    options = {"shape": stack, "recipe": {**recipe, "rate": 2e-3}, "tasks": tasks, "seed": 0}
    parts = [Part("stack-attention", measure_stack, options, steps)]
    for mixer in MIXERS:
        shape = {"mixing": mixer, "layers": 1, "width": 16, "heads": 2, "hidden": 64, "skip": False}
        options = {
            "shape": shape, "recipe": {**recipe, "rate": 5e-3}, "tasks": tasks, "seed": 0, "queries": QUERIES,
        }  # fmt: skip
        parts.append(Part(f"block-{mixer}", measure_block, options, steps))
    return parts


def decay(step_norms: Sequence[Sequence[float]]) -> float:
    """Exponent p of `‖W_(i+1) - W_i‖ ~ i^p`: least squares of the mean logarithm over tasks, the first steps apart."""
    sizes = torch.tensor(step_norms, dtype=torch.float64).clamp_min(1e-30).log().mean(0)[FIRST:]
    x = torch.arange(1, len(sizes) + 1).double().add(FIRST).log()
    x = x - x.mean()
    return float((x * (sizes - sizes.mean())).sum() / x.square().sum())


def _rows(results: Mapping[str, Any]) -> list[Row]:
    rows = [_theorem("stack of pre-LN blocks, attention", results["stack-attention"], 1e-6)]
    blocks = {mixer: results[f"block-{mixer}"] for mixer in MIXERS}
    rows += [_theorem(f"one block without a skip, {mixer}", found, None) for mixer, found in blocks.items()]
    claims = {"attention": "decay", "gru": "oscillate"}
    rows += [_course(mixer, claims[mixer], found) for mixer, found in blocks.items()]
    rows += [_sgd(mixer, found) for mixer, found in blocks.items()]
    rows += [_static(mixer, found) for mixer, found in blocks.items()]
    return rows


def _theorem(words: str, found: Mapping[str, Any], published: float | None) -> Row:
    gaps, loss = found["theorem"], found["loss"]
    note = (
        f"float32, weights written, {len(gaps['patched'])} tasks; unpatched {mean(gaps['unpatched']):.2g}, patch of "
        f"another task {mean(gaps['other_task']):.2g}; squared error {loss['without']:.2g} without the context, "
        f"{loss['with_context']:.2g} with it"
    )
    section = "theorem: mean L2 from the output with the context to the patched one without"
    return Row(section, words, published, float(f"{mean(gaps['patched']):.2g}"), note)


def _course(mixer: str, published: str, found: Mapping[str, Any]) -> Row:
    exponent = decay(found["step_norm"])
    sizes = torch.tensor(found["step_norm"], dtype=torch.float64).mean(0)
    rises = float((sizes[1:] > sizes[:-1]).double().mean())
    n = len(sizes)
    ours = "decay" if exponent <= DECAYS else "do not decay"
    note = (
        f"as i^{exponent:.2f}; mean {sizes[: n // 10 + 1].mean():.2g} over the first tenth of {n} steps, "
        f"{sizes[-(n // 10 + 1) :].mean():.2g} over the last; they rise again at {rises:.0%} of the steps"
    )
    return Row("steps of the update of the first map, as the context grows", mixer, published, ours, note)


def _sgd(mixer: str, found: Mapping[str, Any]) -> Row:
    settled = {rate: curve for rate, curve in found["sgd"]["sgd"].items() if curve is not None}
    implicit = found["sgd"]["implicit"]
    rate = min(settled, key=lambda name: settled[name][-1])
    both = torch.tensor([implicit, settled[rate]], dtype=torch.float64)
    ours = round(float(torch.corrcoef(both)[0, 1]), 3)
    note = (
        f"over the number of points; error {implicit[-1]:.2g} after all of them by the context, "
        f"{settled[rate][-1]:.2g} by SGD at the best rate, {rate}; cosine of the two updates "
        f"{found['sgd']['cosine'][rate]:.2f}"
    )
    return Row("correlation of the error by implicit updates with that by SGD", mixer, "they correlate", ours, note)


def _static(mixer: str, found: Mapping[str, Any]) -> Row:
    queries, shares = found["static"]["queries"], found["static"]["share"]
    level = next(count for count, share in zip(queries, shares, strict=True) if share <= LEVEL * min(shares))
    curve = ", ".join(f"{count}: {share:.2g}" for count, share in zip(queries, shares, strict=True))
    note = f"error as a share of the unpatched one, by calibration queries: {curve}"
    if mixer == "attention":
        note += "; at a lone query of two inputs the stream has three dimensions, so three queries say nearly all"
    return Row("one static patch: calibration queries from which the error is level", mixer, "10 to 25", level, note)


PAPER = Paper(
    number="2507.16003",
    title="Learning without training: the implicit dynamics of in-context learning",
    model=None,
    parts=_parts,
    rows=_rows,
    missing=(
        Missing("the paper's own models", "sizes and training are known in part only; ours are small"),
        Missing("the curves themselves", "only their course is known in words, so words stand beside words"),
    ),
)
