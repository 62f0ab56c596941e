"""The documented table of rules is the one in the code, and every row of the sheet has its rule."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from contextfold.errors import InputError
from contextfold.outcomes import Outcome
from contextfold.rules import REFERENCES, RULES, UpdateRule, rule_named

ROOT = Path(__file__).parent.parent.parent

SHEET = {
    "input weight", "input bias", "input scale", "output weight", "output bias", "output scale",
    "output weight through a norm", "attention output", "output weight alone", "parallel output",
    "experts, input weight", "experts by even share", "experts by least norm", "shared expert alone",
    "experts, output only",
}  # fmt: skip
"""Sections 3, 4 and 7 of the equation sheet, row by row."""


def test_the_page_is_as_generated() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "tables.py"))["rules_page"]()
    assert (ROOT / "docs" / "rules.md").read_text(encoding="utf-8") == page, "run python scripts/tables.py"


def test_every_row_of_the_sheet_has_a_rule() -> None:
    assert {rule.name for rule in RULES} >= SHEET
    assert {m.name for m in REFERENCES} >= {"theorem", "appendix", "scalar", "floored", "flat"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_says_everything_about_itself(rule: type[UpdateRule]) -> None:
    for text in (rule.name, rule.equation, rule.source, rule.condition, rule.minimal, rule.__doc__):
        assert text
    assert all(isinstance(outcome, Outcome) and outcome is not Outcome.EXACT for outcome in rule.meets)
    assert rule_named(rule.name) is rule


def test_names_are_unique_and_an_unknown_one_lists_them() -> None:
    names = [rule.name for rule in RULES] + [m.name for m in REFERENCES]
    assert len(set(names)) == len(names)
    with pytest.raises(InputError, match="choose one of input weight"):
        rule_named("magic")
