"""Blank axes in the report's style, and a figure as SVG inside a page: no script, colours from the page's own."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "GREEN",
    "GRID",
    "INK",
    "MUTED",
    "ORANGE",
    "PURPLE",
    "SERIES",
    "WIDTH",
    "axes",
    "frame",
    "inline",
    "label_rows",
    "plain",
    "style",
]

INK, MUTED, GRID = "#1a1c1f", "#5b6168", "#d9dce1"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e01", "#00795a", "#a9447f"
"""After Okabe and Ito: told apart by every kind of colour vision; each series has a marker of its own besides."""

VARIABLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--line", BLUE: "--blue", ORANGE: "--orange", GREEN: "--green",
    PURPLE: "--purple",
}  # fmt: skip
"""Colours that the page sets, so that one figure serves light and dark."""

SERIES = ((BLUE, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", "-."), (PURPLE, "D", ":"))
"""Colour, marker and dash of the first series, the second, …"""

WIDTH = 4.0
"""Inches: a figure fills a phone, and three stand side by side on a desk."""

_RC = {
    "font.size": 9.0, "font.family": "DejaVu Sans", "axes.titlesize": 9.0, "axes.labelsize": 9.0,
    "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "legend.fontsize": 8.5, "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "axes.grid": True,
    "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "lines.linewidth": 1.3, "lines.markersize": 4.0, "legend.frameon": False,
    "svg.fonttype": "none", "axes.formatter.useoffset": False, "text.parse_math": True,
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    """The settings under which figures are made and written; those of the user come back afterwards."""
    import matplotlib

    with matplotlib.rc_context(_RC), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # the reader's fonts have it
        yield


def axes(height: float = 2.6, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` axes above each other, apart from pyplot and its list of open figures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    figure.patch.set_alpha(0.0)
    found = [figure.add_subplot(rows, 1, k + 1) for k in range(rows)]
    for one in found:
        one.patch.set_alpha(0.0)
    return figure, found


def plain(text: str, limit: int = 36) -> str:
    """A name that came with the run, on one line and not too long."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def label_rows(ax: Axes, labels: Sequence[str]) -> None:
    """Names at the left, the first on top, as plain text whatever they hold."""
    ax.set_yticks(range(len(labels)), labels=[plain(label) for label in labels])
    for text in ax.get_yticklabels():
        text.set_parse_math(False)
        text.set_color(INK)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_SIZE = re.compile(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*"(?=[^>]*viewBox)')
_NAMED = re.compile(r'(\bid="|url\(#|href="#)')


def inline(figure: Figure, prefix: str) -> str:
    """The figure as one `<svg>` element: names begin with `prefix`, so that figures on one page do not meet."""
    file = io.StringIO()
    with style():
        import matplotlib

        with matplotlib.rc_context({"svg.hashsalt": prefix}):
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = _METADATA.sub("", _HEAD.sub("", file.getvalue(), count=1))
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    text = _NAMED.sub(lambda found: f"{found[1]}{prefix}-", f"{head}>{rest}")
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


def frame(figure: Figure, ax: Any) -> tuple[float, float, float, float]:
    """Where the axes lie, as fractions of the figure from its upper left corner: left, top, width, height."""
    figure.draw_without_rendering()
    box = ax.get_position()
    return box.x0, 1 - box.y1, box.width, box.height
