"""What a page is made of, before any HTML: sections of figures, tables, token strips and texts."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from contextfold.report.canvas import frame, inline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Answers",
    "Cell",
    "Drawing",
    "Heat",
    "Note",
    "Number",
    "Part",
    "Section",
    "Strip",
    "Table",
    "Text",
    "Token",
    "drawing",
    "escaped",
    "number",
    "readable",
    "shown",
    "visible",
]

LONGEST = 40
"""Characters of a token that are shown."""

CELLS = 4000
"""A table of more cells helps nobody; the JSON has them."""


@dataclass(frozen=True)
class Number:
    """A figure of the JSON: where it stands there, what it is, and how it is shown."""

    key: str
    value: float | int | None
    text: str


@dataclass(frozen=True)
class Text:
    """A text that came with the run; shown as it is, never as markup."""

    title: str
    body: str


@dataclass(frozen=True)
class Note:
    """A sentence of ours."""

    body: str


Cell = str | Number


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    open: bool = False
    """Shown at once; others unfold."""
    words: bool = False
    """Its cells are words, which may break anywhere."""
    notes: Sequence[str] = ()
    """A line below the first cell of each row, `""` for none; no lines at all where this is empty."""


@dataclass(frozen=True)
class Heat:
    """What a pointer or the arrow keys read off a heat map."""

    frame: tuple[float, float, float, float]
    values: Sequence[Sequence[float | None]]
    """By token, then by layer."""
    names: Sequence[str]
    """Of the tokens."""
    unit: str


@dataclass(frozen=True)
class Drawing:
    title: str
    caption: str
    svg: str
    alt: str
    table: Table | None = None
    heat: Heat | None = None


@dataclass(frozen=True)
class Token:
    """One column of a strip: what each row shows, whether it differs from the first choice with the context, and more
    on demand."""

    chips: Sequence[tuple[str, bool]]
    details: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Strip:
    title: str
    lead: str
    rows: Sequence[str]
    lines: Sequence[tuple[str, Sequence[Token]]]
    """Name of a line, where there are several, and its tokens."""
    table: Table | None = None


@dataclass(frozen=True)
class Answers:
    """A question, and by name what each model says."""

    question: str
    said: Sequence[tuple[str, str]]
    numbers: Sequence[tuple[str, Cell]] = ()


Part = Drawing | Table | Strip | Text | Note | Answers


@dataclass(frozen=True)
class Section:
    title: str
    lead: str = ""
    parts: Sequence[Part] = field(default_factory=list)


def number(found: Mapping[str, Any], key: str, form: str = "g") -> Number:
    """The entry at `key`, a JSON pointer without its first slash (RFC 6901), such as `layers/3/condition`.

    `form`: `g`, two digits; `4`, four; `n`, a whole number; `%`, per cent with one decimal; `+`, three digits with
    their sign.
    """
    value: Any = found
    for step in key.split("/"):
        value = value[int(step)] if isinstance(value, Sequence) else value[step.replace("~1", "/").replace("~0", "~")]
    return Number(key, value, shown(value, form))


def escaped(name: str) -> str:
    """A name that came with the run, as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def shown(value: float | int | None, form: str = "g") -> str:
    """As in the terminal: two digits, or a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    return {"g": f"{value:.2g}", "4": f"{value:.4g}", "n": f"{value:.0f}", "%": f"{value:.1%}", "+": f"{value:+.3g}"}[
        form
    ]


def drawing(
    name: str,
    figure: Figure,
    title: str,
    caption: str,
    alt: str,
    *,
    table: Table | None = None,
    heat: tuple[Sequence[Sequence[float | None]], Sequence[str], str] | None = None,
) -> Drawing:
    """A figure as a part of the page; `name` is unique on it. `heat`: values, names of the tokens, unit."""
    if table is not None and len(table.rows) * len(table.columns) > CELLS:
        table = None
    read = None if heat is None else Heat(frame(figure, figure.axes[0]), *heat)
    svg = inline(figure, re.sub(r"[^a-z0-9]+", "-", name.lower()))
    return Drawing(title, caption, svg, alt, table, read)


MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", "": "∅"}


def visible(text: str | None) -> str:
    """A token on one line: what has no shape of its own gets one."""
    if text is None:
        return "–"
    if text in MARKS:
        return MARKS[text]
    if not text.strip(" "):
        return "␣" * min(len(text), LONGEST)
    found = "".join(MARKS.get(c) or _escaped(c) for c in text)
    return found if len(found) <= LONGEST else found[: LONGEST - 1] + "…"


def readable(text: str) -> str:
    """A longer text: lines stay, and characters that would act on what stands around them are written out."""
    return "".join(c if c in "\n\t" else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    """Control, format (bidirectional marks) and other invisible characters by their number."""
    category = unicodedata.category(char)
    joins = char in "\u200c\u200d"  # these shape letters and emojis, and do nothing else
    hidden = category in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and not joins
    return f"\\u{{{ord(char):x}}}" if hidden else char
