"""What the details of a paper hold that is worth a figure, and its words: by number, one line in `PAPERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contextfold.magnitudes import EDGES
from contextfold.report import figures
from contextfold.report.parts import Answers, Part, Section, Table, drawing, readable, shown

__all__ = ["PAPERS", "Known"]

Row = Mapping[str, Any]

Lines = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Known:
    """A paper whose details are drawn."""

    words: Section
    """What the names in its rows mean."""
    sections: Callable[[Row, str], list[Section]]


def _words(lead: str, rows: Sequence[tuple[str, str]]) -> Section:
    return Section("What was done", lead, [Table("Words in the rows", ("word", "what it means"), rows, True, True)])


UPDATES = {
    "theorem": "exact update (theorem)",
    "appendix": "stable update (appendix)",
    "balanced": "default update (balanced)",
    "theorem as printed": "exact update, as printed",
    "appendix as printed": "stable update, as printed",
}
"""As the rows call them."""


TEXTS = "With the context in its window, and patched without it, each going on with its own choices."


def _tokens(found: Row, name: str) -> list[Section]:
    """Of 2511.17864: the gap along the answer, small activations, patches that are held, texts."""
    details = found["details"]
    sections = []
    for dtype in dict.fromkeys(part.split("-prompt-")[0] for part in details if "-prompt-" in part):
        prompts = [part for key, part in details.items() if key.startswith(f"{dtype}-prompt-") and part.get("curves")]
        if prompts:
            words = readable(dtype)
            sections.append(Section(f"Measured besides, in {words}", "", _dtype(prompts, f"{name}-{dtype}")))
            sections.append(Section(f"What the models say, in {words}", TEXTS, _texts(prompts)))
    return sections


def _dtype(prompts: Sequence[Row], name: str) -> list[Part]:
    parts = [_gap(prompts, name, way) for way in ("written", "perturbed")]
    counts = [[sum(column) for column in zip(*layer, strict=True)] for layer in
              zip(*(part["u"]["counts"] for part in prompts), strict=False)]  # fmt: skip
    if counts:
        parts.append(
            drawing(
                f"{name}-u", figures.u_histogram([{"u_counts": row} for row in counts], EDGES),
                "How small the branch u gets, by layer",
                "u: output of the MLP before the scale of the norm that follows. The exact update divides by each of "
                "its entries; lighter is a larger share of them.",
                f"Histogram of the sizes of u in {len(counts)} layers.",
            )
        )  # fmt: skip
    held = _held(prompts)
    if held:
        parts.append(
            drawing(
                f"{name}-held", figures.curves(held, "steps since the patch was made", "same first token, %"),
                "One patch, kept for the steps after its own",
                "A patch is made for one token, at step 0. Alone: the model sees the current token only; since: all "
                "tokens since the patch was made.",
                "At the end agree: " + "; ".join(f"{key} {line[-1][1]:.0f} %" for key, line in held.items()),
            )
        )  # fmt: skip
    return parts


def _gap(prompts: Sequence[Row], name: str, way: str) -> Part:
    """The worst prompt's logit gap, by token."""
    lines: Lines = {}
    for curve, ways in prompts[0]["curves"].items():
        if ways.get("perturbed"):
            lines[UPDATES.get(curve, curve)] = _worst([part["curves"][curve][way]["logit_gap"] for part in prompts])
    lines["no patch"] = _worst([part["unpatched"]["logit_gap"] for part in prompts])
    titles = {
        "written": ("How far from the model with the context", "The patch is written into the weights."),
        "perturbed": ("The same, a rounding error away", "Every entry of the embeddings is moved by about one rounding "
                      "error, as another machine would: is the patch still good?"),
    }  # fmt: skip
    ends = "; ".join(f"{key} {max(y for _, y in line):.2g}" for key, line in lines.items())
    return drawing(
        f"{name}-{way}", figures.curves(lines, "token of the answer", "logit gap (log scale)", "y"), titles[way][0],
        f"{titles[way][1]} Worst of {len(prompts)} prompts, by token; a patch for each token.",
        f"Largest gap: {ends}.",
    )  # fmt: skip


def _worst(columns: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return [(float(k), max(values)) for k, values in enumerate(zip(*columns, strict=False), 1)]


def _held(prompts: Sequence[Row]) -> Lines:
    """Share of patches that agree, by steps held."""
    runs: dict[str, list[Sequence[bool]]] = {}
    for part in prompts:
        for rule, windows in (part.get("held") or {}).items():
            for window, hits in windows.items():
                runs.setdefault(f"{UPDATES.get(rule, rule)}, {window}", []).extend(hits)
    lines: Lines = {}
    for key, found in runs.items():
        for k in range(max(map(len, found), default=0)):
            seen = [hits[k] for hits in found if len(hits) > k]
            lines.setdefault(key, []).append((float(k), 100 * sum(seen) / len(seen)))
    return lines


def _texts(prompts: Sequence[Row]) -> list[Part]:
    """What the model says with its context, and what the patched one says alone."""
    parts: list[Part] = []
    for part in prompts:
        said: dict[str, list[str]] = {}
        for who, text in (part.get("texts") or {}).items():
            said.setdefault(readable(text).strip(), []).append(UPDATES.get(who, "with the context"))
        if part.get("prompt") and said:
            alike = [(" · ".join(names), text) for text, names in said.items()]
            parts.append(Answers(readable(part["prompt"]).strip(), alike))
    return parts


def _regression(found: Row, name: str) -> list[Section]:
    """Of 2507.16003: curves over the length of the context, and over calibration queries."""
    details = found["details"]
    parts: list[Part] = []
    steps: Lines = {
        readable(key): [(float(i), _mean(column)) for i, column in enumerate(zip(*part["step_norm"], strict=True), 1)]
        for key, part in details.items() if part.get("step_norm")
    }  # fmt: skip
    if steps:
        parts.append(
            _curves(f"{name}-steps", steps, ("context tokens", "step of the update", "xy"),
                    "Steps of the update, as the context grows",
                    "Norm of the change by one more token, mean over tasks.")
        )  # fmt: skip
    for key, part in details.items():
        sgd = part.get("sgd")
        if sgd:
            parts.append(
                _curves(f"{name}-sgd-{key}", _errors(sgd), ("points in the context", "squared error", "y"),
                        f"The context beside gradient descent: {readable(key)}",
                        "Error on the query. Implicit: the model with so many points. SGD: the same map after so many "
                        "steps, at the rate that ends best.")
            )  # fmt: skip
    static: Lines = {
        readable(key): [(float(n), 100 * share) for n, share in
                        zip(part["static"]["queries"], part["static"]["share"], strict=True)]
        for key, part in details.items() if part.get("static")
    }  # fmt: skip
    if static:
        parts.append(
            _curves(f"{name}-static", static, ("calibration queries", "error left, % of no patch", "x"),
                    "One static patch for new queries", "What is left of the unpatched error, median over contexts.")
        )  # fmt: skip
    return [Section("Curves over the length of the context", "", parts)] if parts else []


def _errors(sgd: Row) -> Lines:
    lines: Lines = {"implicit": [(float(i), y) for i, y in enumerate(sgd["implicit"])]}
    settled = {rate: curve for rate, curve in sgd["sgd"].items() if curve is not None}
    if settled:
        best = min(settled, key=lambda rate: settled[rate][-1])
        lines[f"SGD, rate {best}"] = [(float(i), y) for i, y in enumerate(settled[best])]
    return lines


def _positions(found: Row, name: str) -> list[Section]:
    """Of 2512.11255: size of the update by position, block by block."""
    parts: list[Part] = []
    for key, part in found["details"].items():
        blocks = zip(*(seed["blocks"] for seed in part["seeds"]), strict=True)
        lines: Lines = {
            f"block {k}": [(float(i), _mean(values)) for i, values in
                           enumerate(zip(*(block["norms"] for block in same), strict=True))]
            for k, same in enumerate(blocks)
        }  # fmt: skip
        parts.append(
            _curves(f"{name}-norms-{key}", lines, ("position in the context", "norm of the update", "y"),
                    f"Size of the update by position: {readable(key)}",
                    f"Mean over tasks and {len(part['seeds'])} trained models. The last position is the query itself.")
        )  # fmt: skip
    return [Section("Curves over the length of the context", "", parts)] if parts else []


def _budgets(found: Row, name: str) -> list[Section]:
    """Of 2609.39329: divergence by how much of the context is kept."""
    lines: Lines = {}
    for part in sorted(found["details"].values(), key=lambda part: int(part["kept_tokens"])):
        judged = {"no patch": part["short"], **{f"patch: {way}": row for way, row in part["ways"].items()},
                  **{f"control: {way.replace('_', ' ')}": row for way, row in part["controls"].items()}}  # fmt: skip
        for key, row in judged.items():
            lines.setdefault(key, []).append((float(part["kept_tokens"]), row["kl_nats"]))
    drawn = _curves(
        f"{name}-budgets", lines, ("context tokens that are kept", "KL, nats per token", "y"),
        "How far from the model with the whole context",
        "On the true answers, by how much of the document stays in the window.",
    )  # fmt: skip
    return [Section("Over the length of the context that is kept", "", [drawn])]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _curves(name: str, lines: Lines, axes: tuple[str, str, str], title: str, caption: str) -> Part:
    """Lines with their numbers below; `axes`: what goes across, what goes up, and which are logarithmic."""
    across, up, log = axes
    places = sorted({x for line in lines.values() for x, _ in line})
    values = {key: dict(line) for key, line in lines.items()}
    rows = [
        (f"{x:g}", *(shown(values[key].get(x), "4") for key in lines)) for x in places
    ]  # fmt: skip
    ends = "; ".join(f"{key} {line[0][1]:.2g} to {line[-1][1]:.2g}" for key, line in lines.items())
    table = Table("In numbers", (across, *lines), rows)
    label = up + " (log scale)" * ("y" in log)
    return drawing(name, figures.curves(lines, across, label, log), title, caption, f"{up}: {ends}.", table=table)


PAPERS: Mapping[str, Known] = {
    "2511.17864": Known(
        _words(
            "Five prompts, up to twenty greedy tokens each. Before each token, all that stands before the current one "
            "is the context; it is folded into the weights of every layer, and the patched model sees the current "
            "token alone.",
            [
                (
                    "exact update (theorem)",
                    "the paper's first: one scale per component, divided by activations; aimed "
                    "here at what was measured in the run with the context",
                ),
                (
                    "stable update (appendix)",
                    "the paper's second, which divides by scales of the model instead; where a "
                    "scale is zero it is undefined, and another takes over",
                ),
                ("default update (balanced)", "that of this package, which divides by neither"),
                ("as printed", "the paper's formulas as they stand, nothing measured on the edited weights"),
                ("weights written", "the edits are stored in the weights and the unmodified model runs"),
                ("low-rank action", "the edits act beside the weights, which stay as they are"),
                (
                    "embeddings off by a rounding",
                    "every entry is moved by about one rounding error: a patch that does "
                    "not survive it holds in one run on one machine only",
                ),
                (
                    "history forced to the baseline",
                    "after each token both models go on with what the model with the "
                    "context said; free running: the patched model goes on with its own",
                ),
            ],
        ),
        _tokens,
    ),
    "2507.16003": Known(
        _words(
            "Small models are trained to do linear regression from examples in their context: pairs of inputs and "
            "outputs, then a query. What the examples do is written as an update of the first map of the MLP.",
            [
                ("step", "change of that update by one more token of context"),
                ("implicit update", "what the context does to the map, in closed form"),
                ("SGD", "stochastic gradient descent on the same map, with the same points, one after another"),
                ("static patch", "one update, fitted on calibration queries, for queries that it has not seen"),
            ],
        ),
        _regression,
    ),
    "2512.11255": Known(
        _words(
            "Small models are trained to do linear regression from examples in their context. At every position of "
            "every block, what the context does is written as an update of the MLP's first map.",
            [
                ("theory", "the block's output without the context, under the update"),
                ("align", "two updates point the same way: their mean cosine is large"),
                ("last position", "that of the query, whose output is not in the context"),
            ],
        ),
        _positions,
    ),
    "2609.39329": Known(
        _words(
            "Of a document only the first tokens stay in the window. A patch is learnt from the document and from "
            "questions about it, and judged by the true answers to other questions.",
            [
                ("MLP output map", "the one map per layer that the paper edits"),
                ("attention and MLP output maps", "two maps per layer, the default of this package"),
                ("output, two-sites", "the same two ways, by the names that the package gives them"),
                ("control", "a patch of random directions and equal norms, or of another document"),
            ],
        ),
        _budgets,
    ),
}
