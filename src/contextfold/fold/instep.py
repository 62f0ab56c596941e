"""Forwards in step: the run without the context is solved block by block, and those it looks at are one block ahead.

What a block gave with the context is there when it is needed and gone when the block is solved; edited weights are
stored for as long as the block runs. So of all that grows with the number of blocks, only the patch does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contextfold.anatomy import Block, Bound
from contextfold.fold.kept import SolvedLayer
from contextfold.fold.rows import RowsFold, Targets
from contextfold.fold.rowsites import PatchSites, rows_fold
from contextfold.pausing import Pausable
from contextfold.runtime import Action, Run, Written, before, recording, run

__all__ = ["Job", "solve_in_step"]


@dataclass(frozen=True, eq=False)
class Job:
    """What is to be solved, and how."""

    bound: Bound
    full: Run
    reduced: Run
    typical: Run | None
    """What the whitened form should disturb least; None for the plain form."""
    rows: Tensor
    """The chosen rows of the reduced run, counted from its end."""
    full_rows: Sequence[int]
    """The same tokens in the full run, counted from its end."""
    last: int
    """Number of positions whose in-context logits are wanted."""
    letters: str
    """What the sites need to know of the run with the context."""
    sites: PatchSites
    strict: bool
    written: bool


@torch.no_grad()
def solve_in_step(
    job: Job, known: Mapping[int, SolvedLayer], free: bool, solved: Callable[[SolvedLayer], None]
) -> tuple[list[SolvedLayer], Tensor]:
    """All blocks, and in-context logits `(last, V)`. Those `known` by their index are not solved again.

    `free`: that the lengths of the last block's finished sums may be used. `solved` hears of each new one.
    """
    model = job.bound.model
    full = Pausable(partial(run, model, job.full, job.last))
    typical = None if job.typical is None else Pausable(partial(run, model, job.typical, last=0))
    course = _Course(job, known, free, solved, full, typical)
    with ExitStack() as stack:
        for ahead in (full, typical):
            if ahead is not None:
                stack.callback(ahead.close)
        stack.callback(course.close)
        if len(known) < len(job.bound.blocks):
            course.enter(0)
            run(model, job.reduced, last=0)
        else:
            course.found += [known[block.index] for block in job.bound.blocks]
        return course.found, full.result()


class _Course:
    """The reduced run, from block to block. Hooks of a block exist only while the reduced run is in it."""

    def __init__(
        self, job: Job, known: Mapping[int, SolvedLayer], free: bool, solved: Callable[[SolvedLayer], None],
        full: Pausable[Tensor], typical: Pausable[Tensor] | None,
    ) -> None:  # fmt: skip
        self._job, self._known, self._free, self._solved = job, known, free, solved
        self._full, self._typical = full, typical
        self._here = ExitStack()
        self.found: list[SolvedLayer] = []

    def close(self) -> None:
        self._here.close()

    def enter(self, k: int) -> None:
        """The reduced run is about to enter the k-th block."""
        block = self._job.bound.blocks[k]
        known = self._known.get(block.index)
        finish = self._solving(block) if known is None else self._knowing(block, known)

        def leave(*_: Any) -> None:
            self._here.close()
            self.found.append(finish())
            if known is None:
                self._solved(self.found[-1])
            if k + 1 < len(self._job.bound.blocks):
                self.enter(k + 1)

        # The last of its hooks, so that it comes after those that listen to what the layer gives.
        self._here.callback(block.layer.register_forward_hook(leave).remove)

    def _solving(self, block: Block) -> Callable[[], SolvedLayer]:
        job = self._job
        with recording([block], job.full_rows, job.letters) as (wanted,):
            _pass(self._full, block)
        free = self._free and block is job.bound.blocks[-1]
        fold = rows_fold(job.bound, block, job.sites, Targets(wanted, job.rows, job.strict, free))
        self._look_at_typical(block, fold)
        overlay = (Written if job.written else Action)(job.bound.model, fold.sites)
        fold.listen(self._here, overlay)
        self._here.enter_context(overlay)
        return lambda: SolvedLayer(overlay.edits, fold.plan, fold.report())

    def _look_at_typical(self, block: Block, fold: RowsFold) -> None:
        """Let the solver see what its maps read on typical text."""
        if self._typical is None:
            return
        with ExitStack() as stack:
            for letter, module in fold.readers.items():
                stack.callback(before(module, partial(fold.see_usual, letter)).remove)
            _pass(self._typical, block)

    def _knowing(self, block: Block, known: SolvedLayer) -> Callable[[], SolvedLayer]:
        """The runs ahead go by first, since edits may be written where they read."""
        for ahead in (self._full, self._typical):
            if ahead is not None:
                _pass(ahead, block)
        overlay = (Written if self._job.written else Action)(self._job.bound.model, known.edits)
        self._here.enter_context(overlay)
        for site, edit in known.edits.items():
            overlay.put(site, edit)
        return lambda: known


def _pass(ahead: Pausable[Any], block: Block) -> None:
    """Let `ahead` run until the block's sum is finished."""
    handle = block.total.listen(lambda _: ahead.pause())
    try:
        stopped = ahead.go_on()
    finally:
        handle.remove()
    assert stopped, "the model runs its blocks in the order in which they were read"
