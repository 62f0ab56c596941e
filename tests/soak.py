"""Many folds and bakes in one process: what grows, what slows down, and what is left on the model."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiny
from contextfold.anatomy import Bound
from contextfold.bake import Frame, answered, bake
from contextfold.fold import fold_sequence, fold_token
from contextfold.runtime import Run, applied, materialised, run

INPUTS = 16
"""Different texts, taken in turn, so that memory that is kept by text stops growing after the first round."""


def hooks(model: nn.Module) -> int:
    """Hooks of every kind, on all modules."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def identity(model: nn.Module) -> dict[str, tuple[int, int, bool]]:
    """Which objects the parameters and buffers are, where their memory is, and whether they ask for gradients."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: (id(each), each.data_ptr(), each.requires_grad) for name, each in named}


def tensors() -> int:
    """Tensors that are alive in this process."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def files() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Bytes of memory that are resident."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def yardstick() -> float:
    """Seconds of the processor for a fixed piece of work that is much like a forward: small products, in Python."""
    begun, vector, square = time.process_time(), torch.ones(32), torch.eye(32)
    for _ in range(200):
        vector = square @ vector
    return time.process_time() - begun


def folds(bound: Bound) -> Callable[[int], None]:
    """The k-th fold: of one token, every fifth of a sequence, every tenth also applied, written and run."""

    def one(k: int) -> None:
        context, query = tiny.tokens(8 + k % 5, seed=k % INPUTS), tiny.tokens(5, seed=100 + k % INPUTS)
        fold = fold_sequence if k % 5 == 4 else fold_token
        patch = fold(bound, context, query).patch
        if k % 10 == 0:
            ids = Run(query, torch.arange(query.numel()))
            with applied(bound, patch):
                run(bound.model, ids)
            with materialised(bound, patch):
                run(bound.model, ids)

    return one


def bakes(bound: Bound) -> Callable[[int], None]:
    """The k-th bake: of answers that the model gives with a context."""

    def one(k: int) -> None:
        frame = Frame(tiny.tokens(2, seed=3), tiny.tokens(9, seed=k % INPUTS))
        examples = answered(bound, frame.full, [tiny.tokens(4, seed=50 + i) for i in range(4)], tokens=3)
        bake(bound, frame, examples, lam0=1e-2)

    return one


@dataclass(frozen=True)
class Course:
    """What was seen on the way."""

    seconds: Sequence[float]
    """Of the processor, per piece of work."""
    beside: Sequence[float]
    """The same of `yardstick`, after each piece: a machine that others use is not always as fast."""
    at: Sequence[int]
    bytes: Sequence[int]
    """Resident memory after so many pieces."""

    def to_json(self) -> dict[str, Any]:
        tenth = max(1, len(self.seconds) // 10)
        first, last = (statistics.median(self.seconds[part]) for part in (slice(tenth, 2 * tenth), slice(-tenth, None)))
        then, now = (statistics.median(self.beside[part]) for part in (slice(tenth, 2 * tenth), slice(-tenth, None)))
        settled = [(k, b) for k, b in zip(self.at, self.bytes, strict=True) if k >= 2 * tenth]
        slope = statistics.linear_regression([k for k, _ in settled], [b for _, b in settled]).slope
        return {
            "count": len(self.seconds),
            "first_seconds": round(first, 5),
            "last_seconds": round(last, 5),
            "slowdown": round(last / first / (now / then), 3),
            "machine_slowdown": round(now / then, 3),
            "bytes_per_piece": round(slope, 1),
            "first_bytes": settled[0][1],
            "last_bytes": settled[-1][1],
            "at": list(self.at),
            "bytes": list(self.bytes),
        }


def course(
    work: Callable[[int], None], count: int, every: int, progress: Callable[[int], None] = lambda _: None
) -> Course:
    """Do it `count` times."""
    seconds, beside, at, sizes = [], [], [], []
    for k in range(count):
        begun = time.process_time()
        work(k)
        seconds.append(time.process_time() - begun)
        beside.append(yardstick())
        if (k + 1) % every == 0:
            at.append(k + 1)
            sizes.append(resident())
            progress(k + 1)
    return Course(seconds, beside, at, sizes)


def left(bound: Bound) -> dict[str, Any]:
    """What must be the same before and after."""
    return {
        "hooks": hooks(bound.model),
        "parameters": identity(bound.model),
        "bits": tiny.bits(bound.model),
        "files": files(),
        "threads": threading.active_count(),
        "tensors": tensors(),
    }
