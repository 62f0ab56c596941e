"""Sections about exact patches: one token, a suite of tokens, one patch for a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contextfold.report import figures
from contextfold.report.parts import (
    Cell,
    Note,
    Number,
    Part,
    Section,
    Strip,
    Table,
    Token,
    drawing,
    escaped,
    number,
    visible,
)
from contextfold.report.reading import Run
from contextfold.report.sections_common import (
    CONTROLS,
    asked,
    layer_heat,
    patch_section,
    receipt,
    spectra_parts,
    token_text,
)

__all__ = ["fold_sections", "sequence_sections"]

Row = Mapping[str, Any]

RUNS = "Each run against the model with the context in its window"

FOLD_GAPS = "Of the patched runs, and of the model with itself, the worst token; of the controls the median."
SEQUENCE_GAPS = "Of the patched runs and without the patch the worst position; of the other controls the median."

STRIP_LEAD = (
    "Point at a token, or reach it with Tab and the arrow keys, for its numbers. A dashed red underline marks a choice "
    "other than the model's with the context."
)

ROWS = ("with the context", "without it", "without it, patched")


def fold_sections(run: Run, name: str) -> list[Section]:
    """Of `fold`, `verify`, a suite, or the demo."""
    found = run.found
    steps = found.get("steps") or []
    return [
        _runs(run, name, _fold_rows(found), FOLD_GAPS),
        *asked(found),
        *([Section("Token by token", "", [_fold_strip(found, steps)])] if steps else [_untold()]),
        patch_section(_fold_patch(found, steps, name)),
        Section(
            "What is left",
            "The error of the patched model, block by block and token by token. Rounding alone leaves about 1e-7 in "
            "float32 and 1e-2 in bfloat16.",
            [_residual(found, name), *([_token_gaps(found, steps, name)] if len(steps) > 1 else [])],
        ),
        *_activations(found, name),
        Section("Layers in numbers", "", [_fold_layers(found)]),
        receipt(found),
    ]


def sequence_sections(run: Run, name: str) -> list[Section]:
    """Of one static patch for several positions."""
    found = run.found
    positions = found["positions"]
    known = bool(positions) and positions[0].get("token") is not None
    elsewhere = number(found, "elsewhere/mean_kl_nats")
    left: list[Part] = [_token_gaps(found, positions, name, "positions", "position in the query")] if positions else []
    if found["layers"]:
        left.insert(0, _residual(found, name))
    return [
        _runs(run, name, _sequence_rows(found), SEQUENCE_GAPS),
        *asked(found),
        *([Section("Token by token", "", [_sequence_strip(found)])] if known else [_untold()]),
        patch_section(_sequence_patch(found, name)),
        Section("What is left", "The error of the patched model, block by block and position by position.", left),
        Section(
            "Elsewhere",
            "A patch for one sequence is for this sequence only. On other text it moves the model by so much:",
            [
                Table(
                    "On other text, patched against unpatched", ("what", "value"),
                    [
                        ("mean KL per token, in nats", elsewhere),
                        ("tokens with the same first choice", number(found, "elsewhere/top1_matches", "n")),
                        ("of tokens", number(found, "elsewhere/tokens", "n")),
                    ],
                    open=True,
                )
            ],
        ),
        Section("Layers in numbers", "", [_sequence_layers(found)])
        if found["layers"]
        else Section("Layers in numbers", parts=[Note("A stored patch does not know how its layers were solved.")]),
        receipt(found),
    ]  # fmt: skip


def _untold() -> Section:
    return Section(
        "Token by token",
        parts=[Note("This file has no rows about tokens: an older contextfold wrote it. Run its command again to see "
                    "the text, the choices and the sizes token by token.")],
    )  # fmt: skip


def _fold_rows(found: Row) -> list[tuple[str, str, str, str, str]]:
    """Name, kind, key of the gap, key of the matches, key of the tokens."""
    return [
        ("patched: weights written", "patched", "worst_logit_gap", "top1_matches", "tokens"),
        ("patched: beside the weights", "patched", "action_worst_logit_gap", "action_top1_matches", "tokens"),
        ("patched, input off by a rounding", "patched", "perturbed_worst_logit_gap", "perturbed_top1_matches",
         "tokens"),
        ("the model with itself", "reference", "scatter_logit_gap", "scatter_top1_matches", "tokens"),
        ("without the patch", "control", "unpatched_logit_gap", "unpatched_top1_matches", "tokens"),
        *_control_rows(found),
    ]  # fmt: skip


def _sequence_rows(found: Row) -> list[tuple[str, str, str, str, str]]:
    return [
        ("patched: weights written", "patched", "worst_logit_gap", "top1_matches", "tokens"),
        ("patched: beside the weights", "patched", "action_worst_logit_gap", "", ""),
        ("patched, input off by a rounding", "patched", "perturbed_worst_logit_gap", "perturbed_top1_matches",
         "tokens"),
        ("without the patch", "control", "unpatched_logit_gap", "unpatched_top1_matches", "tokens"),
        *_control_rows(found),
    ]  # fmt: skip


def _control_rows(found: Row) -> list[tuple[str, str, str, str, str]]:
    return [
        (CONTROLS.get(name, name.replace("_", " ")), "control", f"controls/{escaped(name)}/median_logit_gap",
         f"controls/{escaped(name)}/top1_matches", f"controls/{escaped(name)}/tokens")
        for name in found["controls"]
    ]  # fmt: skip


def _runs(run: Run, name: str, rows: Sequence[tuple[str, str, str, str, str]], which: str) -> Section:
    """The proof and its controls."""
    found = run.found
    table: list[Sequence[Cell]] = []
    points: list[tuple[str, float | None, str]] = []
    for label, kind, gap, matches, tokens in rows:
        measured = number(found, gap)
        same: Cell = number(found, matches, "n") if matches else "–"
        table.append((label, measured, same, number(found, tokens, "n") if tokens else "–"))
        points.append((label, measured.value, kind))
    worst, control = points[0][1], min((p for _, p, kind in points if kind == "control" and p is not None), default=0)
    return Section(
        "The proof and its controls",
        f"{found['protocol']} If the patch is right, the patched runs come as close to the model with the context as "
        "that model comes to itself, and the controls do not.",
        [
            drawing(
                f"{name}-gaps", figures.gaps(points), RUNS,
                f"Logit gap: largest difference of any logit; smaller is closer. {which}",
                f"Logit gaps of {len(points)} runs. Patched: {worst:.2g}. Smallest of the controls: {control:.2g}.",
            ),
            Table("The same in numbers", ("run", "logit gap", "same first token", "of"), table, open=True),
        ],
    )  # fmt: skip


def _fold_strip(found: Row, steps: Sequence[Row]) -> Strip:
    prompts = found.get("prompts") or []
    lines: dict[int, list[Token]] = {}
    rows: list[Sequence[Cell]] = []
    for k, step in enumerate(steps):
        at = f"steps/{k}"
        chips = [(token_text(step, key), step[key] != step["in_context"]) for key in
                 ("in_context", "unpatched", "patched")]  # fmt: skip
        numbers: list[tuple[str, Cell]] = [
            ("margin to its second choice, with the context (logits)", number(found, f"{at}/in_context_margin")),
            ("logit gap, patched", number(found, f"{at}/logit_gap")),
            ("logit gap, without", number(found, f"{at}/unpatched_logit_gap")),
            ("KL patched (nats)", number(found, f"{at}/kl_nats")),
        ]
        lines.setdefault(step["prompt"], []).append(Token(chips, numbers))
        rows.append((*(chip for chip, _ in chips), *(value for _, value in numbers)))
    named = [(visible(prompts[p])[:40] if p < len(prompts) else f"prompt {p + 1}", line) for p, line in lines.items()]
    return Strip(
        "First choices", f"Every token of the answer, as each run would choose it after the same words. {STRIP_LEAD}",
        ROWS, named if len(named) > 1 else [("", line) for _, line in named],
        Table("All tokens in numbers", (*ROWS, "margin", "gap", "gap without", "KL"), rows),
    )  # fmt: skip


def _sequence_strip(found: Row) -> Strip:
    tokens: list[Token] = []
    rows: list[Sequence[Cell]] = []
    for k, row in enumerate(found["positions"]):
        at = f"positions/{k}"
        read = token_text(row, "token")
        chips = [(read, False)] + [
            (token_text(row, key), row[key] != row["in_context"]) for key in ("in_context", "unpatched", "patched")
        ]
        numbers: list[tuple[str, Cell]] = [
            ("position", number(found, f"{at}/position", "n")),
            ("margin to its second choice, with the context (logits)", number(found, f"{at}/in_context_margin")),
            ("logit gap, patched", number(found, f"{at}/logit_gap")),
            ("logit gap, without", number(found, f"{at}/unpatched_logit_gap")),
            ("KL patched (nats)", number(found, f"{at}/kl_nats")),
        ]
        tokens.append(Token(chips, numbers))
        rows.append((*(chip for chip, _ in chips), *(value for _, value in numbers)))
    names = ("the text", *(f"next, {row}" for row in ROWS))
    return Strip(
        "The text, and what each run expects next", f"One patch serves all of these positions. {STRIP_LEAD}", names,
        [("", tokens)],
        Table("All positions in numbers", (*names, "position", "margin", "gap", "gap without", "KL"), rows),
    )  # fmt: skip


def _fold_patch(found: Row, steps: Sequence[Row], name: str) -> list[Part]:
    parts: list[Part] = []
    if len(steps) > 1:
        names = [token_text(step, "in_context") for step in steps]
        values = [step["weight_ratio"] for step in steps]
        breaks = [k for k in range(1, len(steps)) if steps[k]["prompt"] != steps[k - 1]["prompt"]]
        parts.append(
            layer_heat(f"{name}-size", values, names, "‖dW‖ / ‖W‖", "Size of the patch, by layer and token",
                       "A patch is made for every token afresh. Colour: its largest change of a map, relative to the "
                       "map; lighter is larger.", breaks)
        )  # fmt: skip
    return parts + (spectra_parts(found.get("spectra") or [], name) or ([] if parts else _sizes(found, name)))


def _sequence_patch(found: Row, name: str) -> list[Part]:
    layers = found["layers"]
    parts: list[Part] = []
    if layers and all(layer.get("actions") for layer in layers):
        names = [token_text(row, "token") for row in found["positions"]]
        values = [list(column) for column in zip(*(layer["actions"] for layer in layers), strict=True)]
        parts.append(
            layer_heat(f"{name}-size", values, names, "‖dW h‖ / ‖W h‖", "What the patch does, by layer and position",
                       "Colour: what the patch adds to the output of the map at this position, relative to the output "
                       "without it; lighter is more.")
        )  # fmt: skip
    return parts + (spectra_parts(found.get("spectra") or [], name) or ([] if parts else _sizes(found, name)))


def _sizes(found: Row, name: str) -> list[Part]:
    """By layer alone, where nothing finer is known."""
    layers = found["layers"]
    if not layers:
        return []
    rows = [(str(row["layer"]), number(found, f"layers/{k}/weight_ratio")) for k, row in enumerate(layers)]
    return [
        drawing(
            f"{name}-layers", figures.layer_sizes(layers), "Size of the patch by layer",
            "Largest change of a map, relative to the map, of the token that needs most.",
            f"Size of the patch at {len(layers)} layers.",
            table=Table("In numbers", ("layer", "‖dW‖/‖W‖"), rows),
        )
    ]  # fmt: skip


def _residual(found: Row, name: str) -> Part:
    layers = found["layers"]
    worst = max(layers, key=lambda layer: layer["relative_error"] or 0.0)
    rows = [(str(row["layer"]), number(found, f"layers/{k}/relative_error")) for k, row in enumerate(layers)]
    return drawing(
        f"{name}-residual", figures.residual_error(layers), "Where the residual error sits",
        "Distance of a block's output from what it was with the context, relative; the worst token of each layer.",
        f"Relative error by layer; the largest, {worst['relative_error'] or 0:.2g}, at layer {worst['layer']}.",
        table=Table("In numbers", ("layer", "relative error"), rows),
    )  # fmt: skip


def _token_gaps(found: Row, rows: Sequence[Row], name: str, key: str = "steps", across: str = "token") -> Part:
    cells: list[Sequence[Cell]] = [
        (str(k), number(found, f"{key}/{k}/logit_gap"), number(found, f"{key}/{k}/unpatched_logit_gap"))
        for k in range(len(rows))
    ]
    lines = {"unpatched_logit_gap": "without", "logit_gap": "patched"}
    return drawing(
        f"{name}-token-gaps", figures.step_gaps(rows, dict(reversed(lines.items())), across), "Gap by token",
        "Largest difference of any logit from the model with the context, with the patch written and without.",
        f"Logit gap of {len(rows)} tokens, patched and without the patch.",
        table=Table("In numbers", (across, "patched", "without"), cells),
    )  # fmt: skip


def _activations(found: Row, name: str) -> list[Section]:
    layers, edges = found["layers"], found.get("u_edges") or []
    if not edges or not all(layer.get("u_counts") for layer in layers):
        return []
    smallest = min(layer["min_abs_u"] for layer in layers)
    return [
        Section(
            "Small activations",
            "Where a norm follows the MLP, the paper's rule divides by every entry of u, the branch before that norm's "
            "scale. Entries near zero make its updates huge; this is how many there are.",
            [
                drawing(
                    f"{name}-u", figures.u_histogram(layers, edges), "How large the entries of u are",
                    "By layer, the share of entries of each size, over all tokens; lighter is more.",
                    f"Sizes of the entries of u by layer; the smallest is {smallest:.2g}.",
                ),
                Table(
                    "The smallest entry by layer", ("layer", "smallest |u|", "largest change of a scale"),
                    [
                        (str(row["layer"]), number(found, f"layers/{k}/min_abs_u"),
                         number(found, f"layers/{k}/max_abs_dm"))
                        for k, row in enumerate(layers)
                    ],
                ),
            ],
        )
    ]  # fmt: skip


def _outcomes(counts: Mapping[str, int]) -> str:
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{name} × {n}" for name, n in counts.items())


def _fold_layers(found: Row) -> Table:
    keys = {
        "relative_error": "error", "weight_ratio": "‖dW‖/‖W‖", "max_abs_dm": "max |dm|", "min_cos_z": "cos(z, z_C)",
        "condition": "condition",
    }  # fmt: skip
    rows: list[Sequence[Cell]] = [
        (str(row["layer"]), *_numbers(found, f"layers/{k}", keys), _outcomes(row["outcomes"]))
        for k, row in enumerate(found["layers"])
    ]
    return Table("Per layer, the worst token", ("layer", *keys.values(), "outcome"), rows)


def _sequence_layers(found: Row) -> Table:
    keys = {
        "rank": "rank", "condition": "condition", "relative_error": "error", "weight_ratio": "‖dW‖/‖W‖",
        "max_abs_dm": "max |dm|",
    }  # fmt: skip
    rows: list[Sequence[Cell]] = [
        (str(row["layer"]), *_numbers(found, f"layers/{k}", keys), row["outcome"])
        for k, row in enumerate(found["layers"])
    ]
    return Table("Per layer, the worst position", ("layer", *keys.values(), "outcome"), rows)


def _numbers(found: Row, at: str, keys: Mapping[str, str]) -> list[Number]:
    return [number(found, f"{at}/{key}", "n" if key == "rank" else "g") for key in keys]
