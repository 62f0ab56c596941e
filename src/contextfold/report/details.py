"""What the page reads of the details of a reproduced paper, by its number; of others, its rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contextfold.report.shapes import Each, Maybe, Shape

__all__ = ["detail_shape"]

_COLUMNS: Shape = {"logit_gap": [float]}
_JUDGED: Shape = {"kl_nats": float}

DETAILS: Mapping[str, Shape] = {
    "2511.17864": Each(
        {
            "prompt": Maybe(str), "texts": Maybe(Each(str)), "unpatched": Maybe(_COLUMNS),
            "curves": Maybe(Each({"written": _COLUMNS, "perturbed": Maybe(_COLUMNS)})),
            "u": {"counts": [[int]]}, "held": Maybe(Each(Each([[bool]]))),
        }
    ),
    "2507.16003": Each(
        {
            "step_norm": Maybe([[float]]), "static": Maybe({"queries": [int], "share": [float]}),
            "sgd": Maybe({"implicit": [float], "sgd": Each(Maybe([float]))}),
        }
    ),
    "2512.11255": Each({"seeds": [{"blocks": [{"norms": [float]}]}]}),
    "2609.39329": Each({"kept_tokens": int, "short": _JUDGED, "ways": Each(_JUDGED), "controls": Each(_JUDGED)}),
}  # fmt: skip


def detail_shape(found: Mapping[str, Any]) -> Mapping[str, Shape]:
    """What the details of this run must look like."""
    return {"details": DETAILS.get(found["paper"], object)}
