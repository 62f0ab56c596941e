"""A result as a small piece of HTML, which a notebook shows in place of its `repr`. Strings only; nothing is imported.

Colours are those of the notebook: text and lines take whatever the theme gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["card", "short"]

_CELL = "padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.35)"


def short(value: float | None) -> str:
    """Two significant digits, or a dash."""
    return "–" if value is None or value != value else f"{value:.2g}"


def card(
    title: str, sentence: str, columns: Sequence[str], rows: Sequence[Sequence[str]], holds: bool | None = None
) -> str:
    """Title, sentence and a table; all texts are escaped. `holds` is None where nothing was to be proven."""
    mark = {None: "", True: "✓ ", False: "✗ "}[holds]
    side = {None: "rgba(128,128,128,.6)", True: "#00795a", False: "#b3261e"}[holds]
    head = "".join(_cell("th", name, k) for k, name in enumerate(columns))
    body = "".join(f"<tr>{''.join(_cell('td', value, k) for k, value in enumerate(row))}</tr>" for row in rows)
    return (
        f'<div style="border-left:4px solid {side};padding:4px 12px;max-width:60em;overflow-x:auto">'
        f'<div style="font-weight:600">{escape(title)}</div><div>{mark}{escape(sentence)}</div>'
        f'<table style="border-collapse:collapse;margin:6px 0 0"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(tag: str, value: str, column: int) -> str:
    return f'<{tag} style="{_CELL};text-align:{"left" if column == 0 else "right"}">{escape(value)}</{tag}>'
