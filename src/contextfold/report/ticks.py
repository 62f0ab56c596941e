"""Axes whose ticks, scales and names read like the numbers on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from contextfold.report.canvas import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["colour_bar", "floor_of", "integers", "legend", "logarithmic", "whole"]

TINY = 1e-17
"""Where a zero is drawn on a logarithmic axis that has nothing else."""


def logarithmic(ax: Axes, which: str = "y") -> None:
    """A logarithmic axis whose ticks read like the numbers on the page; between powers of ten only where few are seen.

    To be called when everything is drawn.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (ax.set_yscale if which == "y" else ax.set_xscale)("log")
    axis = ax.yaxis if which == "y" else ax.xaxis
    low, high = sorted(ax.get_ylim() if which == "y" else ax.get_xlim())
    short = FuncFormatter(lambda value, _: f"{value:g}")
    near = high < 20 * low
    axis.set_major_locator(LogLocator(numticks=6 if which == "x" else 9))
    axis.set_major_formatter(short)
    axis.set_minor_locator(LogLocator(subs=(2.0, 5.0) if near else (), numticks=12))
    axis.set_minor_formatter(short if near else NullFormatter())


def colour_bar(figure: Figure, image: Any, label: str) -> None:
    """What the colours mean, above the axes."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    bar = figure.colorbar(image, ax=image.axes, location="top", aspect=40, pad=0.02)
    bar.set_label(label)
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = image.get_clim()
    near = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    bar.ax.xaxis.set_minor_formatter(near if high < 20 * low else NullFormatter())
    bar.outline.set_visible(False)


def integers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=8, integer=True)


def legend(ax: Axes) -> None:
    """Above the plot, where it hides nothing, as plain text whatever the names hold."""
    handles, labels = ax.get_legend_handles_labels()
    if not handles:
        return
    columns = 1 if max(map(len, labels)) > 18 else 3 if max(map(len, labels)) < 10 else 2
    found = ax.legend(loc="lower left", bbox_to_anchor=(-0.05, 1.0), ncols=columns, borderaxespad=0.0)
    for text in found.get_texts():
        text.set_parse_math(False)
        text.set_text(plain(text.get_text()))


def whole(ax: Axes, count: int, which: str) -> None:
    """Ticks at whole numbers, few enough to be read."""
    step = max(1, next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if count / s <= 8))
    ticks = list(range(0, count, step))
    (ax.set_xticks if which == "x" else ax.set_yticks)(ticks, labels=[str(t) for t in ticks])


def floor_of(values: Sequence[float | None]) -> float:
    """Where zeros are drawn on a logarithmic axis: below everything else."""
    found = [value for value in values if value is not None and value > 0 and math.isfinite(value)]
    return min(found) / 3 if found else TINY
