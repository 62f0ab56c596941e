"""Small runs of every kind, written out: what commands print, with numbers that are easy to find again."""

from __future__ import annotations

import copy
from typing import Any

HOSTILE = ("<script>alert(1)</script>", "</script><img src=http://example.com/x.png onerror=alert(2)>", "\"&'`{{7*7}}")
"""Token strings that a page must show, and nothing else."""

RECEIPT = {"fingerprint": "f" * 64, "attention": "sdpa", "threads": 1, "torch": "2"}
CONTROL = {"tokens": 2, "top1_matches": 0, "smallest_logit_gap": 7.25, "median_logit_gap": 8.125}
FOLDED: dict[str, Any] = {
    "model": "tiny", "dtype": "float32", "protocol": "Two tokens folded.", "proven": True, "verdict": "Proven: yes.",
    "context": f"A context with {HOSTILE[0]}", "query": HOSTILE[1], "tokens": 2, "top1_matches": 2,
    "worst_logit_gap": 3.0517578125e-05, "median_logit_gap": 1e-05, "unpatched_logit_gap": 12.5,
    "unpatched_top1_matches": 1, "max_abs_dm": 0.5, "action_worst_logit_gap": 2e-05, "perturbed_top1_matches": 2,
    "perturbed_worst_logit_gap": 6e-05, "controls": {"other_context": CONTROL, "a/b.c~d": CONTROL},
    "patch_bytes": 4096, "receipt": RECEIPT,
}  # fmt: skip
SPECTRA = [
    {"layer": k, "site": f"model.layers.{k}.mlp.down_proj.weight", "kind": "matrix", "rank": 3, "norm": 1.5 + k,
     "numbers": [1, 2, 3], "singular_values": [1.0, 0.5, 0.25]}
    for k in range(2)
]  # fmt: skip


def fold() -> dict[str, Any]:
    layers = [
        {"layer": k, "relative_error": 1e-7 * (k + 1), "absolute_error": 1e-6, "weight_ratio": 0.01, "max_abs_dm": 0.5,
         "min_abs_u": 1e-5, "min_abs_m": 0.1, "min_cos_z": 0.9, "condition": 2.0, "outcomes": {"exact": 2},
         "u_counts": [0, 3, 5, 0]}
        for k in range(2)
    ]  # fmt: skip
    steps = [
        {"index": k, "prompt": k, "in_context": 5, "unpatched": 6 + k, "patched": 5, "in_context_margin": 1.75,
         "logit_gap": 3e-05, "kl_nats": 1e-12, "unpatched_logit_gap": 12.5, "max_abs_dm": 0.5,
         "weight_ratio": [0.01, 0.02 + k], "relative_error": [1e-7, 2e-7],
         "texts": {"in_context": HOSTILE[k], "unpatched": HOSTILE[2], "patched": HOSTILE[k]}}
        for k in range(2)
    ]  # fmt: skip
    return copy.deepcopy(
        {
            **FOLDED, "rule": "balanced", "fallback": None, "action_top1_matches": 2, "scatter_top1_matches": 2,
            "scatter_logit_gap": 5e-05, "mismatches": [], "layers": layers, "u_edges": [1e-8, 1e-4, 1.0],
            "steps": steps, "spectra": SPECTRA, "patch": None,
        }
    )  # fmt: skip


def sequence(tokens: int = 2) -> dict[str, Any]:
    positions = [
        {"position": 9 + k, "token": k, "in_context": 5, "unpatched": 5 + k % 3, "patched": 5,
         "in_context_margin": 2.5, "top1_match": True, "margin": 0.0, "logit_gap": 1e-05, "kl_nats": 0.0,
         "unpatched_logit_gap": 9.0 + k, "unpatched_top1_match": k == 0,
         "texts": {"token": HOSTILE[k % 3], "in_context": "x", "unpatched": "y", "patched": "x"}}
        for k in range(tokens)
    ]  # fmt: skip
    layers = [
        {"layer": k, "rank": 3, "condition": 4.0, "weight_ratio": 0.1, "scale_ratio_max": None, "max_abs_dm": 0.0,
         "relative_error": 2e-7, "length_change_max": 0.0, "outcome": "exact", "actions": [0.25 + k] * tokens}
        for k in range(2)
    ]  # fmt: skip
    return copy.deepcopy(
        {**FOLDED, "sites": "output", "elsewhere": {**CONTROL, "mean_kl_nats": 0.375}, "positions": positions,
         "layers": layers, "spectra": SPECTRA}
    )  # fmt: skip


def generate() -> dict[str, Any]:
    steps = [
        {"sequence": 0, "position": 4 + k, "in_context": 5, "patched": 5 + k, "action_gap": 4e-06, "margin": 0.5 * k,
         "chosen": 5, "proven_gap": 8e-06 if k < 2 else None, "unpatched": 7 if k < 2 else None,
         "unpatched_gap": 3.5 if k < 2 else None, "kl_nats": 1e-13 if k < 2 else None,
         "weight_ratio": [0.1, 0.2] if k < 2 else None, "relative_error": [1e-7, 1e-7] if k < 2 else None,
         "texts": {"in_context": HOSTILE[k], "patched": "b", "unpatched": None}}
        for k in range(3)
    ]  # fmt: skip
    return copy.deepcopy(
        {"model": "tiny", "dtype": "float32", "history": "free", "see": "prompt", "text": HOSTILE[0], "holds": False,
         "verdict": "Does not hold: no.", "tokens": 3, "top1_matches": 1, "proven_steps": 2,
         "proven_top1_matches": 1, "worst_proven_gap": 8e-06, "worst_action_gap": 4e-06, "unpatched_logit_gap": 3.5,
         "max_abs_dm": None, "mismatches": [], "steps": steps, "receipt": RECEIPT}
    )  # fmt: skip


def ablate() -> dict[str, Any]:
    def part(name: str, rank: int) -> dict[str, Any]:
        rows = [
            {"position": 3 + k, "answer": 5, "without": 6, "patched": 5, "kl_nats": 0.5, "logit_gap": 3.0,
             "patched_logit_gap": 1e-05, "patched_top1_match": True,
             "texts": {"answer": HOSTILE[1], "without": "w", "patched": HOSTILE[1]},
             "layers": [{"layer": i, "patch_norm": 1.0 + i, "relative_error": 1e-7} for i in range(2)]}
            for k in range(2)
        ]  # fmt: skip
        return {"name": name, "text": HOSTILE[0], "dropped": 4, "keeps_sink": rank == 1, "rank": rank, "patch_rank": 1,
                "kl_nats": 2.0 / rank, "answer_nats": -0.5, "top1_changes": 1, "logit_gap": 3.0,
                "patched_logit_gap": 1e-05, "patch_norm": 4.5, "weight_ratio": 0.1, "max_abs_dm": 0.0, "proven": True,
                "positions": rows}  # fmt: skip

    parts = [part("$rule_{", 2), part(HOSTILE[0], 1)]
    return {"model": "tiny", "dtype": "float32", "proven": True, "exact_limit": 1e-4, "answer": [5, 5],
            "answer_text": "x", "ranking": [HOSTILE[0], "$rule_{"], "parts": parts, "query": "q",
            "receipt": RECEIPT}  # fmt: skip


def bake() -> dict[str, Any]:
    share = {"kl_recovered": 0.875, "interval": [0.8, 0.9], "kl_patched": 0.0625, "top1": 0.75}
    held_out = [
        {"kl_unpatched": 0.5 + k, "kl_patched": 0.0625, "question": [1], "in_context": [2], "patched": [2],
         "unpatched": None, "texts": {"question": HOSTILE[0], "in_context": HOSTILE[1], "patched": "p",
                                      "unpatched": None}}
        for k in range(2)
    ]  # fmt: skip
    return {"model": "tiny", "dtype": "float32", **share, "estimator": "two-sites", "holds": True,
            "verdict": "A stand-in for the context: 87.5 %.", "questions": 2, "kl_unpatched": 0.5,
            "unpatched_top1": 0.25, "same_answers": 0.5,
            "controls": {"random_patch": {**share, "kl_recovered": -0.125, "in_window": None},
                         "shuffled_context": {**share, "kl_recovered": 0.1875,
                                              "in_window": {**share, "kl_recovered": 0.2734375}}},
            "elsewhere": {"other/text": {"kl_patched": 0.03125, "kl_context": 0.25, "kl_ratio": 0.0625}},
            "strengths": {"0.5": 0.5}, "fewer": {"8": {**share, "kl_recovered": 0.75}}, "calibration_tokens": 100,
            "held_out": held_out, "spectra": SPECTRA,
            "sites": [{"layer": k, "role": "output map", "rank": 3, "explained": 0.5, "weight_ratio": 0.125}
                      for k in range(2)], "receipt": RECEIPT}  # fmt: skip


def reproduce() -> dict[str, Any]:
    def columns(gap: float) -> dict[str, Any]:
        return {"logit_gap": [gap, 2 * gap], "same": [True, False]}

    rows = [
        ("agreement, %", HOSTILE[1], 87.5, 99.0, "aimed elsewhere"), ("agreement, %", "no patch", None, 0.25, ""),
        ("$course_{", "steps", "decay", HOSTILE[0], "words beside words"), ("$course_{", "size", 100, None, HOSTILE[2]),
    ]  # fmt: skip
    curves = {"theorem": {"written": columns(1e-6), "perturbed": columns(250.0)}, "x": {"written": columns(0.0)}}
    prompt = {
        "prompt": HOSTILE[0], "texts": {"in_context": "said", "theorem": "said", "x": HOSTILE[1]}, "tokens": 2,
        "curves": curves, "unpatched": columns(12.5), "u": {"counts": [[0] * 9 + [3, 5] + [0] * 9] * 2},
        "held": {"theorem": {"alone": [[True, False], [True, True]]}},
    }  # fmt: skip
    return copy.deepcopy(
        {
            "paper": "2511.17864", "title": HOSTILE[2], "model": HOSTILE[0], "quick": False,
            "rows": [
                {"section": section, "figure": name, "published": published, "ours": ours,
                 "difference": 11.5 if ours == 99.0 else None, "note": note}
                for section, name, published, ours, note in rows
            ],
            "not_reproduced": [{"what": "a larger model", "why": HOSTILE[1]}], "seconds": 12.5,
            "processor_seconds": 11.25, "receipt": RECEIPT,
            "parts": [{"name": "float32-prompt-1", "seconds": 12.5, "processor_seconds": 11.25, "resumed": True}],
            "details": {"float32-prompt-1": prompt},
        }
    )  # fmt: skip


ALL = {"fold": fold, "sequence": sequence, "generate": generate, "ablate": ablate, "bake": bake, "reproduce": reproduce}

SENTENCES = {
    "ablate": "every patch leaves a logit gap of at most 1e-05",
    "reproduce": "4 rows. A published number stands beside 1: 0 equal, 1 different. The paper's words stand beside 1. "
    "Published, but not measurable here: 1. Reported by the paper, but not reproduced: 1; the reasons are below.",
}
"""Of the kinds whose JSON has no verdict: what the page says in its place."""
