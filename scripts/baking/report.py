"""What the bench found, as it stands in the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context

from contextfold.report.canvas import style
from contextfold.report.figures import curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = re.compile(r"(<!-- bake: [^>]*-->\n).*?(<!-- /bake -->)", re.DOTALL)
MIB = 2**20

ELSEWHERE = ("neutral", "untouched")
"""Kinds of questions on which a patch is to do nothing."""

WHOLE = "two-sites-sampled"
"""The default of the command."""
QUESTIONS = {**{n: f"{n} questions" for n in (8, 16, 32)}, 64: WHOLE}
"""Rows of the curve over the number of questions."""
ANCHORS = {0: WHOLE, **{n: f"{n} anchors" for n in (10, 30)}}
"""Rows of the curve over the number of neutral questions."""
POINTS = {*QUESTIONS.values(), *ANCHORS.values()} - {WHOLE}
"""Rows that stand in the tables of the curves alone."""


def page(text: str, found: dict[str, Any]) -> str:
    """`text` with everything between its markers as it should be."""
    return MARKERS.sub(lambda marks: marks[1] + "\n".join(lines(found)) + "\n" + marks[2], text)


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Seconds of the processor, {found['threads']} thread, torch {found['torch']}. Intervals: 95 %, by drawing the "
        "held-out questions again."
    )
    for model, entry in found["models"].items():
        yield from ways_table(model, entry.get("contexts", {}))
        yield from controls_table(model, entry.get("contexts", {}))
        yield from questions_table(model, entry.get("contexts", {}))
        yield from anchors_table(model, entry.get("contexts", {}))
        yield from composition_tables(model, entry.get("composition", []))
        yield from distillations(model, entry.get("contexts", {}))
        yield from cache_table(model, entry.get("prefix_cache", []))
        yield from keeping(model, entry)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from ("", title, "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns))
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def ways_table(model: str, contexts: dict[str, Any]) -> Iterator[str]:
    columns = ("context", "way", "recovered", "KL, nats", "top-1", *ELSEWHERE, "solved in", "peak")
    yield from table(f"**{model}**", columns, ways_rows(contexts))


def ways_rows(contexts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for context, facts in contexts.items():
        for name, row in facts["ways"].items():
            if name in POINTS:
                continue
            yield (
                context,
                name,
                recovered(row),
                f"{row['kl_patched']:.3f}",
                percent(row["top1"]),
                *(percent(row[f"{kind}_kl_ratio"]) for kind in ELSEWHERE),
                f"{row['seconds_solve']:.0f} s",
                f"{row['peak_bytes'] / row['weights_bytes']:.2f} × weights",
            )
        moved = facts["elsewhere_context"]
        ratios = (percent(moved[kind]["kl_ratio"]) for kind in ELSEWHERE)
        yield (context, "the context itself", "", "0", "", *ratios, "", "")


def controls_table(model: str, contexts: dict[str, Any]) -> Iterator[str]:
    yield from table(
        f"Controls on {model}: what the patch of a wrong context brings back, and the context itself in the window:",
        ("context", "way", "control", "its patch", "in the window"),
        (
            (
                context,
                name,
                control.replace("_", " "),
                recovered(found),
                recovered(found["in_window"]) if "in_window" in found else "",
            )
            for context, facts in contexts.items()
            for name, row in facts["ways"].items()
            for control, found in row["controls"].items()
        ),
    )


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if abs(share) < 10 else f"{100 * share:.0f} %"


def recovered(row: dict[str, Any]) -> str:
    low, high = (percent(end) for end in row["interval"])
    return f"{percent(row['kl_recovered'])} ({low} to {high})"


def _all_measured(contexts: dict[str, Any], names: Mapping[int, str]) -> dict[str, dict[int, dict[str, Any]]]:
    """By context, the rows of `names`; contexts that lack one are left out."""
    ways = {context: facts["ways"] for context, facts in contexts.items()}
    return {
        c: {n: rows[name] for n, name in names.items()} for c, rows in ways.items() if rows.keys() >= {*names.values()}
    }


def questions_table(model: str, contexts: dict[str, Any]) -> Iterator[str]:
    measured = _all_measured(contexts, QUESTIONS)
    if not measured:
        return
    yield from table(
        f"Recovered on {model} by the number of questions, two answers to each:",
        ("context", *map(str, QUESTIONS)),
        ((context, *map(recovered, rows.values())) for context, rows in measured.items()),
    )


def anchors_table(model: str, contexts: dict[str, Any]) -> Iterator[str]:
    measured = _all_measured(contexts, ANCHORS)
    if not measured:
        return
    yield from table(
        f"What quiet elsewhere costs on {model}, by the number of neutral questions in the solve:",
        ("context", "anchors", "recovered", *ELSEWHERE),
        (
            (context, str(count), recovered(row), *(percent(row[f"{kind}_kl_ratio"]) for kind in ELSEWHERE))
            for context, rows in measured.items()
            for count, row in rows.items()
        ),
    )


def composition_tables(model: str, pairs: list[dict[str, Any]]) -> Iterator[str]:
    if not pairs:
        return
    yield from table(
        f"Two contexts in one model, {model}:",
        ("contexts", "judged on", "patch", "recovered", "KL, nats"),
        (cells for pair in pairs for cells in composition_rows(pair)),
    )


def composition_rows(pair: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    first, second = pair["first"], pair["second"]
    names = {"first": first, "second": second, "together less second": f"together less {second}"}
    for key, judged in (("on_both", "questions of both, both in the window"), ("on_first", f"{first} alone")):
        for name, row in pair[key]["patches"].items():
            yield f"{first}, {second}", judged, names.get(name, name), recovered(row), f"{row['kl_patched']:.3f}"


def pictures(found: dict[str, Any], folder: Path) -> None:
    """The two curves, drawn: `bake-questions-MODEL.svg` and `bake-anchors-MODEL.svg`."""
    for model, entry in found["models"].items():
        contexts = entry.get("contexts", {})
        lines = {
            context: [(float(n), 100 * row["kl_recovered"]) for n, row in rows.items()]
            for context, rows in _all_measured(contexts, QUESTIONS).items()
        }
        if lines:
            _draw(curves(lines, "questions", "recovered, %", "x"), folder / f"bake-questions-{model}.svg")
        lines = {
            f"{context}, {kind}": [(100 * row[f"{kind}_kl_ratio"], 100 * row["kl_recovered"]) for row in rows.values()]
            for context, rows in _all_measured(contexts, ANCHORS).items()
            for kind in ELSEWHERE
        }
        if lines:
            across = "moved elsewhere, % of the KL without patch"
            _draw(curves(lines, across, "recovered, %"), folder / f"bake-anchors-{model}.svg")


def _draw(figure: Figure, path: Path) -> None:
    with style(), rc_context({"svg.hashsalt": path.stem}):  # the same names inside every time
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})


def distillations(model: str, contexts: dict[str, Any]) -> Iterator[str]:
    for context, facts in contexts.items():
        row = facts["ways"].get("distillation")
        if row is None or "times_baking" not in row:
            continue
        curve = ", ".join(f"{spent:.0f} s: {kl:.3f}" for spent, kl in row["curve"])
        times, budget = row["times_baking"], row["budget_times_baking"]
        verdict = (
            f"did not reach the KL of the default estimator in {budget:.0f} times its seconds"
            if times is None
            else f"reached the KL of the default estimator after {times:.1f} times its seconds"
        )
        yield ""
        yield (
            f"Gradient distillation on {model}, {context} (rank {row['rank']}, AdamW at {row['rate']:g}, "
            f"{row['epochs']:.1f} epochs) {verdict}. Held-out KL against its time: {curve}."
        )


def cache_table(model: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    columns = ("tokens of context", "cache", "computed in", "ms per token with it", "without", "ratio")
    yield from table(
        f"Keeping the prompt with a prefix cache, {model} (KL 0 by definition):", columns, cache_rows(rows)
    )


def cache_rows(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        if "skipped" in row:
            yield (str(row["context"]), f"not measured: {row['skipped']}", "", "", "", "")
            continue
        ms, bare = row["ms_per_token"], row["ms_per_token_without"]
        size, spent = f"{row['bytes'] / MIB:.1f} MiB", f"{row['seconds_prefill']:.1f} s"
        yield (str(row["context"]), size, spent, f"{ms:.1f}", f"{bare:.1f}", f"{ms / bare:.2f}")


def keeping(model: str, entry: dict[str, Any]) -> Iterator[str]:
    """Where keeping the prompt is the better choice, from the figures."""
    rows = [row for row in entry.get("prefix_cache", []) if "skipped" not in row]
    sizes = [
        row["patch_bytes"]
        for facts in entry.get("contexts", {}).values()
        for name, row in facts["ways"].items()
        if name == WHOLE
    ]
    if not rows or not sizes:
        return
    each = rows[0]["bytes"] / rows[0]["context"]
    first, last = rows[0], rows[-1]
    patch = sum(sizes) / len(sizes)
    slower = [row["ms_per_token"] / row["ms_per_token_without"] for row in (first, last)]
    yield ""
    yield (
        f"On {model} keeping the prompt is the better choice where the context is short or has to act in full: with "
        f"{first['context']} tokens of it in the cache a generated token takes {slower[0]:.2f} times as long "
        f"({slower[1]:.2f} times with {last['context']}), nothing is lost of its effect, and its cache "
        f"({each / 1024:.0f} KiB per token, shared by all who have the same prompt) is smaller than the patch on disk "
        f"({patch / MIB:.0f} MiB) up to about {patch / each:.0f} tokens. A patch that is written into the weights "
        "takes no memory beyond them, costs nothing per token, and leaves the window free."
    )
