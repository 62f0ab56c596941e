"""Sections about a reproduced paper: its published figures beside ours, what is missing, what was measured besides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from contextfold.report import figures
from contextfold.report.papers import PAPERS
from contextfold.report.parts import Cell, Note, Part, Section, Table, drawing, number, readable, visible
from contextfold.report.reading import Run
from contextfold.report.sections_common import receipt

__all__ = ["paper_sections", "paper_sentence", "paper_title"]

Row = Mapping[str, Any]

LEAD = (
    "Published: what the paper states; a dash where it states nothing. Ours: what came out here; a dash where it could "
    "not be measured, and the line below says why. Difference: ours less published, where both are numbers."
)

COLUMNS = ("figure", "published", "ours", "difference")


def paper_title(found: Row) -> str:
    """Of the chapter."""
    where = f", on {found['model']}" if found["model"] else ", on small models trained for it"
    return f"arXiv {readable(found['paper'])}{readable(where)}: {readable(found['title'])}"


def paper_sentence(found: Row) -> str:
    """How many figures stand beside each other, in words, without a verdict."""
    rows = found["rows"]
    apart = [row for row in rows if row["difference"] is not None]
    equal = sum(row["difference"] == 0 for row in apart)
    unmeasured = sum(row["published"] is not None and row["ours"] is None for row in rows)
    left = len(found["not_reproduced"])
    worded = sum(isinstance(row["published"], str) and row["ours"] is not None for row in rows)
    said = [
        (len(rows), f"{len(rows)} rows."),
        (len(apart), f"A published number stands beside {len(apart)}: {equal} equal, {len(apart) - equal} different."),
        (worded, f"The paper's words stand beside {worded}."),
        (unmeasured, f"Published, but not measurable here: {unmeasured}."),
        (left, f"Reported by the paper, but not reproduced: {left}; the reasons are below."),
    ]
    quick = "Quick form: small sizes, whose figures compare with nothing. " if found["quick"] else ""
    return quick + " ".join(words for count, words in said if count)


def paper_sections(run: Run, name: str) -> list[Section]:
    """Of `reproduce`: rows in numbers, what is missing, and what the details hold to be drawn."""
    found = run.found
    known = PAPERS.get(found["paper"])
    return [
        *([known.words] if known else []),
        Section("Published figures and ours", LEAD, _rows(found, name)),
        _missing(found),
        *(known.sections(found, name) if known else []),
        _seconds(found),
        receipt(found),
    ]


def _rows(found: Row, name: str) -> list[Part]:
    """A table per section, and a figure where its rows share a unit."""
    tables: list[Part] = []
    for at, (section, group) in enumerate(groupby(enumerate(found["rows"]), key=lambda row: row[1]["section"])):
        rows = list(group)
        drawn = [row for _, row in rows if _numeric(row["published"]) or _numeric(row["ours"])]
        stated = any(_numeric(row["published"]) and _numeric(row["ours"]) for row in drawn)
        shown = len(drawn) > 1 and (stated or section.endswith("%"))
        if shown:
            tables.append(_drawn(f"{name}-rows-{at}", section, drawn))
        cells: list[Sequence[Cell]] = [
            (whole_name(row["figure"]), *(_cell(found, k, key) for key in ("published", "ours", "difference")))
            for k, row in rows
        ]  # fmt: skip
        notes = [readable(row["note"]) for _, row in rows]
        tables.append(
            Table(
                f"In numbers: {readable(section)}" if shown else readable(section), COLUMNS, cells, open=True,
                notes=notes if any(notes) else (),
            )
        )  # fmt: skip
    return tables


def _drawn(name: str, section: str, rows: Sequence[Row]) -> Part:
    plain = [
        {**row, **{key: row[key] if _numeric(row[key]) else None for key in ("published", "ours")}} for row in rows
    ]
    both = sum(_numeric(row["published"]) and _numeric(row["ours"]) for row in rows)
    words = "Squares: published. Dots: ours." if both else "Ours; the paper states nothing here."
    return drawing(
        name, figures.beside(plain, section.endswith("%")), readable(section), words,
        f"{len(rows)} rows, {both} of them with a published figure beside ours.",
    )  # fmt: skip


def _numeric(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def whole_name(text: str) -> str:
    """A name of a row, whole."""
    return readable(" ".join(text.split()))


def _cell(found: Row, k: int, key: str) -> Cell:
    value = found["rows"][k][key]
    if value is None:
        return "–"
    if isinstance(value, str):
        return visible(value)
    return number(found, f"rows/{k}/{key}", "+" if key == "difference" else "4")


def _missing(found: Row) -> Section:
    rows = [(readable(each["what"]), readable(each["why"])) for each in found["not_reproduced"]]
    title = "What was not reproduced, and why"
    if not rows:
        return Section(title, parts=[Note("Everything that the paper reports was tried.")])
    return Section(title, "", [Table("Left out", ("what", "why"), rows, open=True, words=True)])


def _seconds(found: Row) -> Section:
    rows: list[Sequence[Cell]] = [
        (readable(part["name"]), number(found, f"parts/{k}/seconds", "4"),
         number(found, f"parts/{k}/processor_seconds", "4"), "yes" if part["resumed"] else "no")
        for k, part in enumerate(found["parts"])
    ]  # fmt: skip
    rows.append(("all", number(found, "seconds", "4"), number(found, "processor_seconds", "4"), ""))
    columns = ("part", "seconds", "of the processor", "kept from before")
    return Section("What it took", "", [Table("Parts", columns, rows)])
