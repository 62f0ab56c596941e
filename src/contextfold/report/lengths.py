"""Lists of a run that belong together: name, and lengths that must be equal and not nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["ablate_lengths", "bake_lengths", "fold_lengths", "generate_lengths", "sequence_lengths", "uneven"]

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
    yield "interval", [2, len(found["interval"]), *(len(row["interval"]) for row in found["controls"].values())]
    if found.get("held_out") is not None:
        yield "held_out", [len(found["held_out"])]
    yield from _spectra(found)


def _spectra(found: Found) -> Lengths:
    for row in found.get("spectra") or []:
        if row["kind"] == "matrix":
            yield f"singular_values of {row['site']}", [len(row["numbers"]), len(row["singular_values"])]
