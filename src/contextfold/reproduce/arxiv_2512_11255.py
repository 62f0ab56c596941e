"""arXiv 2512.11255: the update at every position and in every block, on in-context linear regression."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from contextfold.reproduce.engine import Paper, Part
from contextfold.reproduce.positions import measure_positions
from contextfold.reproduce.row import Missing, Row

__all__ = ["PAPER"]

CASES = {
    "attention": ("attention, no norms", {"mixing": "attention", "norms": False}),
    "attention-norms": ("attention, LayerNorm before mixer and MLP", {"mixing": "attention", "norms": True}),
    "gru": ("a GRU in place of attention, no norms", {"mixing": "gru", "norms": False}),
}


def _parts(quick: bool) -> list[Part]:
    steps, tasks, seeds = (4, 2, (0,)) if quick else (100, 16, (0, 1, 2))
    recipe = {"steps": steps, "tasks": 128, "rate": 5e-2, "points": 8 if quick else 50, "inputs": 2}
    parts = []
    for name, (_, choice) in CASES.items():
        shape = {"layers": 5, "width": 3, "heads": 3, "hidden": 12, "inner": 2, "embed": False, **choice}
        options = {"shape": shape, "recipe": recipe, "tasks": tasks, "seeds": seeds}
        parts.append(Part(name, measure_positions, options, steps * len(seeds)))
    return parts


def _rows(results: Mapping[str, Any]) -> list[Row]:
    cases = [(words, results[name]["seeds"]) for name, (words, _) in CASES.items()]
    untrained = {words: [results[name]["untrained"]] for name, (words, _) in CASES.items()}
    return [
        *(_gap(words, seeds) for words, seeds in cases),
        *(_tokens(words, seeds, untrained[words]) for words, seeds in cases),
        *(_last(words, seeds) for words, seeds in cases),
        *(_between(words, seeds) for words, seeds in cases),
        *(_rank(words, seeds) for words, seeds in cases),
    ]


def _per_block(seeds: Any, key: str) -> list[float]:
    """Means over the seeds."""
    return [mean(block[key] for block in blocks) for blocks in zip(*(seed["blocks"] for seed in seeds), strict=True)]


def _gap(words: str, seeds: Any) -> Row:
    gaps, bare = _per_block(seeds, "squared_gap"), _per_block(seeds, "unpatched_squared_gap")
    errors = ", ".join(f"{seed['loss']['with_context']:.2g}" for seed in seeds)
    note = (
        f"float32, {len(seeds)} seeds, mean over tasks and positions, in the worst block; unpatched {min(bare):.2g} in "
        f"the best; squared error of the models at the query {errors}"
    )
    ours = "matches" if max(gaps) < 1e-6 * min(bare) else f"does not match ({max(gaps):.2g})"
    section = "squared gap from theory to model, at every position of every block"
    return Row(section, words, "matches", ours, f"{max(gaps):.2g}, {note}")


ALIGNED = 0.1
"""Mean cosine from which updates are said to align."""


def _tokens(words: str, seeds: Any, untrained: Any) -> Row:
    inner = _per_block(seeds, "alignment_context")
    blocks = ", ".join(f"{value:.2f}" for value in inner)
    ours = "align" if min(inner) > ALIGNED else "do not align"
    before = mean(_per_block(untrained, "alignment_context"))
    note = (
        f"mean cosine by block: {blocks}; before training {before:.2f} on average; all are changes away from one "
        "vector, that of the query alone, and independent ones would have a cosine near 0.5"
    )
    return Row("updates of two context positions in one block", words, "align", ours, note)


def _last(words: str, seeds: Any) -> Row:
    inner, last = _per_block(seeds, "alignment_context"), _per_block(seeds, "alignment_last")
    sizes = [mean(mean(b["norms"][:-1]) for b in blocks) for blocks in zip(*(s["blocks"] for s in seeds), strict=True)]
    ends = [mean(b["norms"][-1] for b in blocks) for blocks in zip(*(s["blocks"] for s in seeds), strict=True)]
    apart = mean(ends) < 0.5 * mean(sizes) or mean(last) < 0.5 * mean(inner)
    blocks = ", ".join(f"{value:.2f}" for value in last)
    note = f"cosine with the context positions by block: {blocks}; its norm {mean(ends):.2g}, theirs {mean(sizes):.2g}"
    ours = "behaves differently" if apart else "behaves alike"
    return Row("the last position", words, "behaves differently", ours, note)


def _between(words: str, seeds: Any) -> Row:
    pairs = [
        abs(value) for seed in seeds for i, row in enumerate(seed["between_blocks"]) for value in row[:i]
    ]  # fmt: skip
    note = f"mean |cosine| {mean(pairs):.2f}, largest {max(pairs):.2f}; averaged over positions and tasks"
    return Row("updates of one position in two blocks, mean |cosine|", words, None, round(mean(pairs), 3), note)


def _rank(words: str, seeds: Any) -> Row:
    rank = max(block["rank"] for seed in seeds for block in seed["blocks"])
    note = "all of them read the same vector, that of the query alone, so the sum cannot have more"
    return Row("rank of the sum of the updates over the positions", words, None, rank, note)


PAPER = Paper(
    number="2512.11255",
    title="A simple generalisation of the implicit dynamics of in-context learning",
    model=None,
    parts=_parts,
    rows=_rows,
    missing=(
        Missing("sweeps over tasks, length, dimension and heads", "one setting of each is run: the paper's defaults"),
        Missing("the figures behind 'align' and 'differently'", "only the findings in words are known"),
    ),
)
