"""Which JSON of which command a report accepts. A new kind is one `Kind` in `KINDS` and one function in `sections`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contextfold.errors import InputError, one_line
from contextfold.files import parsed_json, read_whole
from contextfold.report.details import detail_shape
from contextfold.report.lengths import (
    ablate_lengths,
    bake_lengths,
    fold_lengths,
    generate_lengths,
    reproduce_lengths,
    sequence_lengths,
    uneven,
)
from contextfold.report.shapes import NUMBER_OR_NULL, Each, Either, Maybe, Shape, completed, misfit

__all__ = ["KINDS", "Kind", "Run", "read", "run_of"]

LARGEST = 256 * 2**20
"""Bytes of a file that is still read; a run of 20,000 tokens stays below."""


@dataclass(frozen=True)
class Kind:
    """One form of JSON."""

    name: str
    title: str
    """In words."""
    commands: str
    """Which commands print it."""
    marks: frozenset[str]
    """Keys that no other kind has together."""
    verdict: str | None
    """Key that says whether it was proven; None where figures are stated and nothing is judged."""
    shape: Mapping[str, Shape]
    """What the page reads."""
    lengths: Callable[[Mapping[str, Any]], Iterator[tuple[str, list[int]]]]
    """Which lists belong together."""
    inner: Callable[[Mapping[str, Any]], Mapping[str, Shape]] = field(default=lambda found: {})
    """What else it reads, where that depends on the run."""


@dataclass(frozen=True)
class Run:
    """The JSON of one command, checked."""

    source: str
    """Where it came from."""
    kind: Kind
    found: Mapping[str, Any]

    @property
    def holds(self) -> bool | None:
        """None where nothing was to be proven."""
        return None if self.kind.verdict is None else bool(self.found[self.kind.verdict])


_TEXTS = Maybe(Each(Maybe(str)))
_COMPARED = {"tokens": int, "top1_matches": int, "smallest_logit_gap": float, "median_logit_gap": float}
_SPECTRA = Maybe(
    [
        {
            "layer": int, "site": str, "kind": str, "norm": float, "rank": Maybe(int), "numbers": [int],
            "singular_values": [float],
        }
    ]
)  # fmt: skip
_COMMON: dict[str, Shape] = {
    "model": str, "dtype": str, "command": Maybe(str), "context": Maybe(str), "query": Maybe(str),
    "receipt": Maybe(Each(Maybe(object))), "spectra": _SPECTRA, "patch": Maybe(str),
}  # fmt: skip
_FOLDED: dict[str, Shape] = {
    **_COMMON, "protocol": str, "proven": bool, "verdict": str, "tokens": int, "top1_matches": int,
    "worst_logit_gap": float, "median_logit_gap": float, "unpatched_logit_gap": float, "unpatched_top1_matches": int,
    "max_abs_dm": float, "action_worst_logit_gap": float, "perturbed_top1_matches": int,
    "perturbed_worst_logit_gap": float, "controls": Each(_COMPARED), "patch_bytes": int,
}  # fmt: skip

FOLD = Kind(
    "fold", "Exact patches, token by token", "fold, verify, verify --suite, demo",
    frozenset({"scatter_top1_matches", "controls", "layers"}), "proven",
    {
        **_FOLDED, "rule": str, "fallback": Maybe(str), "action_top1_matches": int, "scatter_top1_matches": int,
        "scatter_logit_gap": float, "prompts": Maybe([str]), "u_edges": Maybe([float]),
        "mismatches": [{"token": int, "margin": float}],
        "layers": [
            {
                "layer": int, "relative_error": Maybe(float), "weight_ratio": Maybe(float), "max_abs_dm": Maybe(float),
                "min_abs_u": Maybe(float), "min_cos_z": Maybe(float), "condition": Maybe(float), "outcomes": Each(int),
                "u_counts": Maybe([int]),
            }
        ],
        "steps": Maybe(
            [
                {
                    "prompt": int, "in_context": int, "unpatched": int, "patched": int, "in_context_margin": float,
                    "logit_gap": float, "kl_nats": float, "unpatched_logit_gap": float,
                    "weight_ratio": [NUMBER_OR_NULL], "relative_error": [NUMBER_OR_NULL], "texts": _TEXTS,
                }
            ]
        ),
    },
    fold_lengths,
)  # fmt: skip

SEQUENCE = Kind(
    "sequence", "One patch for a whole sequence", "fold --positions, verify of such a patch",
    frozenset({"positions", "elsewhere", "controls"}), "proven",
    {
        **_FOLDED, "sites": str, "elsewhere": {**_COMPARED, "mean_kl_nats": float},
        "positions": [
            {
                "position": int, "top1_match": bool, "logit_gap": float, "kl_nats": float,
                "unpatched_logit_gap": float, "token": Maybe(int), "in_context": Maybe(int), "unpatched": Maybe(int),
                "patched": Maybe(int), "in_context_margin": Maybe(float), "texts": _TEXTS,
            }
        ],
        "layers": [
            {
                "layer": int, "rank": int, "condition": Maybe(float), "weight_ratio": NUMBER_OR_NULL,
                "scale_ratio_max": Maybe(float), "max_abs_dm": float, "relative_error": Maybe(float), "outcome": str,
                "actions": Maybe([float]),
            }
        ],
    },
    sequence_lengths,
)  # fmt: skip

GENERATE = Kind(
    "generate", "Generation, folded afresh at every step", "generate", frozenset({"history", "see", "steps"}), "holds",
    {
        **_COMMON, "history": str, "see": str, "text": str, "holds": bool, "verdict": str, "tokens": int,
        "top1_matches": int, "proven_steps": int, "proven_top1_matches": int, "worst_proven_gap": float,
        "worst_action_gap": float, "unpatched_logit_gap": float, "max_abs_dm": Maybe(float),
        "steps": [
            {
                "sequence": int, "position": int, "in_context": int, "patched": int, "action_gap": float,
                "proven_gap": Maybe(float), "unpatched": Maybe(int), "unpatched_gap": Maybe(float),
                "kl_nats": Maybe(float), "margin": Maybe(float), "weight_ratio": Maybe([NUMBER_OR_NULL]),
                "relative_error": Maybe([NUMBER_OR_NULL]), "texts": _TEXTS,
            }
        ],
    },
    generate_lengths,
)  # fmt: skip

ABLATE = Kind(
    "ablate", "What each part of a prompt is worth", "ablate", frozenset({"parts", "ranking"}), "proven",
    {
        **_COMMON, "proven": bool, "exact_limit": float, "answer": [int], "answer_text": Maybe(str), "ranking": [str],
        "parts": [
            {
                "name": str, "text": Maybe(str), "dropped": int, "keeps_sink": bool, "rank": int, "patch_rank": int,
                "kl_nats": float, "answer_nats": float, "top1_changes": int, "logit_gap": float,
                "patched_logit_gap": float, "patch_norm": float, "weight_ratio": NUMBER_OR_NULL, "max_abs_dm": float,
                "proven": bool,
                "positions": [
                    {
                        "answer": int, "without": int, "kl_nats": float, "logit_gap": float,
                        "patched_logit_gap": float, "patched_top1_match": bool, "texts": _TEXTS,
                        "layers": [{"layer": int, "patch_norm": float, "relative_error": NUMBER_OR_NULL}],
                    }
                ],
            }
        ],
    },
    ablate_lengths,
)  # fmt: skip

_RECOVERY: dict[str, Shape] = {"kl_recovered": float, "interval": [float], "kl_patched": float, "top1": float}

BAKE = Kind(
    "bake", "A reusable patch", "bake", frozenset({"kl_recovered", "estimator"}), "holds",
    {
        **_COMMON, **_RECOVERY, "estimator": str, "holds": bool, "verdict": str, "questions": int,
        "kl_unpatched": float, "unpatched_top1": float, "same_answers": float,
        "controls": Each({**_RECOVERY, "in_window": Maybe(_RECOVERY)}),
        "elsewhere": Each({"kl_patched": float, "kl_context": float, "kl_ratio": float}), "strengths": Each(float),
        "fewer": Each(_RECOVERY),
        "sites": [{"layer": int, "role": str, "rank": int, "explained": float, "weight_ratio": NUMBER_OR_NULL}],
        "calibration_tokens": Maybe(int),
        "held_out": Maybe([{"kl_unpatched": float, "kl_patched": float, "texts": _TEXTS}]),
    },
    bake_lengths,
)  # fmt: skip

_STATED = Maybe(Either((float, str)))

REPRODUCE = Kind(
    "reproduce", "A paper's figures beside ours", "reproduce", frozenset({"paper", "rows", "not_reproduced"}), None,
    {
        "paper": str, "title": str, "model": Maybe(str), "quick": bool, "seconds": float, "processor_seconds": float,
        "rows": [
            {
                "section": str, "figure": str, "published": _STATED, "ours": _STATED, "difference": Maybe(float),
                "note": str,
            }
        ],
        "not_reproduced": [{"what": str, "why": str}],
        "parts": [{"name": str, "seconds": float, "processor_seconds": float, "resumed": bool}],
        "details": Each(Each(object)), "receipt": Maybe(Each(Maybe(object))),
    },
    reproduce_lengths, detail_shape,
)  # fmt: skip

KINDS = (FOLD, SEQUENCE, GENERATE, ABLATE, BAKE, REPRODUCE)


def read(path: Path) -> Run:
    """The run in a file. Raises `InputError` when there is none, when it is no JSON, or JSON of something else."""
    try:
        found = parsed_json(read_whole(path, LARGEST).decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}); give a file that --json wrote") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not JSON ({one_line(error)}); give a file that --json wrote") from error
    return run_of(found, str(path))


def run_of(found: object, source: str = "run") -> Run:
    """A run from JSON that is read already, such as `to_json()` gives it. Raises `InputError` as `read` does."""
    keys = set(found) if isinstance(found, dict) else set()
    kind = next((kind for kind in KINDS if kind.marks <= keys), None)
    if kind is None:
        met = (
            f"an object with {one_line(', '.join(sorted(keys)[:4]) or 'no keys')}"
            if isinstance(found, dict)
            else "no object"
        )
        known = "; ".join(kind.commands for kind in KINDS)
        raise InputError(f"{source} is {met}, not what a command of these prints with --json: {known}")
    assert isinstance(found, dict)
    wrong = misfit(found, dict(kind.shape)) or misfit(found, dict(kind.inner(found)))
    if wrong is not None:
        raise InputError(f"{source} looks like the JSON of {kind.commands}, but {wrong}; run the command again")
    wrong = uneven(kind.lengths(found))
    if wrong is not None:
        raise InputError(f"{source}: {wrong}; run the command again")
    return Run(source, kind, completed(found, dict(kind.shape)))
