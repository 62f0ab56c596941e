"""arXiv 2609.39329 (PatchKV): a patch for what a shortened context has lost, at several budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from contextfold.reproduce.engine import Paper, Part
from contextfold.reproduce.harbour import JUDGED, REFERENCE
from contextfold.reproduce.row import Missing, Row
from contextfold.reproduce.shortened import measure_budget

__all__ = ["PAPER"]

SHARES = (0.0, 0.02, 0.05, 0.1, 0.25, 0.5)
"""Of the context that is kept."""

CONTROLLED = 0.05
"""The budget at which controls are made."""

WAYS = {"output": "MLP output map, as in the paper", "two-sites": "attention and MLP output maps (the default of bake)"}

PUBLISHED = {0.05: (123.4, 21.1), 0.02: (180.6, 28.3)}
"""Perplexity on SQuAD with the short cache, and with the patch besides, by budget. With the whole cache it is 8.8."""

WHOLE = 8.8

LOST = 0.1
"""Nats per token from which a short context is said to have lost something."""


def _parts(quick: bool) -> list[Part]:
    parts = []
    for share in (0.0, CONTROLLED) if quick else SHARES:
        ways = ("output",) if quick else tuple(WAYS)
        options = {
            "share": share, "ways": ways, "asked": 2 if quick else len(REFERENCE),
            "judged": 2 if quick else len(JUDGED), "controls": share == CONTROLLED,
        }  # fmt: skip
        parts.append(Part(f"kept-{100 * share:g}", measure_budget, options, 1 + len(ways), torch.float32))
    return parts


def closed(whole: float, short: float, patched: float) -> float:
    """Share, in percent, of what the short context lost in log perplexity (nats) that comes back."""
    return 100 * (short - patched) / (short - whole)


def _rows(results: Mapping[str, Any]) -> list[Row]:
    budgets = [(round(float(name.removeprefix("kept-")) / 100, 4), found) for name, found in results.items()]
    rows = [row for share, found in budgets for row in _perplexity(share, found)]
    rows += [row for share, found in budgets for row in _closed(share, found)]
    return rows + [row for share, found in budgets for row in _agreement(share, found)]


def _perplexity(share: float, found: Mapping[str, Any]) -> list[Row]:
    section = "perplexity of the true answers (of another model on SQuAD in the paper)"
    short, patched = PUBLISHED.get(share, (None, None))
    words = f"{share:.0%} of the context kept"
    note = f"{found['kept_tokens']} of {found['document_tokens']} tokens; whole: {_ppl(found['whole'])}"
    rows = [Row(section, f"{words}, no patch", short, _ppl(found["short"]), f"{note}, published {WHOLE}")]
    for way, judged in found["ways"].items():
        rows.append(Row(section, f"{words}, {WAYS[way]}", patched if way == "output" else None, _ppl(judged)))
    return rows


def _ppl(judged: Mapping[str, float]) -> float:
    return float(f"{math.exp(judged['log_perplexity']):.3g}")


def _closed(share: float, found: Mapping[str, Any]) -> list[Row]:
    section = "of what the short context lost in log perplexity, % that the patch brings back"
    whole, short = found["whole"]["log_perplexity"], found["short"]["log_perplexity"]
    published = None
    if share in PUBLISHED:
        published = round(closed(math.log(WHOLE), *(math.log(value) for value in PUBLISHED[share])), 1)
    rows = []
    cases = {WAYS[way]: judged for way, judged in found["ways"].items()}
    cases |= {f"control: {name.replace('_', ' ')}": judged for name, judged in found["controls"].items()}
    for words, judged in cases.items():
        lost = short - whole >= LOST
        ours = round(closed(whole, short, judged["log_perplexity"]), 1) if lost else None
        stated = published if words == WAYS["output"] else None
        note = "" if lost else f"only {short - whole:.2g} nats are lost, too little to divide by"
        if stated is not None:
            note = "published: from its perplexities; here every fact that is asked for stands in the references"
        rows.append(Row(section, f"{share:.0%} kept, {words}", stated, ours, note))
    return rows


def _agreement(share: float, found: Mapping[str, Any]) -> list[Row]:
    section = "same first token as with the whole context, on the true answers, %"
    cases = {"no patch": found["short"], **{WAYS[way]: judged for way, judged in found["ways"].items()}}
    return [
        Row(section, f"{share:.0%} kept, {words}", None, round(100 * judged["same"] / judged["tokens"], 1),
            f"KL {judged['kl_nats']:.2g} nats per token")
        for words, judged in cases.items()
    ]  # fmt: skip


PAPER = Paper(
    number="2609.39329",
    title="PatchKV: Weight-Space Compensation of KV Cache",
    model="smollm2",
    parts=_parts,
    rows=_rows,
    missing=(
        Missing("KVzip and Attention Matching", "neither is part of this package; simply the first tokens are kept"),
        Missing("Qwen2.5-7B-1M, Qwen3-4B and Llama-3.1-8B", "their weights are not at hand; --model takes others"),
        Missing("SQuAD, AIME and hard retrieval", "no data set is at hand; one short document of our own stands in"),
        Missing("contexts of 169K tokens", "the small models have no room for them"),
    ),
)
