"""Lists of a run that belong together: name, and lengths that must be equal and not nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from contextfold.magnitudes import EDGES

__all__ = [
    "ablate_lengths",
    "bake_lengths",
    "fold_lengths",
    "generate_lengths",
    "reproduce_lengths",
    "sequence_lengths",
    "uneven",
]

Found = Mapping[str, Any]
Lengths = Iterator[tuple[str, list[int]]]


def uneven(lengths: Lengths) -> str | None:
    """The first that are not equal, or nothing, in words; None where all is well."""
    for name, found in lengths:
        if not found or 0 in found:
            return f"nothing stands under {name}"
        if len(set(found)) > 1:
            return f"lists of {name} that belong together have lengths {', '.join(map(str, sorted(set(found))))}"
    return None


def fold_lengths(found: Found) -> Lengths:
    layers, steps = found["layers"], found.get("steps")
    yield "layers", [len(layers)]
    if steps is not None:
        yield "steps", [len(steps)]
        for key in ("weight_ratio", "relative_error"):
            yield key, [len(layers), *(len(step[key]) for step in steps)]
    if any(layer.get("u_counts") for layer in layers):
        yield "u_counts", [len(found.get("u_edges") or ()) + 1, *(len(layer["u_counts"]) for layer in layers)]
    yield from _spectra(found)


def sequence_lengths(found: Found) -> Lengths:
    positions = found["positions"]
    yield "positions", [len(positions)]
    yield "actions", [len(positions), *(len(layer["actions"]) for layer in found["layers"] if layer.get("actions"))]
    yield from _spectra(found)


def generate_lengths(found: Found) -> Lengths:
    yield "steps", [len(found["steps"])]
    for key in ("weight_ratio", "relative_error"):
        proven = [len(step[key]) for step in found["steps"] if step.get(key) is not None]
        if proven:
            yield key, proven


def ablate_lengths(found: Found) -> Lengths:
    parts = found["parts"]
    yield "parts", [len(parts), len(found["ranking"])]
    yield "positions", [len(part["positions"]) for part in parts]
    yield "layers", [len(row["layers"]) for part in parts for row in part["positions"]]


def bake_lengths(found: Found) -> Lengths:
    windows = [row["in_window"] for row in found["controls"].values() if row.get("in_window")]
    beside = (*found["controls"].values(), *windows, *found["fewer"].values())
    yield "interval", [2, len(found["interval"]), *(len(row["interval"]) for row in beside)]
    if found.get("held_out") is not None:
        yield "held_out", [len(found["held_out"])]
    yield from _spectra(found)


def reproduce_lengths(found: Found) -> Lengths:
    yield "rows", [len(found["rows"])]
    yield "parts", [len(found["parts"]), len(found["details"])]
    known = _PAPERS.get(found["paper"])
    if known is not None:
        for name, part in found["details"].items():
            yield from known(name, part)


def _prompt_lengths(name: str, part: Found) -> Lengths:
    ways = [curve.get(way) for curve in (part.get("curves") or {}).values() for way in ("written", "perturbed")]
    columns = [way["logit_gap"] for way in ways if way]
    if columns:
        yield f"logit_gap of {name}", [*map(len, columns), len((part.get("unpatched") or {}).get("logit_gap", ()))]
    for counts in part["u"]["counts"]:
        yield f"counts of {name}", [len(EDGES) + 1, len(counts)]


def _block_lengths(name: str, part: Found) -> Lengths:
    if part.get("step_norm") is not None:
        yield f"step_norm of {name}", [len(row) for row in part["step_norm"]]
    if part.get("sgd") is not None:
        curves = [curve for curve in part["sgd"]["sgd"].values() if curve is not None]
        yield f"sgd of {name}", [len(part["sgd"]["implicit"]), *map(len, curves)]
    if part.get("static") is not None:
        yield f"static of {name}", [len(part["static"]["queries"]), len(part["static"]["share"])]


def _position_lengths(name: str, part: Found) -> Lengths:
    yield f"blocks of {name}", [len(seed["blocks"]) for seed in part["seeds"]]
    yield f"norms of {name}", [len(block["norms"]) for seed in part["seeds"] for block in seed["blocks"]]


_PAPERS: Mapping[str, Callable[[str, Found], Lengths]] = {
    "2511.17864": _prompt_lengths,
    "2507.16003": _block_lengths,
    "2512.11255": _position_lengths,
}
"""By the number of a paper, what belongs together in a part of its details."""


def _spectra(found: Found) -> Lengths:
    for row in found.get("spectra") or []:
        if row["kind"] == "matrix":
            yield f"singular_values of {row['site']}", [len(row["numbers"]), len(row["singular_values"])]
