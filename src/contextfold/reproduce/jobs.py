"""Several processes of one thread each: parts do not depend on each other, and each process holds the model once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from contextfold.errors import ContextfoldError, InputError
from contextfold.files import Kept
from contextfold.reproduce.engine import Bench, Paper, Part, finished

__all__ = ["together"]

_benches: dict[str, Bench] = {}
"""Of a worker: its model stays from one part to the next."""


def together(
    paper: Paper, parts: Sequence[Part], model: str, folder: Path, *, quick: bool, jobs: int,
    progress: Callable[[str, int, int], None],
) -> set[str]:  # fmt: skip
    """Put all `parts` into `folder`, `jobs` at a time; names those that were not there before.

    `model` is loaded by name in every process. `progress` is told when a part is done. Raises `InputError` with what a
    part met; parts that were finished by then are kept.
    """
    total, done, made = sum(part.units for part in parts), 0, set()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start) as pool:
        running = {
            pool.submit(_work, paper.number, part.name, model, str(folder), quick): part for part in parts
        }  # fmt: skip
        progress(f"{jobs} processes", 0, total)
        try:
            for future in as_completed(running):
                part, kept = running[future], future.result()
                if isinstance(kept, str):
                    raise InputError(f"{part.name}: {kept}")
                if not kept:
                    made.add(part.name)
                done += part.units
                progress(f"{jobs} processes", done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return made


def _start() -> None:
    torch.set_num_threads(1)


def _work(number: str, name: str, model: str, folder: str, quick: bool) -> bool | str:
    """In a worker: one part. Says whether it was kept already, or in words why it cannot be done.

    Words, because an error that carries data does not come whole through a pipe.
    """
    from contextfold.models import load
    from contextfold.reproduce import paper_named

    paper = paper_named(number)
    bench = _benches.setdefault(model, Bench(model, lambda dtype: load(model, dtype=dtype)))
    (part,) = (each for each in paper.parts(quick) if each.name == name)
    try:
        return finished(paper, part, bench, Kept(Path(folder)), lambda: None)[1]
    except ContextfoldError as error:
        return str(error)
