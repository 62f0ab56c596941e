"""A context becomes a patch that answers new questions as if the context were there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound, bind
from contextfold.bake.estimators import ESTIMATORS, estimator
from contextfold.bake.examples import Example, Frame, digest_of
from contextfold.bake.joint import Joint, joints_of
from contextfold.bake.kept import BakedSite, Shelf
from contextfold.bake.solve import pairs_of, solve
from contextfold.errors import InputError, UnsupportedModel
from contextfold.header import receipt
from contextfold.notebook import card, short
from contextfold.patch import Edit, Patch, Site
from contextfold.store import Store, key_of

__all__ = ["EMPHASIS", "LAM0", "TOL", "Baked", "bake", "places"]

LAM0 = 1e-2
"""Penalty of the ridge, relative."""

TOL = 1e-3
"""Share of what is explained that may go for a lower rank."""

EMPHASIS = 4.0
"""What an error counts where an answer is said, in units of one where a question is read; see docs/bake.md."""

MOST = 1e6


@dataclass(frozen=True, eq=False)
class Baked:
    """A reusable patch, and how each place was solved."""

    patch: Patch
    sites: tuple[BakedSite, ...]
    tokens: int
    """Tokens of the examples that it was learnt from."""

    def _repr_html_(self) -> str:
        """The places, for a notebook."""
        rows = [
            (str(s.layer), s.role, str(s.rank), f"{s.explained:.0%}", short(s.weight_ratio)) for s in self.sites
        ]  # fmt: skip
        sentence = f"Learnt from {self.tokens} tokens; questions held out say what it is worth."
        return card(repr(self.patch), sentence, ("layer", "place", "rank", "explained", "‖dW‖/‖W‖"), rows)


def bake(
    model: Bound | nn.Module,
    frame: Frame,
    examples: Sequence[Example],
    *,
    method: str = ESTIMATORS[0].name,
    lam0: float | None = LAM0,
    tol: float = TOL,
    emphasis: float = EMPHASIS,
    batch: int = 16,
    store: Path | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Baked:
    """One patch under which a question alone is answered as if `frame.context` stood before it.

    The examples run twice, with the context and without it, in step: at every place the two are compared, a ridge
    makes up for the difference, and both go on, the second with the edit. So every edit is solved from what the
    edits below it leave. Nothing is trained; the model is not changed.

    Arguments:
        model: a bound model, or a transformers model, which is then bound and proven first.
        frame: what stands before every question, kept tokens and context.
        examples: questions with answers, as `answered` gives them; anchors keep the patch from acting elsewhere.
        method: name of an estimator of `ESTIMATORS`.
        lam0: penalty of the ridge relative to the mean eigenvalue; None lets questions that are left out decide.
        tol: share of what is explained that may be given up for a lower rank.
        emphasis: how much more the square of what is missed counts where a token of an answer is to be said than where
            the question is read.
        batch: examples that run together; memory grows with it.
        store: a folder in which solved places are kept, so that a bake that was stopped goes on where it was, with the
            same bits, and does not hold the whole patch while it works. They stay there until
            `contextfold.store.clear(folder)`, for when the patch is safe; those of another bake are not used.
        progress: told how many places of how many are solved.

    Raises `InputError`, `UnsupportedModel` where the model has none of the places, and `NotControllable`.
    """
    bound = model if isinstance(model, Bound) else bind(model)
    chosen = estimator(method)
    _check(bound, frame, examples, lam0, tol, emphasis)
    joints = [joint for block in bound.blocks for joint in joints_of(bound.model, block, chosen.roles)]
    if not joints:
        raise UnsupportedModel(f"{bound.model_type} has none of {', '.join(chosen.roles)}; choose another estimator")
    shelf = None
    if store is not None:
        key = key_of(bound, "bake", digest_of(frame, examples), chosen, lam0, tol, emphasis, batch)
        shelf = Shelf(Store(store, key), bound.device)
    sites = () if shelf is None else shelf.take_all(joints)
    if not sites:
        pairs = pairs_of(bound.model, frame, examples, batch, emphasis)
        sites = solve(joints, pairs, lam0, tol, shelf, progress)
        if shelf is not None and not shelf.take_all(joints):
            # Another process, which was asked the same, is done and cleared the folder.
            sites = solve(joints, pairs, lam0, tol, None, progress)
    patch = _patch(bound, frame, joints, chosen.roles)
    return Baked(patch, sites, sum(e.tail.numel() for e in examples))


def places(bound: Bound, method: str) -> int:
    """How many places of the model an estimator solves."""
    roles = estimator(method).roles
    return sum(len(joints_of(bound.model, block, roles)) for block in bound.blocks)


def _check(
    bound: Bound, frame: Frame, examples: Sequence[Example], lam0: float | None, tol: float, emphasis: float
) -> None:
    if not any(example.moves for example in examples):
        raise InputError("there is no example on which the context acts; give at least one question")
    for name, ids in (("kept", frame.kept), ("context", frame.context), *(("example", e.tail) for e in examples)):
        if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype != torch.int64 or ids.numel() == 0:
            raise InputError(f"{name} tokens must be a 1-D int64 tensor of at least one token id")
        if int(ids.min()) < 0 or int(ids.max()) >= bound.vocabulary:
            raise InputError(f"{name} has token ids outside 0..{bound.vocabulary - 1}; was another tokenizer used?")
    if lam0 is not None and not lam0 > 0:
        raise InputError(f"the penalty lam0 is {lam0}; it must be positive, or None to let left-out questions decide")
    if not 0 < emphasis <= MOST:
        raise InputError(f"emphasis is {emphasis}; it must be positive, {MOST:g} at most, and 1 for none")
    if not 0 <= tol < 1:
        raise InputError(f"tol is {tol}; it must lie in [0, 1)")


def _patch(bound: Bound, frame: Frame, joints: Sequence[Joint], roles: tuple[str, ...]) -> Patch:
    edits: dict[Site, Edit] = {}
    for joint in joints:
        edits |= joint.edits()
    context = hashlib.sha256(frame.full.contiguous().numpy().tobytes()).hexdigest()
    plan = tuple(f"ridge on the {role}" for role in roles)
    header = receipt(bound, "bake", plan, materialised=False, context_digest=context)
    return Patch(header, edits)
