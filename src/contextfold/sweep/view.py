"""A sweep on the screen: a line per model, context and method, then what failed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from contextfold.sweep.engine import Outcome

__all__ = ["outcome_view"]

SHOWN = 10
"""Failed jobs that are named."""


def outcome_view(outcome: Outcome) -> RenderableType:
    """The whole screen."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "context", "method"):
        table.add_column(name)
    for name in ("jobs", "hold", "figure, median", "seconds"):
        table.add_column(name, justify="right")
    for (model, context, method), found in groupby(sorted(outcome.rows, key=_group), key=_group):
        table.add_row(Text(model), Text(context), Text(method), *_cells(list(found)))
    failed = outcome.failed
    lines = [Text(f"failed: {row['job'][:16]}, {row['model']}, {row['context']}: {row['error']}") for row in failed]
    more = [] if len(lines) <= SHOWN else [Text(f"and {len(lines) - SHOWN} more")]
    kept = len(outcome.rows) - outcome.ran
    missing = len(outcome.jobs) - len(outcome.rows)
    lost = f", {outcome.lost} workers died" if outcome.lost else ""
    last = (
        f"{len(outcome.jobs)} jobs: {outcome.ran} run, {kept} kept, {missing} missing, {len(failed)} failed{lost}; "
        f"{outcome.seconds:.1f} s on {outcome.workers} worker{'s' if outcome.workers > 1 else ''}."
    )
    return Group(table, *lines[:SHOWN], *more, Text(last))


def _group(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["context"], row["estimator"] or f"fold, {row['rule']}"


def _cells(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    done = [row for row in rows if row["error"] is None]
    key, unit = ("kl_recovered", "{:.1%} recovered") if rows[0]["kind"] == "bake" else ("worst_logit_gap", "{:.2g} gap")
    values = [row[key] for row in done if row[key] is not None]
    figure = unit.format(statistics.median(values)) if values else "–"
    seconds = sum(row["seconds"] or 0.0 for row in rows)
    return str(len(rows)), str(sum(row["holds"] for row in done)), figure, f"{seconds:.1f}"
