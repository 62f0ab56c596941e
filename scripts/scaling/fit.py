"""Seconds from operations and bytes: four rates of a machine, fitted to measured points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from scaling.costs import WORD, Cost, Shape, bake, sequence, token

__all__ = ["OPERATIONS", "Rates", "cost_of", "fitted", "shape_of"]

Row = Mapping[str, Any]

OPERATIONS = ("token", "sequence", "bake")


@dataclass(frozen=True)
class Rates:
    """What one thread of a machine does; seconds are the sum of four quotients."""

    run: float
    """Operations a second in forwards of many tokens, float32."""
    solve: float
    """Operations a second in solves, most of them in float64."""
    stream: float
    """Bytes a second of weights that are read for a few rows, or written."""
    layer: float
    """Seconds that a pass through a layer takes whatever its size."""

    def seconds(self, cost: Cost, shape: Shape) -> float:
        """Predicted, of one call."""
        return float(features(cost, shape) @ np.array([1 / self.run, 1 / self.solve, 1 / self.stream, self.layer]))


def features(cost: Cost, shape: Shape) -> np.ndarray:
    """What takes time: operations of forwards and of solves, bytes of weights passed by, layers passed through."""
    passes = cost.layers / shape.L
    return np.array([cost.runs, cost.solves + cost.factorings, WORD * shape.maps * passes, cost.layers], dtype=float)


def shape_of(row: Row) -> Shape:
    return Shape(*(row[key] for key in ("L", "d", "f", "q", "kv", "V")))


def cost_of(row: Row) -> Cost:
    """By the formulas, of what a row measured."""
    shape = shape_of(row)
    match row["operation"]:
        case "token":
            return token(shape, row["context"], row["query"])
        case "sequence":
            return sequence(shape, row["context"], row["query"])
    return bake(shape, row["context"], row["questions"], row["tail"], [(a, b) for a, b in row["ranks"]])


def fitted(rows: Sequence[Row]) -> Rates:
    """The rates under which the squares of the relative errors of `rows` are least, none of them negative."""
    seen = np.array([features(cost_of(row), shape_of(row)) / row["seconds"] for row in rows])
    size = seen.max(0)
    found, _ = nnls(seen / size, np.ones(len(rows)))
    run, solve, stream, layer = found / size
    return Rates(*(1 / part if part > 0 else np.inf for part in (run, solve, stream)), layer)
