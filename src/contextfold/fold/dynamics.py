"""The vanilla theorem and the dynamics of a growing context, on tensors (equation sheet, section 8).

A contextual block is `f(W a + b)`, a what a contextual layer gives at x: with the context a_C. [L] theorem 2.3 turns
the context into an update of W. Token by token, the updates form a sequence that reads as gradient descent: each step
is along the gradient of a function that is linear in W and redefined at every step, so there is no fixed objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from contextfold.lowrank import LowRank
from contextfold.outcomes import Finding, Outcome
from contextfold.rules import InputBias, InputWeight
from contextfold.rules.base import finite, refuse_if

__all__ = [
    "Course",
    "alignment",
    "effective_rank",
    "growing",
    "implicit_bias",
    "implicit_update",
    "numerical_rank",
    "removing",
    "skip_bias",
]


def implicit_update(W: Tensor, a: Tensor, a_C: Tensor) -> LowRank:
    """`dW = W (a_C - a) aᵀ / ‖a‖²`, so that `(W + dW) a = W a_C`: the whole of a block without a skip. [L] theorem 2.3

    `W (f, d)`, `a, a_C (d,)`. Exact for a != 0; the only minimiser of the Frobenius norm. Raises `NotControllable`.
    """
    return InputWeight().solve("contextual block", a[None], a_C[None]).delta(W)


def implicit_bias(W: Tensor, a: Tensor, a_C: Tensor) -> Tensor:
    """`db = W (a_C - a)`, `(f,)`: the same by the bias inside f, for any a. [ours]"""
    return InputBias().solve("contextual block", W, a[None], a_C[None]).delta


def skip_bias(a: Tensor, a_C: Tensor) -> Tensor:
    """`db' = a_C - a`, `(d,)`: what the last bias of `a + W' g(W a + b) + b'` needs besides `implicit_update`.

    [L] theorem B.2; in [I], per position, a is the stream behind attention and W reads its norm. It has the form of a
    steering vector. No condition.
    """
    return (a_C - a).double()


@dataclass(frozen=True, eq=False)
class Course:
    """The implicit updates of one map `W_0 (f, d)` while k context tokens come or go one by one; all float64.

    `W_(i+1) = W_i - eta_i gradient_i`: W_i does to the state that it reads what W_0 did to the one it stands for.
    """

    direction: Literal["growing", "removing"]
    steps: tuple[LowRank, ...]
    """`W_(i+1) - W_i`, rank one each."""
    eta: Tensor
    """Step sizes `(k,)`: one over the squared norm of the state that the step reads."""
    gradient_norm: Tensor
    """`‖gradient_i‖_F (k,)`."""
    loss: Tensor
    """`L_i(W_i) = tr(gradient_iᵀ W_i)`, `(k,)`: linear in W and another function at each step, hence only loss-like."""
    step_norm: Tensor
    """`‖W_(i+1) - W_i‖_F (k,)`."""
    total_norm: Tensor
    """`‖W_i - W_0‖_F (k + 1,)`."""
    effective_ranks: Tensor
    """Effective rank of `W_i - W_0`, `(k + 1,)`."""

    @property
    def total(self) -> LowRank:
        """`W_k - W_0`, rank one when growing, up to k when removing."""
        whole = self.steps[0]
        for step in self.steps[1:]:
            whole = whole + step
        return whole

    @property
    def alignments(self) -> Tensor:
        """Cosine between any two steps, `(k, k)`."""
        return alignment(self.steps)


def growing(W: Tensor, states: Tensor) -> Course:
    """Context tokens are added behind each other: `states (k + 1, d)`, a_i with the first i of them.

    `eta = 1 / ‖a_0‖²`, `gradient_i = W_0 (a_i - a_(i+1)) a_0ᵀ`; then `W_i a_0 = W_0 a_i` for every i, and the total has
    rank one. [L], first version. Raises `NotControllable` when a_0 is zero.
    """
    a = _states(states)
    heads = W.double() @ (a[:-1] - a[1:]).T
    return _course("growing", W.double(), heads.T, a[:1].expand(len(a) - 1, -1))


def removing(W: Tensor, states: Tensor) -> Course:
    """Context tokens are removed from the left: `states (k + 1, d)`, a_0 with all of them, a_k with none.

    `W_k = W_0 Π_i (I + eta_i A_i)`, `A_i = (a_i - a_(i+1)) a_(i+1)ᵀ`, `eta_i = 1 / ‖a_(i+1)‖²`; then `W_i a_i` is
    `W_0 a_0` for every i, and the total has rank up to k. [L], third version. Raises `NotControllable` when a state is
    zero.
    """
    a, W0 = _states(states), W.double()
    heads: list[Tensor] = []
    for i in range(len(a) - 1):
        change = a[i + 1] - a[i]
        # W_i = W_0 - Σ_j eta_j head_j a_(j+1)ᵀ is never formed.
        head = W0 @ change
        for j, earlier in enumerate(heads):
            head = head - earlier * float(a[j + 1] @ change) / float(a[j + 1] @ a[j + 1])
        heads.append(head)
    return _course("removing", W0, torch.stack(heads), a[1:])


def _states(states: Tensor) -> Tensor:
    finite("states", a=states)
    if states.dim() != 2 or states.shape[0] < 2:
        raise ValueError(f"expected at least two states (k + 1, d), met {tuple(states.shape)}")
    return states.double()


def _course(direction: Literal["growing", "removing"], W: Tensor, heads: Tensor, reads: Tensor) -> Course:
    """Gradients are `heads_i reads_iᵀ`, `heads (k, f)`, `reads (k, d)`."""
    squares = reads.square().sum(1)
    dead = int((squares == 0).sum())
    refuse_if(dead > 0, Finding(Outcome.ZERO_SOURCE, "states", "states that are zero", dead, 0))
    eta = 1 / squares
    steps = tuple(LowRank(-e * head[:, None], read[None]) for e, head, read in zip(eta, heads, reads, strict=True))
    totals = [LowRank(W.new_zeros(W.shape[0], 0), W.new_zeros(0, W.shape[1]))]
    loss = []
    for head, read, step in zip(heads, reads, steps, strict=True):
        # tr((head readᵀ)ᵀ W_i) = headᵀ W_i read
        loss.append(head @ (W @ read + totals[-1](read[None])[0]))
        totals.append((totals[-1] + step).recompress() if direction == "growing" else totals[-1] + step)
    gradient = heads.norm(dim=1) * squares.sqrt()
    return Course(
        direction=direction,
        steps=steps,
        eta=eta,
        gradient_norm=gradient,
        loss=torch.stack(loss),
        step_norm=eta * gradient,
        total_norm=torch.tensor([total.norm() for total in totals], dtype=torch.float64),
        effective_ranks=torch.tensor([effective_rank(total) for total in totals], dtype=torch.float64),
    )


def alignment(updates: Sequence[LowRank]) -> Tensor:
    """Normalised Frobenius inner products `(k, k)`, from the factors; 0 where an update is zero. [I]

    `⟨B A, B' A'⟩ = tr(Bᵀ B' A' Aᵀ)`. All updates must have the same shape.
    """
    if len({update.shape for update in updates}) > 1:
        raise ValueError("only updates of one shape can be compared")
    inner = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for i, first in enumerate(updates):
        for j, second in enumerate(updates[: i + 1]):
            value = float(((first.B.double().T @ second.B.double()) * (first.A.double() @ second.A.double().T)).sum())
            inner[i, j] = inner[j, i] = value
    size = inner.diagonal().clamp_min(0).sqrt()
    scale = torch.outer(size, size)
    # Where an update is zero so is the inner product.
    return inner / torch.where(scale > 0, scale, torch.ones_like(scale))


def effective_rank(update: LowRank) -> float:
    """`exp` of the entropy of the singular values taken as a distribution: 1 for one direction, r for r equal ones.

    Roy and Vetterli (2007); 0 for the zero update. It is what [I] asks of a sum of updates, without a threshold.
    """
    sigma = _singular(update)
    total = sigma.sum()
    if float(total) == 0:
        return 0.0
    p = sigma[sigma > 0] / total
    return float(torch.exp(-(p * p.log()).sum()))


RANK_TOLERANCE = 1e-8
"""A singular value below this fraction of the largest does not count towards the numerical rank."""


def numerical_rank(update: LowRank) -> int:
    """How many singular values count. [I] reports it of the sum over positions."""
    sigma = _singular(update)
    return int((sigma > RANK_TOLERANCE * sigma.max()).sum()) if sigma.numel() and float(sigma.max()) > 0 else 0


def _singular(update: LowRank) -> Tensor:
    return LowRank(update.B.double(), update.A.double()).svd()[1]
