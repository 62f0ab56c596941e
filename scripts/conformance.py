"""The census: every registered causal language model type, folded on a tiny model or refused by name.

Writes `docs/measured/support.json`, type by type, so that a run that was stopped goes on where it was. Results of
other versions of the code or of its dependencies are measured again. `--fresh` measures everything.

    python scripts/conformance.py [--out FILE] [--fresh] [--jobs N] [TYPE ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402 (the path and the environment come first)

import zoo  # noqa: E402
from conformance import (  # noqa: E402
    DTYPES,
    EXACT,
    FLOAT32_INSIDE,
    ROUNDINGS,
    UNPATCHED,
    WIDE,
    Measured,
    default_dtype,
    measure,
)
from contextfold.anatomy import FAMILIES, REFUSED, bind  # noqa: E402
from contextfold.anatomy.discover import discover  # noqa: E402
from contextfold.errors import ContextfoldError, UnsupportedModel  # noqa: E402

OUT = ROOT / "docs" / "measured" / "support.json"

RUNS = (("float64", "eager"), ("float64", "sdpa"), ("float32", "eager"), ("bfloat16", "eager"))

CANNOT_RUN = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "does not run without its target model"),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), "does not run in float64: its router mixes dtypes"),
}

NO_SDPA = "does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=[], help="model types; all by default")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each; 2 by default")
    chosen = parser.parse_args()
    rows = {} if chosen.fresh else _earlier(chosen.out)
    wanted = chosen.types or [name for name in zoo.MODEL_TYPES if name not in rows]
    for model_type, row, seconds in _measured(wanted, chosen.jobs):
        rows[model_type] = row
        print(f"{row['status']:8} {model_type:28} {seconds:5.1f} s  {row['reason'][:70]}", flush=True)  # noqa: T201
        _write(chosen.out, rows)
    counts = _counts(rows)
    print(json.dumps(counts))  # noqa: T201
    return 1 if counts["neither"] else 0


def _measured(wanted: Iterable[str], jobs: int) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Types with their rows and the seconds that they took, as they are done."""
    # Spawned, not forked: a fork of a process with threads may hang.
    with ProcessPoolExecutor(jobs, get_context("spawn"), _alone) as pool:
        for done in as_completed([pool.submit(_timed, model_type) for model_type in wanted]):
            yield done.result()


def _alone() -> None:
    """How every process of the census works: one thread, since the models are tiny, and no gradients."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.filterwarnings("ignore")


def _timed(model_type: str) -> tuple[str, dict[str, Any], float]:
    start = time.perf_counter()
    return model_type, _row(model_type), time.perf_counter() - start


@cache
def _versions() -> dict[str, str]:
    """Of what is measured, as it was when the run began."""
    digest = hashlib.sha256()
    for folder in ("src/contextfold", "tests"):
        names = (
            sorted((ROOT / folder).rglob("*.py")) if folder.startswith("src") else sorted((ROOT / folder).glob("*.py"))
        )
        for path in names:
            if folder.startswith("src") or path.stem in ("zoo", "zoo_configs", "conformance"):
                digest.update(path.read_bytes())
    found = {name: version(name) for name in ("torch", "transformers")}
    return {**found, "code": digest.hexdigest()}


def _earlier(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return dict(found["model_types"]) if found["versions"] == _versions() else {}


def _write(path: Path, rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "versions": _versions(),
        "unit": "gap of the logits as a fraction of the unpatched gap; unpatched: relative to the in-context logits",
        "limits": {
            "float64": EXACT,
            "float64 with operations in float32": FLOAT32_INSIDE,
            "times rounding": {str(dtype).removeprefix("torch."): limit for dtype, limit in ROUNDINGS.items()},
        },
        "counts": _counts(rows),
        "model_types": {name: rows[name] for name in zoo.MODEL_TYPES if name in rows},
    }
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _counts(rows: dict[str, Any]) -> dict[str, int]:
    found = Counter(row["status"] for row in rows.values())
    return {status: found[status] for status in ("exact", "refused", "neither")}


def _row(model_type: str) -> dict[str, Any]:
    if model_type in REFUSED:
        return _refused(model_type)
    runs: dict[str, Any] = {}
    for dtype, attention in RUNS:
        try:
            runs[f"{dtype}, {attention}"] = measure(model_type, DTYPES[dtype], attention)
        except (ContextfoldError, ValueError, RuntimeError, AssertionError) as error:
            runs[f"{dtype}, {attention}"] = error
    return {**_judged(model_type, runs), "discovery": _discovered(model_type)}


def _discovered(model_type: str) -> str:
    """`same sites`, or what discovery says when it may not look at the records."""
    model = zoo.build(model_type)
    try:
        with default_dtype(WIDE.get(model_type, torch.float32)):
            found = bind(model, discover(model))
            same = {s for b in found.blocks for s in b.sites} == {s for b in bind(model).blocks for s in b.sites}
    except UnsupportedModel as error:
        return f"refused: {error}"
    return "same sites" if same else "other sites"


def _refused(model_type: str) -> dict[str, Any]:
    """Refused types are built where they can be, and must be refused by the door and not only by the table."""
    row = {"anatomy": None, "family": None, "status": "refused", "reason": REFUSED[model_type], "gaps": {}}
    try:
        model = zoo.build(model_type)
    except (ImportError, MemoryError, ValueError) as error:
        return {**row, "note": f"could not be built here: {str(error).strip().splitlines()[0][:90]}"}
    try:
        bind(model)
    except UnsupportedModel as error:
        if REFUSED[model_type] not in str(error):
            return {**row, "status": "neither", "reason": str(error)}
    else:
        return {**row, "status": "neither", "reason": "listed as refused, but binds"}
    if model_type in CANNOT_RUN:
        return {**row, "discovery": CANNOT_RUN[model_type]}
    try:
        discover(model)
    except UnsupportedModel as error:
        return {**row, "discovery": f"refused: {error}"}
    return {**row, "status": "neither", "reason": "listed as refused, but discovery proves a record"}


def _judged(model_type: str, runs: dict[str, Any]) -> dict[str, Any]:
    family = next(f for f in FAMILIES if model_type in f.model_types)
    row: dict[str, Any] = {"anatomy": None, "family": family.name, "status": "exact", "reason": "", "gaps": {}}
    for name, found in runs.items():
        if isinstance(found, Measured):
            row |= {"anatomy": found.anatomy, "rules": list(found.rules)}
            row["gaps"][name] = {
                "unpatched": found.unpatched, "rounding": found.rounding, **found.gaps, "limit": found.limit,
            }  # fmt: skip
            if not (found.worst <= found.limit and found.unpatched > UNPATCHED):
                row |= {"status": "neither", "reason": f"{name}: gap {found.worst:.2g}, limit {found.limit:.2g}"}
        elif name.endswith("sdpa") and NO_SDPA in str(found):
            row["gaps"][name] = "the model has no sdpa"
        else:
            row["gaps"][name] = str(found).strip().splitlines()[0][:160]
            if name.startswith("float64") or isinstance(found, (ContextfoldError, AssertionError)):
                row |= {"status": "neither", "reason": f"{name}: {type(found).__name__}: {row['gaps'][name]}"}
    return row


if __name__ == "__main__":
    sys.exit(main())
