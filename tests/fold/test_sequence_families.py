"""One patch for a sequence on every code path, in float64: exact, or with a reason that the layers name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zoo
from conformance import UNPATCHED
from sequences import POSITIONS, measure_sequences


@pytest.mark.parametrize("model_type", [*zoo.TWELVE, "cpmant"])  # the last puts rows of its own in front of the tokens
def test_every_code_path_is_exact_for_a_sequence(model_type):
    for n, found in measure_sequences(model_type).items():
        assert found.unpatched > UNPATCHED, n
        assert found.exact, (n, found)


def test_the_census_of_sequences_speaks_of_every_type():
    """`python scripts/sequences.py families` writes it; every type that a token patch serves is there with a figure."""
    folder = Path(__file__).parents[2] / "docs" / "measured"
    rows = json.loads((folder / "sequences.json").read_text())["model_types"]
    support = json.loads((folder / "support.json").read_text())["model_types"]
    served = {name for name, row in support.items() if row["status"] == "exact"}
    assert served == set(rows)
    for name, row in rows.items():
        assert set(row["positions"]) == {str(n) for n in POSITIONS}, name
        assert all(entry["exact"] or entry["reason"] for entry in row["positions"].values()), name
