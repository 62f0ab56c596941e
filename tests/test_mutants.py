"""The figures of the wrong versions: they add up, enough were seen, and every one that was not has its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy.stats import binomtest

FIGURES = json.loads((Path(__file__).parents[1] / "docs" / "measured" / "mutants.json").read_text(encoding="utf-8"))


def test_the_counts_add_up() -> None:
    modules = FIGURES["modules"].values()
    for key in ("made", "tried", "killed"):
        assert sum(module[key] for module in modules) == FIGURES[key]
    assert FIGURES["tried"] - FIGURES["killed"] == FIGURES["survived"] == len(FIGURES["survivors"])
    assert FIGURES["killed_share"] == pytest.approx(FIGURES["killed"] / FIGURES["tried"])
    interval = binomtest(FIGURES["killed"], FIGURES["tried"]).proportion_ci(0.95, method="exact")
    assert FIGURES["interval"] == pytest.approx([interval.low, interval.high], rel=1e-6)


def test_nine_in_ten_are_seen_whatever_the_sample() -> None:
    assert FIGURES["interval"][0] >= 0.9


def test_every_survivor_has_its_reason() -> None:
    assert [row["where"] for row in FIGURES["survivors"] if not row["why"]] == []
    assert sum(row["equivalent"] for row in FIGURES["survivors"]) == FIGURES["equivalent"]
