"""Points that are measured: random Llamas of several widths and depths, and the built-in models. One thread."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import bound_model, random_ids

from contextfold.anatomy import Bound
from contextfold.bake import Example, Frame, bake
from contextfold.ceiling import peak_memory, reset_peak, used_memory
from contextfold.fold import fold_sequence, fold_token
from scaling.costs import Shape
from scaling.fit import OPERATIONS

__all__ = ["FITTED", "LEFT_OUT", "OPERATIONS", "PEAKED", "PEAKS", "machine", "peaks", "points"]

FITTED = (
    "random-4-256", "random-16-256", "random-8-512", "random-16-512", "random-4-768", "random-4-1024", "random-8-1024",
)  # fmt: skip
"""LAYERS-WIDTH; the MLP is three times as wide."""

LEFT_OUT = ("random-12-640", "random-6-1536", "smollm2", "gemma3-270m")
"""Not fitted: one inside the range of sizes, one beyond it, and two real models."""

PEAKED = ("random-16-256", "random-8-512", "random-12-640", "random-4-1024")
"""Models whose peaks are measured too, in a process of their own."""

PEAKS = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""What that process is told: to give back at once what is freed, which takes time, so no seconds are measured there."""

TOKEN = ((128, 16), (512, 16), (1024, 16))
"""Context and query, in tokens."""

SEQUENCE = ((256, 32), (256, 128), (256, 256))

BAKE = ((256, 8, 16), (256, 16, 32), (256, 32, 32))
"""Context, questions, and tokens of a question with its answer."""

RUNS = {"token": 2, "sequence": 2, "bake": 1}
"""The quickest counts: what else runs on a machine only adds. A bake is long enough."""


def points(name: str, operations: Collection[str] = OPERATIONS) -> Iterator[dict[str, Any]]:
    """Rows of the file for one model, without peaks. Seconds are those of the processor."""
    bound = bound_model(name)
    shape = Shape.of(bound.model.config.get_text_config())
    about = {"model": name, "fitted": name in FITTED, **vars(shape)}
    for asked, call in calls(bound, operations):
        yield {**about, **asked, **measured(call, RUNS[asked["operation"]])}


def peaks(name: str, operations: Collection[str] = OPERATIONS) -> list[int]:
    """Of the same calls, in their order: resident bytes above those before."""
    found = []
    for _, call in calls(bound_model(name), operations):
        before = _settled()
        call()
        found.append(peak_memory() - before)
    return found


def calls(bound: Bound, operations: Collection[str]) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """What is asked, as it stands in the file, and the call."""
    fold_token(bound, random_ids(bound, 64), random_ids(bound, 16))  # warms up
    for operation, fold, sizes in (("token", fold_token, TOKEN), ("sequence", fold_sequence, SEQUENCE)):
        for c, n in sizes if operation in operations else ():
            asked = {"operation": operation, "context": c, "query": n}
            yield asked, partial(fold, bound, random_ids(bound, c), random_ids(bound, n))
    for c, questions, tail in BAKE if "bake" in operations else ():
        frame = Frame(random_ids(bound, 1), random_ids(bound, c))
        asked = {"operation": "bake", "context": c, "questions": questions, "tail": tail}
        yield asked, partial(bake, bound, frame, _examples(bound, questions, tail))


def _examples(bound: Bound, questions: int, tail: int) -> list[Example]:
    ids = random_ids(bound, questions * tail).reshape(questions, tail)
    return [Example(row, tail // 2) for row in ids]


def measured(call: Callable[[], Any], runs: int) -> dict[str, Any]:
    """Seconds of the quickest of `runs`, bytes of the patch, and a bake's ranks."""
    found, spent = None, []
    for _ in range(runs):
        started = time.process_time()
        found = call()
        spent.append(time.process_time() - started)
    assert found is not None
    factors = sum(p.nbytes for edit in found.patch.edits.values() for p in _factors(edit))
    row = {"seconds": round(min(spent), 4), "patch_bytes": factors}
    sites = getattr(found, "sites", None)
    if sites:
        row["ranks"] = [[a.rank, b.rank] for a, b in zip(sites[::2], sites[1::2], strict=True)]
    return row


def _factors(edit: Any) -> tuple[torch.Tensor, ...]:
    delta = getattr(edit, "delta", None)
    return () if delta is None else (delta.B, delta.A)


def _settled() -> int:
    """Resident bytes, when what was freed has been given back; Linux forgets the peak so far."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    reset_peak()
    return used_memory()


def machine() -> dict[str, Any]:
    """What stands in the way of a square product, and of a copy that no cache holds; one thread."""
    found: dict[str, Any] = {"processor": _processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        a = torch.randn(1024, 1024, dtype=dtype)
        found[f"{name}_flops_per_second"] = float(f"{2 * 1024**3 / _quickest(partial(torch.mm, a, a)):.3g}")
    gram = torch.randn(2048, 2048, dtype=torch.float64)
    spent = _quickest(partial(torch.linalg.eigh, gram @ gram.T), 2)
    found["eigenvectors_flops_per_second"] = float(f"{9 * 2048**3 / spent:.3g}")
    block = torch.zeros(2**28, dtype=torch.uint8)
    found["copied_bytes_per_second"] = float(f"{block.numel() / _quickest(block.clone):.3g}")
    return found


def _quickest(call: Callable[[], Any], runs: int = 5) -> float:
    spent = []
    for _ in range(runs):
        started = time.process_time()
        call()
        spent.append(time.process_time() - started)
    return min(spent)


def _processor() -> str:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0].strip() if names else "unknown"
