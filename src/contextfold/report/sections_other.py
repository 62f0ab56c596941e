"""Sections about generation, ablation, reusable patches, and patch files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contextfold.patch import Patch
from contextfold.report import figures
from contextfold.report.parts import (
    Answers,
    Cell,
    Note,
    Part,
    Section,
    Strip,
    Table,
    Text,
    Token,
    drawing,
    escaped,
    number,
    readable,
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
from contextfold.report.sections_fold import STRIP_LEAD
from contextfold.spectra import spectra

__all__ = ["ablate_sections", "bake_sections", "file_sections", "generate_sections"]

Row = Mapping[str, Any]

SHOWN = 8
"""Held-out questions whose answers are written out."""


def generate_sections(run: Run, name: str) -> list[Section]:
    """Of `generate`: a fold at every step."""
    found = run.found
    proven = [k for k, step in enumerate(found["steps"]) if step.get("weight_ratio")]
    patch: list[Part] = []
    if len(proven) > 1:
        values = [found["steps"][k]["weight_ratio"] for k in proven]
        names = [token_text(found["steps"][k], "in_context") for k in proven]
        patch.append(
            layer_heat(f"{name}-size", values, names, "‖dW‖ / ‖W‖", "Size of the patch, by layer and proven step",
                       "Colour: largest change of a map, relative to the map; lighter is larger.")
        )  # fmt: skip
    return [
        _generated(found, name),
        *asked(found),
        Section("Token by token", "", [Text("The answer", readable(found["text"])), _generated_strip(found)]),
        *([patch_section(patch)] if patch else []),
        receipt(found),
    ]


def _generated(found: Row, name: str) -> Section:
    rows: list[Sequence[Cell]] = [
        ("tokens with the same choice", number(found, "top1_matches", "n")),
        ("of tokens", number(found, "tokens", "n")),
        ("steps proven on written weights", number(found, "proven_steps", "n")),
        ("worst logit gap of a proven step", number(found, "worst_proven_gap")),
        ("without the patch, median of these steps", number(found, "unpatched_logit_gap")),
        ("worst gap between the two rows, any step", number(found, "worst_action_gap")),
    ]
    lines = {"unpatched_gap": "without", "action_gap": "second row", "proven_gap": "proven"}
    present = {key: text for key, text in lines.items() if any(s.get(key) is not None for s in found["steps"])}
    return Section(
        "The proof and its control",
        "At every step the context is folded afresh. Proven steps write the patch into the weights and run the "
        "unmodified model; without the patch it must miss by far.",
        [
            drawing(
                f"{name}-gaps", figures.step_gaps(found["steps"], present), "Gap to the model with the context",
                "Largest difference of any logit. The second row of the forward shows rounding and proves nothing.",
                f"Logit gaps over {found['tokens']} tokens.",
            ),
            Table("In numbers", ("what", "value"), rows, open=True),
        ],
    )  # fmt: skip


def _generated_strip(found: Row) -> Strip:
    lines: dict[int, list[Token]] = {}
    for k, step in enumerate(found["steps"]):
        without = step.get("unpatched")
        chips = [
            (token_text(step, "in_context"), False),
            (token_text(step, "unpatched") if without is not None else "·",
             without is not None and without != step["in_context"]),
            (token_text(step, "patched"), step["patched"] != step["in_context"]),
        ]  # fmt: skip
        details: list[tuple[str, Cell]] = [("gap of the second row", number(found, f"steps/{k}/action_gap"))]
        if step.get("proven_gap") is not None:
            details.append(("gap, proven on written weights", number(found, f"steps/{k}/proven_gap")))
        if step.get("unpatched_gap") is not None:
            details.append(("gap without the patch", number(found, f"steps/{k}/unpatched_gap")))
        if step.get("margin"):
            details.append(("margin of the disagreement (logits)", number(found, f"steps/{k}/margin")))
        lines.setdefault(step["sequence"], []).append(Token(chips, details))
    named = [(f"sequence {k + 1}" if len(lines) > 1 else "", line) for k, line in lines.items()]
    lead = f"Without the patch (·: not asked at this step) only proven steps were tried. {STRIP_LEAD}"
    return Strip("Choices", lead, ("with the context", "without it", "without it, patched"), named)


def ablate_sections(run: Run, name: str) -> list[Section]:
    """Of `ablate`: what each part of a prompt costs, and what absorbs it."""
    found = run.found
    order = sorted(range(len(found["parts"])), key=lambda k: int(found["parts"][k]["rank"]))
    ranked = [found["parts"][k] for k in order]
    tokens = len(ranked[0]["positions"])
    columns = [row for part in ranked for row in part["positions"]]
    names = [
        f"{visible(part['name'])}: {token_text(row, 'answer')}" for part in ranked for row in part["positions"]
    ]  # fmt: skip
    values = [[layer["patch_norm"] for layer in row["layers"]] for row in columns]
    texts = [Text(f"Part {part['name']!r}", readable(part["text"])) for part in found["parts"] if part.get("text")]
    return [
        _worth(found, order, name),
        Section("What was asked", "", [*texts, *(part for section in asked(found) for part in section.parts)]),
        Section("Token by token", "", [_ablated_strip(ranked)]),
        patch_section(
            [
                layer_heat(f"{name}-size", values, names, "‖dW‖", "Size of the patch, by layer, part and token",
                           "Parts one after another, the most costly first, each with every token of the answer; "
                           "lighter is larger.", range(tokens, len(columns), tokens))
            ]
        ),
        receipt(found),
    ]  # fmt: skip


def _worth(found: Row, order: Sequence[int], name: str) -> Section:
    """What each part costs, the most costly first, as a figure and in numbers."""
    ranked = [found["parts"][k] for k in order]
    keys = {"kl_nats": "KL, nats", "answer_nats": "answer loses, nats", "logit_gap": "gap", "patched_logit_gap":
            "gap, patched", "patch_norm": "norm of the patch"}  # fmt: skip
    rows: list[Sequence[Cell]] = [
        (visible(found["parts"][k]["name"]), number(found, f"parts/{k}/dropped", "n"),
         *(number(found, f"parts/{k}/{key}") for key in keys), "yes" if found["parts"][k]["proven"] else "no")
        for k in order
    ]  # fmt: skip
    return Section(
        "What each part is worth",
        "Each part of the prompt was removed alone. Its cost is how far the answer moves; the patch that absorbs "
        "the removal is proven by writing it into the weights: the gap must close.",
        [
            drawing(
                f"{name}-parts", figures.part_costs(ranked), "Cost and patch by part",
                "The most costly part first.",
                f"Cost of {len(ranked)} parts; the most costly is {visible(ranked[0]['name'])}.",
            ),
            Table("The same in numbers", ("part", "tokens", *keys.values(), "proven"), rows, open=True),
        ],
    )  # fmt: skip


def _ablated_strip(ranked: Sequence[Row]) -> Strip:
    tokens: list[Token] = []
    for k, row in enumerate(ranked[0]["positions"]):
        chips = [(token_text(row, "answer"), False)]
        chips += [
            (token_text(part["positions"][k], "without"), part["positions"][k]["without"] != row["answer"])
            for part in ranked
        ]
        details: list[tuple[str, Cell]] = []
        for part in ranked:
            there = part["positions"][k]
            gaps = f"gap {there['logit_gap']:.2g}, patched {there['patched_logit_gap']:.2g}"
            said = f"KL {there['kl_nats']:.2g} nats, {gaps}"
            details.append((f"without {visible(part['name'])}", said))
        tokens.append(Token(chips, details))
    names = ("whole prompt", *(f"without {visible(part['name'])}" for part in ranked))
    return Strip("First choices", f"After the same words. {STRIP_LEAD}", names, [("", tokens)])


def bake_sections(run: Run, name: str) -> list[Section]:
    """Of `bake`: a reusable patch, on questions that it has never seen."""
    found = run.found
    parts: list[Part] = []
    if found["sites"]:
        rows: list[Sequence[Cell]] = [
            (str(site["layer"]), site["role"], number(found, f"sites/{k}/rank", "n"),
             number(found, f"sites/{k}/explained", "%"), number(found, f"sites/{k}/weight_ratio"))
            for k, site in enumerate(found["sites"])
        ]  # fmt: skip
        parts.append(
            drawing(
                f"{name}-places", figures.places(found["sites"]), "How much of the change each place explains",
                "Share of the wanted change that the edit meets, on the examples that it was solved from.",
                f"Share explained at {len(rows)} places.",
                table=Table("In numbers", ("layer", "place", "rank", "explained", "‖dW‖/‖W‖"), rows),
            )
        )  # fmt: skip
    return [
        _recovery(found, name),
        *asked(found),
        *_answers(found, name),
        _locality(found, name),
        patch_section([*parts, *spectra_parts(found.get("spectra") or [], name)]),
        receipt(found),
    ]


def _recovery(found: Row, name: str) -> Section:
    points: list[tuple[str, float, tuple[float, float] | None, str]] = [_recovered_point(found, "patched", "patched")]
    rows: list[Sequence[Cell]] = [
        ("without the context", "0.0%", "–", "–", number(found, "kl_unpatched"), number(found, "unpatched_top1", "%")),
        _recovered_row(found, "patched", ""),
    ]
    for factor, share in sorted(found["strengths"].items(), key=lambda item: float(item[1])):
        points.append((f"patch × {factor}", share, None, "patched"))
    for count, recovery in found["fewer"].items():
        label = f"from {visible(count)} questions"
        points.append(_recovered_point(recovery, label, "patched"))
        rows.append(_recovered_row(found, label, f"fewer/{escaped(count)}/"))
    for key in found["controls"]:
        label = CONTROLS.get(key, key.replace("_", " "))
        points.append(_recovered_point(found["controls"][key], label, "control"))
        rows.append(_recovered_row(found, label, f"controls/{escaped(key)}/"))
        if found["controls"][key].get("in_window"):
            itself = f"{label.removeprefix('patch of ')} itself, in the window"
            rows.append(_recovered_row(found, itself, f"controls/{escaped(key)}/in_window/"))
    best = max((c["kl_recovered"] for c in found["controls"].values()), default=0.0)
    return Section(
        "How much of the context comes back, and its controls",
        f"Judged on {found['questions']} questions that the patch was not made from, with the patch written into the "
        "weights. 0 % is the model without the context, 100 % the model with it; controls must stay low.",
        [
            drawing(
                f"{name}-recovered", figures.recovered(points), "Share of the context's effect that comes back",
                "1 − KL patched / KL without, on held-out questions.",
                f"The patch recovers {found['kl_recovered']:.1%}, the best control {best:.1%}.",
            ),
            Table(
                "The same in numbers",
                ("run", "recovered", "95 % from", "to", "KL, nats", "same token"), rows, open=True,
            ),
        ],
    )  # fmt: skip


def _recovered_point(found: Row, label: str, kind: str) -> tuple[str, float, tuple[float, float] | None, str]:
    low, high = found["interval"][:2]
    return label, found["kl_recovered"], (low, high), kind


def _recovered_row(found: Row, label: str, at: str) -> Sequence[Cell]:
    keys = (("kl_recovered", "%"), ("interval/0", "%"), ("interval/1", "%"), ("kl_patched", "g"), ("top1", "%"))
    return (label, *(number(found, at + key, form) for key, form in keys))


def _answers(found: Row, name: str) -> list[Section]:
    held_out = found.get("held_out") or []
    if not held_out:
        return []
    written = [_answer(found, k) for k, row in enumerate(held_out[:SHOWN]) if (row.get("texts") or {}).get("question")]
    rows: list[Sequence[Cell]] = [
        (visible((row.get("texts") or {}).get("question") or str(k)), number(found, f"held_out/{k}/kl_unpatched"),
         number(found, f"held_out/{k}/kl_patched"))
        for k, row in enumerate(held_out)
    ]  # fmt: skip
    pairs = drawing(
        f"{name}-questions", figures.questions(held_out), "Question by question",
        "Divergence from the model with the context, without the patch and with it.",
        f"Divergence on {len(held_out)} questions, without the patch and with it.",
        table=Table("In numbers", ("question", "KL without", "KL patched"), rows),
    )  # fmt: skip
    same = Table(
        "Left alone", ("what", "value"),
        [("answers that are word for word those with the context", number(found, "same_answers", "%"))], open=True,
    )  # fmt: skip
    return [Section("Answers to questions that it has never seen", "", [pairs, same, *written])]


def _answer(found: Row, k: int) -> Answers:
    texts = found["held_out"][k]["texts"]
    said = [
        (label, readable(texts[key]).strip())
        for key, label in (("in_context", "with the context"), ("unpatched", "without it"),
                           ("patched", "without it, patched"))
        if texts.get(key) is not None
    ]  # fmt: skip
    numbers = [
        ("KL without", number(found, f"held_out/{k}/kl_unpatched")),
        ("KL patched", number(found, f"held_out/{k}/kl_patched")),
    ]
    return Answers(readable(texts["question"]).strip(), said, numbers)


def _locality(found: Row, name: str) -> Section:
    elsewhere = found["elsewhere"]
    if not elsewhere:
        return Section("Locality", parts=[Note("No other text was tried in this run.")])
    rows: list[Sequence[Cell]] = [
        (text, number(found, f"elsewhere/{at}/kl_patched"), number(found, f"elsewhere/{at}/kl_context"),
         number(found, f"elsewhere/{at}/kl_ratio", "%"))
        for text, at in ((text, escaped(text)) for text in elsewhere)
    ]  # fmt: skip
    return Section(
        "Locality",
        "On text that the context has no business with, the patch should move the model no more than the context does.",
        [
            drawing(
                f"{name}-locality", figures.locality(elsewhere), "How far the model moves elsewhere",
                "KL from the bare model, in nats per token.",
                "; ".join(f"{text}: patch {row['kl_patched']:.2g}, context {row['kl_context']:.2g} nats"
                          for text, row in elsewhere.items()),
            ),
            Table("In numbers", ("text", "patch, nats", "context, nats", "patch, of KL without"), rows, open=True),
        ],
    )  # fmt: skip


def file_sections(patch: Patch, name: str) -> list[Section]:
    """Of a patch file: its header, norms and singular values."""
    header = patch.header
    rows = {
        "kind": header.kind, "made for": header.model_type, "weights": header.fingerprint,
        "exact at positions": ", ".join(map(str, header.exact_at[:12])) + (" …" if len(header.exact_at) > 12 else ""),
        "run in": f"{header.model_dtype}, attention {header.attention}", "plan": " → ".join(header.plan),
        "measured as": "written weights" if header.materialised else "low-rank action",
        "edits": str(len(patch.edits)), "bytes": str(patch.nbytes), **header.versions,
    }  # fmt: skip
    cells = [(readable(key), readable(value)) for key, value in rows.items() if value]
    return [
        Section("The patch", "What was changed in the weights, and where.", spectra_parts(spectra(patch), name)),
        Section("Receipt", "", [Table("Header of the file", ("what", "value"), cells, open=True, words=True)]),
    ]
