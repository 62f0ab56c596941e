"""A reproduced paper on the screen: published figures, ours, and what is missing."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from contextfold.reproduce.engine import Outcome

__all__ = ["cell", "outcome_view"]


def outcome_view(outcome: Outcome) -> RenderableType:
    """The whole screen."""
    paper = outcome.paper
    where = f" on {outcome.model}" if outcome.model else ""
    quick = "Quick form: small sizes, figures compare with nothing. " if outcome.quick else ""
    table = Table(
        title=f"arXiv {paper.number}{where}: {paper.title}", title_justify="left", box=box.SIMPLE_HEAD,
        caption=f"{quick}Difference: ours less published.", caption_justify="left", pad_edge=False,
    )  # fmt: skip
    for name in ("published", "ours", "difference"):
        table.add_column(name, justify="right")
    table.add_column("figure", ratio=1)
    for section, rows in groupby(outcome.rows, key=lambda row: row.section):
        table.add_row("", "", "", Text(section, style="bold"))
        for row in rows:
            note = Text(f"\n{row.note}", style="dim") if row.note else Text("")
            table.add_row(
                cell(row.published), cell(row.ours), cell(row.difference, "+"), Text(f"  {row.figure}") + note
            )  # fmt: skip
        table.add_section()
    missing = Table(title="not reproduced here", title_justify="left", box=box.SIMPLE_HEAD)
    missing.add_column("what")
    missing.add_column("why", style="dim")
    for each in paper.missing:
        missing.add_row(each.what, each.why)
    seconds = sum(part["processor_seconds"] for part in outcome.parts)
    kept = sum(part["resumed"] for part in outcome.parts)
    return Group(table, missing, f"{seconds:.0f} seconds of the processor; {kept} of {len(outcome.parts)} parts kept.")


def cell(value: float | str | None, sign: str = "") -> str:
    """A number to four significant digits, words as they are, a dash for nothing."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:{sign}.4g}"
