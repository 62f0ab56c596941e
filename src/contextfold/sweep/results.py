"""Rows of a sweep: the figures of verdicts under fixed names, and the Parquet file that holds them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contextfold.errors import ContextfoldError, InputError
from contextfold.files import replacing
from contextfold.sweep.jobs import Job
from contextfold.versions import versions

__all__ = ["COLUMNS", "check_parquet", "failed_row", "fits", "row_of", "write_parquet"]

_RECOVERY = {"kl_recovered": float, "interval_low": float, "interval_high": float, "kl_patched": float, "top1": float}
_GAPS = {"tokens": int, "top1_matches": int, "smallest_logit_gap": float, "median_logit_gap": float}
_CONTROLS = ("other_context", "shuffled_context", "random_patch")

COLUMNS: dict[str, type] = {
    "job": str, "kind": str, "model": str, "dtype": str, "context": str, "estimator": str, "rule": str, "seed": int,
    "query": str, "error": str, "holds": bool, "verdict": str, "seconds": float, "solve_seconds": float,
    "peak_bytes": int, "patch_bytes": int,
    # a bake
    "questions": int, "calibration_tokens": int, "kl_unpatched": float, "unpatched_top1": float, **_RECOVERY,
    "same_answers": float, "elsewhere_general_questions_kl_patched": float,
    "elsewhere_general_questions_kl_context": float, "elsewhere_general_questions_kl_ratio": float,
    "strengths_0_5": float, "strengths_1_5": float,
    # a fold
    "tokens": int, "top1_matches": int, "worst_logit_gap": float, "median_logit_gap": float, "worst_kl_nats": float,
    "unpatched_logit_gap": float, "smallest_unpatched_logit_gap": float, "unpatched_top1_matches": int,
    "max_abs_dm": float, "action_top1_matches": int, "action_worst_logit_gap": float, "perturbed_top1_matches": int,
    "perturbed_worst_logit_gap": float, "scatter_top1_matches": int, "scatter_logit_gap": float,
    **{f"controls_{name}_{key}": kind for name in _CONTROLS for key, kind in {**_RECOVERY, **_GAPS}.items()},
    **{f"controls_{name}_in_window_{key}": kind for name in _CONTROLS[:2] for key, kind in _RECOVERY.items()},
    # what it depends on
    "fingerprint": str, "attention": str, "threads": int, "python": str, "contextfold": str, "torch": str,
    "transformers": str,
}  # fmt: skip
"""Every column, whatever a sweep asks for, with its type; null where it does not apply. `docs/sweep.md` lists them."""


def row_of(job: Job, digest: str, payload: Mapping[str, Any], seconds: float, peak: int | None) -> dict[str, Any]:
    """The row of a finished job; `payload` is its verdict as JSON."""
    flat = dict(_flat({**payload, **payload["receipt"]}))
    return _whole({**flat, **_named(job, digest), "seconds": seconds, "peak_bytes": peak})


def failed_row(job: Job, digest: str, error: BaseException | str, seconds: float | None = None) -> dict[str, Any]:
    """The row of a job that failed, with one line of why."""
    words = " ".join(str(error).split())
    if not isinstance(error, str | ContextfoldError):
        words = f"{type(error).__name__}: {words}"
    return _whole({**versions(), **_named(job, digest), "error": words, "seconds": seconds})


def _named(job: Job, digest: str) -> dict[str, Any]:
    bake = job.kind == "bake"
    return {
        "job": digest, "kind": job.kind, "model": job.model, "dtype": job.dtype, "context": job.context,
        "estimator": job.method if bake else None, "rule": None if bake else job.method, "seed": job.seed,
        "query": job.options.get("query"),
    }  # fmt: skip


def _flat(found: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of nested objects joined by an underscore, and an interval as its two ends; lists are left out."""
    for key, value in found.items():
        name = before + re.sub(r"[^A-Za-z0-9]+", "_", key)
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}_")
        elif key == "interval":
            yield f"{name}_low", value[0]
            yield f"{name}_high", value[1]
        else:
            yield name, value


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """All columns, in their order; what is not a number is null, as in the JSON."""
    return {name: _kept(values.get(name), kind) for name, kind in COLUMNS.items()}


def _kept(value: Any, kind: type) -> Any:
    if value is None or (kind is float and not math.isfinite(value)):
        return None
    return kind(value)


def fits(row: Mapping[str, Any], digest: str) -> bool:
    """Whether what was found in the work folder is a row of this job, so that a table can hold it."""
    typed = all(name in row and (row[name] is None or type(row[name]) is kind) for name, kind in COLUMNS.items())
    return typed and len(row) == len(COLUMNS) and row["job"] == digest


def check_parquet() -> None:
    """Before hours of work, not after. Raises `InputError` where Parquet cannot be written."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise InputError("writing Parquet needs pyarrow; run: pip install 'contextfold[sweep]'") from None


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write beside the target and rename. Raises `InputError` when it cannot be written."""
    import pyarrow as arrow
    from pyarrow import parquet

    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    with replacing(path, "choose another --out") as part:
        parquet.write_table(arrow.Table.from_pylist([dict(row) for row in rows], schema=schema), part)
