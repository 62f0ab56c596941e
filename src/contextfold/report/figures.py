"""One function per figure. Each takes rows of a command's JSON (or of `to_json()`) and returns a matplotlib figure."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contextfold.report.canvas import BLUE, GRID, MUTED, ORANGE, SERIES, axes, label_rows, plain, style
from contextfold.report.ticks import colour_bar, floor_of, integers, legend, logarithmic, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "beside",
    "curves",
    "edit_norms",
    "gaps",
    "heat_map",
    "layer_sizes",
    "locality",
    "part_costs",
    "places",
    "questions",
    "recovered",
    "residual_error",
    "role_of",
    "singular_values",
    "step_gaps",
    "u_histogram",
]

Row = Mapping[str, Any]


def gaps(rows: Sequence[tuple[str, float | None, str]]) -> Figure:
    """Logit gaps on a logarithmic axis: name, gap, and `patched`, `reference` or `control`."""
    looks = {"patched": (BLUE, "o"), "reference": (MUTED, "D"), "control": (ORANGE, "s")}
    with style():
        figure, (ax,) = axes(0.55 + 0.24 * len(rows))
        floor = floor_of([gap for _, gap, _ in rows])
        for k, (_, gap, kind) in enumerate(rows):
            if gap is None:
                continue
            colour, marker = looks[kind]
            ax.plot([floor, max(gap, floor)], [k, k], color=GRID, linewidth=1.2)
            ax.plot(max(gap, floor), k, marker=marker, color=colour, markersize=6)
        logarithmic(ax, "x")
        label_rows(ax, [name for name, _, _ in rows])
        ax.set_xlabel("logit gap (log scale)")
    return figure


def heat_map(
    values: Sequence[Sequence[float | None]], label: str, across: str = "token", breaks: Sequence[int] = ()
) -> Figure:
    """`values[token][layer]`, layers upwards; cividis, which grows in lightness for every kind of colour vision.

    `breaks`: tokens at which something new begins.
    """
    import numpy as np
    from matplotlib.colors import LogNorm

    with style():
        figure, (ax,) = axes(3.0)
        grid = np.array([[math.nan if v is None else v for v in row] for row in values], dtype=float).T
        seen = grid[np.isfinite(grid) & (grid > 0)]
        low, high = (float(seen.min()), float(seen.max())) if seen.size else (1.0, 1.0)
        norm = LogNorm(max(low, high * 1e-4), high) if high > low else None
        shown = np.where(grid > 0, np.maximum(grid, max(low, high * 1e-4)), grid) if norm else grid
        image = ax.imshow(
            shown, aspect="auto", origin="lower", cmap="cividis", norm=norm, interpolation="none",
            extent=(-0.5, grid.shape[1] - 0.5, -0.5, grid.shape[0] - 0.5),
        )  # fmt: skip
        ax.grid(visible=False)
        for place in breaks:
            ax.axvline(place - 0.5, color="white", linewidth=1.0)
        whole(ax, grid.shape[1], "x")
        whole(ax, grid.shape[0], "y")
        ax.set_xlabel(across)
        ax.set_ylabel("layer")
        colour_bar(figure, image, label)
    return figure


def residual_error(layers: Sequence[Row]) -> Figure:
    """Where the residual error sits: by layer, the relative error of what the patched block gives."""
    with style():
        figure, (ax,) = axes()
        _by_layer(ax, layers, "relative_error", 0)
        ax.set_ylabel("relative error")
    return figure


def layer_sizes(layers: Sequence[Row]) -> Figure:
    """By layer, the largest change of a map relative to the map."""
    with style():
        figure, (ax,) = axes()
        _by_layer(ax, layers, "weight_ratio", 0)
        ax.set_ylabel("‖dW‖ / ‖W‖")
    return figure


def edit_norms(spectra: Sequence[Row]) -> Figure:
    """By layer, the norm of every edit of the patch; a line per map."""
    with style():
        figure, (ax,) = axes(2.8)
        for k, (role, rows) in enumerate(_roles(spectra).items()):
            _by_layer(ax, rows, "norm", k, role)
        ax.set_ylabel("norm of the change")
        legend(ax)
    return figure


def singular_values(spectra: Sequence[Row]) -> Figure:
    """Singular values of every matrix edit, axes per map; the first, the middle and the last layer are named."""
    found = {role: rows for role, rows in _roles(spectra).items() if rows[0]["kind"] == "matrix"}
    with style():
        figure, panels = axes(2.4, len(found))
        for ax, (role, rows) in zip(panels, found.items(), strict=True):
            marked = {0: 0, len(rows) // 2: 1, len(rows) - 1: 2}
            for k, row in enumerate(rows):
                look = SERIES[marked[k]] if k in marked else (MUTED, "", "-")
                named = {"label": f"layer {row['layer']}", "zorder": 3} if k in marked else {"alpha": 0.25}
                points = [(n, s) for n, s in zip(row["numbers"], row["singular_values"], strict=True) if s > 0]
                ax.plot(*zip(*points, strict=True), color=look[0], linestyle=look[2], **named) if points else None
            logarithmic(ax)
            # A title would meet the legend above the axes.
            ax.set_ylabel(f"singular value\n{plain(role)}").set_parse_math(False)
            legend(ax)
        panels[-1].set_xlabel("number, the largest first")
    return figure


def u_histogram(layers: Sequence[Row], edges: Sequence[float]) -> Figure:
    """By layer, how many entries of the branch before its norm's scale are how small: the theorem divides by them."""
    import numpy as np
    from matplotlib.colors import LogNorm

    with style():
        figure, (ax,) = axes(3.0)
        counts = np.array([row["u_counts"] for row in layers], dtype=float)
        shares = np.where(counts > 0, counts / counts.sum(1, keepdims=True), math.nan)
        exponents = [math.log10(edge) for edge in edges]
        step = exponents[1] - exponents[0]
        image = ax.imshow(
            shares, aspect="auto", origin="lower", cmap="cividis", norm=LogNorm(), interpolation="none",
            extent=(exponents[0] - step, exponents[-1] + step, -0.5, len(layers) - 0.5),
        )  # fmt: skip
        ax.grid(visible=False)
        whole(ax, len(layers), "y")
        ticks = [k for k in range(-8, 2, 2) if exponents[0] <= k <= exponents[-1]]
        ax.set_xticks(ticks, labels=[f"1e{k}" for k in ticks])
        ax.set_xlabel("size of u (below the first tick: smaller, or zero)")
        ax.set_ylabel("layer")
        colour_bar(figure, image, "share of the entries")
    return figure


def step_gaps(rows: Sequence[Row], series: Mapping[str, str], across: str = "token") -> Figure:
    """Logit gaps along the tokens, logarithmic: key of a row -> name of the line."""
    with style():
        figure, (ax,) = axes(2.8)
        for k, (key, name) in enumerate(series.items()):
            points = [(i, row[key]) for i, row in enumerate(rows) if row.get(key) is not None]
            colour, marker, dash = SERIES[k]
            floor = floor_of([gap for _, gap in points])
            ax.plot(
                [i for i, _ in points], [max(gap, floor) for _, gap in points], label=name, color=colour,
                marker=marker if len(points) < 80 else "", linestyle=dash,
            )  # fmt: skip
        logarithmic(ax)
        ax.set_ylabel("logit gap")
        ax.set_xlabel(across)
        whole(ax, len(rows), "x")
        legend(ax)
    return figure


def recovered(rows: Sequence[tuple[str, float, tuple[float, float] | None, str]]) -> Figure:
    """Share of the context's effect that comes back: name, share, 95 % interval, and `patched` or `control`."""
    with style():
        figure, (ax,) = axes(0.55 + 0.26 * len(rows))
        for k, (_, share, interval, kind) in enumerate(rows):
            colour, marker = (BLUE, "o") if kind == "patched" else (ORANGE, "s")
            if interval is not None:
                ax.plot(interval, [k, k], color=colour, linewidth=2.5, alpha=0.5)
            ax.plot(share, k, marker=marker, color=colour, markersize=6)
        ax.axvline(0, color=MUTED, linewidth=0.8)
        ax.axvline(1, color=MUTED, linewidth=0.8, linestyle=":")
        label_rows(ax, [name for name, *_ in rows])
        lowest = min(share for _, share, *_ in rows)
        ax.set_xlim(max(min(lowest * 1.05, -0.05), -2.0), 1.05)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        ax.set_xlabel("recovered (bars: 95 % interval)")
    return figure


def questions(rows: Sequence[Row]) -> Figure:
    """By held-out question, the divergence from the model with the context, without the patch and with it."""
    ordered = sorted(rows, key=lambda row: -row["kl_unpatched"])
    return _pairs(ordered, ("kl_unpatched", "without"), ("kl_patched", "patched"), "question, the hardest first")


def _pairs(rows: Sequence[Row], first: tuple[str, str], second: tuple[str, str], across: str) -> Figure:
    with style():
        figure, (ax,) = axes(2.8)
        floor = floor_of([row[key] for row in rows for key in (first[0], second[0])])
        for k, row in enumerate(rows):
            ax.plot([k, k], [max(row[first[0]], floor), max(row[second[0]], floor)], color=GRID, linewidth=1.2)
        for (key, name), colour, marker in ((first, ORANGE, "s"), (second, BLUE, "o")):
            ax.plot([max(row[key], floor) for row in rows], marker, color=colour, label=name)
        logarithmic(ax)
        ax.set_ylabel("KL, nats per token")
        ax.set_xlabel(across)
        whole(ax, len(rows), "x")
        legend(ax)
    return figure


def locality(elsewhere: Mapping[str, Row]) -> Figure:
    """On text that the context has no business with: how far the patch, and the context, move the model."""
    with style():
        figure, (ax,) = axes(0.7 + 0.5 * len(elsewhere))
        names = [f"{who}, {name}" for name in elsewhere for who in ("patch", "context")]
        sizes = [row[key] for row in elsewhere.values() for key in ("kl_patched", "kl_context")]
        for k, size in enumerate(sizes):
            ax.barh(k, size, height=0.55, color=BLUE if k % 2 == 0 else ORANGE, hatch="" if k % 2 == 0 else "//")
        label_rows(ax, names)
        ax.set_xlabel("KL from the bare model, nats per token")
    return figure


def places(sites: Sequence[Row]) -> Figure:
    """By layer and place, the share of the wanted change that the edit meets on the examples."""
    with style():
        figure, (ax,) = axes(2.8)
        for k, role in enumerate(dict.fromkeys(site["role"] for site in sites)):
            rows = [site for site in sites if site["role"] == role]
            colour, marker, dash = SERIES[k % len(SERIES)]
            ax.plot(
                [row["layer"] for row in rows], [row["explained"] for row in rows], color=colour, marker=marker,
                linestyle=dash, label=role,
            )  # fmt: skip
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        ax.set_ylabel("explained")
        ax.set_xlabel("layer")
        legend(ax)
    return figure


def part_costs(parts: Sequence[Row]) -> Figure:
    """By part of the prompt, what its removal costs, and how large the patch is that absorbs it."""
    with style():
        figure, panels = axes(0.75 + 0.24 * len(parts), 2)
        for ax, key, name in zip(
            panels, ("kl_nats", "patch_norm"), ("cost of the removal: KL in nats", "norm of the patch"), strict=True
        ):
            ax.barh(range(len(parts)), [part[key] for part in parts], height=0.55, color=BLUE)
            label_rows(ax, [part["name"] for part in parts])
            ax.set_xlabel(name)
    return figure


def beside(rows: Sequence[Row], percent: bool = False) -> Figure:
    """Published figures and ours in one unit, a line per row with its name above; a row may lack either.

    `percent`: the axis shows 0 to 100 at least.
    """
    names = [textwrap.fill(plain(row["figure"], 160), NAME) for row in rows]
    deep = max(name.count("\n") for name in names)
    with style():
        figure, (ax,) = axes(0.75 + (0.4 + 0.14 * deep) * len(rows))
        seen = [row[key] for row in rows for key in ("published", "ours") if row[key] is not None]
        for k, row in enumerate(rows):
            both = [row[key] for key in ("published", "ours") if row[key] is not None]
            ax.plot([min(both), max(both)], [k, k], color=GRID, linewidth=2.5)
            # The square is wider than the dot, so that equal figures show both.
            for key, look, colour, size, fill in STATED:
                if row[key] is not None:
                    ax.plot(row[key], k, look, color=colour, markersize=size, fillstyle=fill, markeredgewidth=1.4)
            at = ax.get_yaxis_transform()
            ax.text(0.0, k - 0.2, names[k], transform=at, va="bottom", parse_math=False, fontsize=8, linespacing=1.0)
        for key, look, colour, _, fill in STATED:
            if any(row[key] is not None for row in rows):
                ax.plot([], [], look, color=colour, label=key, fillstyle=fill)
        if percent:
            ax.set_xlim(min(-4.0, *seen) - 1, max(104.0, *seen) + 1)
        elif min(seen) > 0 and max(seen) > 10 * min(seen):
            logarithmic(ax, "x")
        ax.set_ylim(len(rows) - 0.6, -0.9)
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        legend(ax)
    return figure


STATED = (("published", "s", ORANGE, 8.0, "none"), ("ours", "o", BLUE, 4.5, "full"))
"""Key, marker, colour, size and filling of the two sides of a reproduction."""

NAME = 56
"""Characters of a row's name on one line: as many as are as wide as a figure."""


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], across: str, label: str, log: str = "") -> Figure:
    """Named lines of (x, y), in the order that they come; `log` names the axes that are logarithmic, such as `xy`."""
    with style():
        figure, (ax,) = axes(2.9)
        for k, (name, points) in enumerate(lines.items()):
            colour, marker, dash = SERIES[k % len(SERIES)]
            floor = floor_of([y for _, y in points]) if "y" in log else -math.inf
            ax.plot(
                [x for x, _ in points], [max(y, floor) for _, y in points], color=colour, linestyle=dash, label=name,
                marker=marker, markevery=max(1, len(points) // 12), fillstyle="full" if k < len(SERIES) else "none",
            )  # fmt: skip
        for which in ("x", "y"):
            if which in log:
                logarithmic(ax, which)
        if "x" not in log and all(float(x).is_integer() for points in lines.values() for x, _ in points):
            ax.xaxis.set_major_locator(integers())
        ax.set_xlabel(across)
        ax.set_ylabel(label)
        legend(ax)
    return figure


def role_of(site: str) -> str:
    """`model.layers.3.mlp.down_proj.weight` -> `mlp.down_proj`: the name of a map inside its layer."""
    inside = re.split(r"\.\d+\.", site, maxsplit=1)[-1]
    return re.sub(r"\[\d+\]$", "[expert]", inside).removesuffix(".weight")


def _roles(spectra: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in spectra:
        found.setdefault(role_of(row["site"]), []).append(row)
    return found


def _by_layer(ax: Axes, rows: Sequence[Row], key: str, series: int, name: str | None = None) -> None:
    colour, marker, dash = SERIES[series % len(SERIES)]
    points = [(row["layer"], row[key]) for row in rows if row[key] is not None and row[key] > 0]
    ax.plot(
        [x for x, _ in points], [y for _, y in points], color=colour, marker=marker, linestyle=dash, label=name,
        fillstyle="full" if series < len(SERIES) else "none",
    )  # fmt: skip
    logarithmic(ax)
    ax.xaxis.set_major_locator(integers())
    ax.set_xlabel("layer")
