"""Sections that several kinds of run share: what was asked, the patch itself, the receipt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contextfold.report import figures
from contextfold.report.parts import Cell, Drawing, Note, Part, Section, Table, Text, drawing, readable, shown, visible

__all__ = ["CONTROLS", "asked", "layer_heat", "patch_section", "receipt", "spectra_parts", "token_text"]

Row = Mapping[str, Any]

CONTROLS = {
    "other_context": "patch of another context",
    "shuffled_context": "patch of the shuffled context",
    "random_patch": "random patch of equal norm",
}
"""Negative controls by their key."""

FEW = 2
"""Singular values per map up to which there is no spectrum to draw."""


def token_text(row: Row, key: str) -> str:
    """A token in letters where the run has them, else its number."""
    text = (row.get("texts") or {}).get(key)
    if text is not None:
        return visible(text)
    return "–" if row.get(key) is None else f"#{row[key]}"


def asked(found: Row) -> list[Section]:
    """The texts that the run was given."""
    texts: list[Part] = [
        Text(title, readable(found[key]))
        for key, title in (("context", "Context"), ("query", "Query"))
        if found.get(key)
    ]
    texts += [Text(f"Prompt {k}", readable(text)) for k, text in enumerate(found.get("prompts") or [], 1)]
    lead = "The context is what was folded into the weights; the query is what the patched model still saw."
    return [Section("What was asked", lead if found.get("context") else "", texts)] if texts else []


def layer_heat(
    name: str,
    values: Sequence[Sequence[float | None]],
    names: Sequence[str],
    unit: str,
    title: str,
    caption: str,
    breaks: Sequence[int] = (),
) -> Drawing:
    """Layers against tokens, with what a pointer reads off."""
    seen = [value for column in values for value in column if value is not None]
    top = max(seen, default=0.0)
    cells: list[Sequence[Cell]] = [
        (names[k], *(shown(value) for value in column)) for k, column in enumerate(values)
    ]  # fmt: skip
    layers = tuple(f"layer {k}" for k in range(len(values[0])))
    return drawing(
        name, figures.heat_map(values, unit, breaks=breaks), title, caption,
        f"Heat map of {len(layers)} layers and {len(values)} tokens; the largest value is {top:.2g}.",
        table=Table("In numbers", ("token", *layers), cells), heat=(values, names, unit),
    )  # fmt: skip


def spectra_parts(spectra: Sequence[Row], name: str) -> list[Part]:
    """Norms of the edits, and their singular values where there are more than a few."""
    if not spectra:
        return []
    rows: list[Sequence[Cell]] = [
        (str(row["layer"]), figures.role_of(row["site"]), shown(row["norm"]), str(row["rank"] or "–"))
        for row in spectra
    ]  # fmt: skip
    largest = max(spectra, key=lambda row: float(row["norm"]))
    parts: list[Part] = [
        drawing(
            f"{name}-norms", figures.edit_norms(spectra), "Norm of every edit",
            "By layer, the norm of the change of each parameter.",
            f"Norms of {len(spectra)} edits; the largest, {largest['norm']:.2g}, at {largest['site']}.",
            table=Table("In numbers", ("layer", "parameter", "norm", "rank"), rows),
        )
    ]  # fmt: skip
    matrices = [row for row in spectra if row["kind"] == "matrix"]
    deep = max((len(row["singular_values"]) for row in matrices), default=0)
    if deep <= FEW:
        words = "one singular value" if deep <= 1 else f"at most {deep} singular values"
        parts.append(Note(f"Every edit of a matrix has {words}, so the norms say it all."))
        return parts
    ranks: list[Sequence[Cell]] = [
        (str(row["layer"]), figures.role_of(row["site"]), str(row["rank"]), shown(row["singular_values"][0]),
         shown(row["singular_values"][-1]))
        for row in matrices if row["singular_values"]
    ]  # fmt: skip
    parts.append(
        drawing(
            f"{name}-spectra", figures.singular_values(spectra), "Singular values of the patch",
            "A line per layer. A steep line means that a patch of smaller rank would do nearly as well.",
            f"Singular values of {len(matrices)} edits, at most {deep} drawn of each.",
            table=Table("In numbers", ("layer", "parameter", "rank", "largest", "smallest"), ranks),
        )
    )  # fmt: skip
    return parts


def patch_section(parts: Sequence[Part]) -> Section:
    """What the patch is."""
    body = list(parts) or [Note("This file says nothing about the patch itself; --patch FILE draws it.")]
    return Section("The patch", "What was changed in the weights, and where.", body)


def receipt(found: Row) -> Section:
    """How the run can be had again."""
    sites = found.get("sites") if isinstance(found.get("sites"), str) else None
    rows = {
        "command": found.get("command"), "model": found["model"], "dtype": found.get("dtype"),
        "rule": found.get("rule"), "fallback": found.get("fallback"), "sites": sites,
        "estimator": found.get("estimator"), "patch": found.get("patch"),
        "bytes of the patch": found.get("patch_bytes"), **(found.get("receipt") or {}),
    }  # fmt: skip
    cells = [(readable(str(name)), readable(str(value))) for name, value in rows.items() if value is not None]
    return Section(
        "Receipt", "What ran, and on what.", [Table("Receipt", ("what", "value"), cells, open=True, words=True)]
    )
