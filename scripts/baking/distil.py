"""Gradient context distillation: low-rank factors beside the same maps, trained towards the in-context logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench import clock
from torch import Tensor, nn
from torch.nn.functional import linear

from baking.ways import Learnt, Way
from contextfold.anatomy import Bound, DenseBlock, first_tensor
from contextfold.bake import Example, Frame, padded
from contextfold.verify.reusable import answer_logits

RATES = (1e-3, 3e-3, 1e-2)
"""Learning rates that are tried; the trial's time is not counted."""
TRIAL = 8
"""Steps of a trial."""
BATCH = 4


@dataclass(frozen=True)
class Distillation(Way):
    """LoRA on the output maps of attention and MLP, AdamW, `KL(in-context ‖ this)` per answer token.

    The in-context logits are computed before the clock starts. The rate falls to zero along a cosine over `budget`
    seconds; of a few rates the one with the least loss after a short trial is taken. `watch` is called after every
    epoch and returns the KL on the held-out questions; its time is not counted.
    """

    budget: float = 60.0
    rank: int = 32
    watch: Callable[[], float] = lambda: math.nan

    def learn(self, bound: Bound, frame: Frame, examples: Sequence[Example]) -> Learnt:
        moving = [e for e in examples if e.moves]
        wanted = [torch.log_softmax(answer_logits(bound.model, frame.full, e), -1) for e in moving]
        rate = min(RATES, key=lambda rate: self._trial(bound, frame, moving, wanted, rate))
        factors = Factors(bound, self.rank)
        curve: list[tuple[float, float]] = []
        losses, spent = [], 0.0
        with factors.acting():
            optimiser = torch.optim.AdamW(factors.parameters(), lr=rate, weight_decay=0.0)
            for chosen in _batches(len(moving)):
                started = clock()
                optimiser.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * min(spent / self.budget, 1.0))) / 2
                losses.append(_step(bound, frame, moving, wanted, chosen, optimiser))
                spent += clock() - started
                last = spent >= self.budget
                if last or len(losses) % math.ceil(len(moving) / BATCH) == 0:
                    curve.append((round(spent, 2), self.watch()))
                if last:
                    break
        remarks = {
            "curve": curve, "seconds_solve": spent, "rate": rate, "rank": self.rank, "steps": len(losses),
            "epochs": len(losses) * BATCH / len(moving), "loss": sum(losses[-8:]) / len(losses[-8:]),
        }  # fmt: skip
        return Learnt(factors.acting, remarks)

    def _trial(
        self, bound: Bound, frame: Frame, examples: Sequence[Example], wanted: Sequence[Tensor], rate: float
    ) -> float:
        """Loss of the last steps of a short run at a constant rate."""
        factors = Factors(bound, self.rank)
        with factors.acting():
            optimiser = torch.optim.AdamW(factors.parameters(), lr=rate, weight_decay=0.0)
            steps = zip(range(TRIAL), _batches(len(examples)), strict=False)
            losses = [_step(bound, frame, examples, wanted, chosen, optimiser) for _, chosen in steps]
        return sum(losses[-4:]) if math.isfinite(losses[-1]) else math.inf


def _batches(count: int) -> Iterator[list[int]]:
    """Batches without end, every example once per epoch."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        yield from (order[start : start + BATCH] for start in range(0, count, BATCH))


def _step(
    bound: Bound, frame: Frame, examples: Sequence[Example], wanted: Sequence[Tensor], chosen: Sequence[int],
    optimiser: torch.optim.Optimizer,
) -> float:  # fmt: skip
    """One step on a batch; mean KL in nats per answer token before it."""
    part = [examples[i] for i in chosen]
    k = frame.kept.numel()
    ids, real = padded([torch.cat([frame.kept, e.tail]) for e in part])
    first = min(k + e.answer for e in part) - 1
    with torch.enable_grad():
        logits = bound.model(
            input_ids=ids, attention_mask=real.long(), position_ids=torch.arange(ids.shape[1])[None],
            use_cache=False, logits_to_keep=torch.arange(first, ids.shape[1]),
        ).logits  # fmt: skip
        kl = []
        for row, (e, i) in enumerate(zip(part, chosen, strict=True)):
            start = k + e.answer - 1 - first
            q = torch.log_softmax(logits[row, start : start + e.tail.numel() - e.answer], -1)
            kl.append((wanted[i].exp() * (wanted[i] - q)).sum(-1).mean())
        loss = torch.stack(kl).mean()
        optimiser.zero_grad()
        loss.backward()
    optimiser.step()
    return float(loss)


class Factors:
    """`B A` beside the output maps of attention and MLP of every layer; B starts at zero, A at random."""

    def __init__(self, bound: Bound, rank: int) -> None:
        self._maps: list[tuple[nn.Module, Tensor, Tensor]] = []
        generator = torch.Generator().manual_seed(0)
        for block in bound.blocks:
            assert isinstance(block, DenseBlock)
            for at in (block.attention_output, block.output_map):
                if at is None:
                    continue
                out, inner = at.weight.shape
                A = torch.randn(rank, inner, generator=generator) / math.sqrt(inner)
                self._maps.append((at.module, torch.zeros(out, rank).requires_grad_(), A.requires_grad_()))

    def parameters(self) -> list[Tensor]:
        return [factor for _, B, A in self._maps for factor in (B, A)]

    @contextmanager
    def acting(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, B, A in self._maps:
                stack.callback(module.register_forward_hook(partial(_beside, B, A), with_kwargs=True).remove)
            yield


def _beside(
    B: Tensor, A: Tensor, _m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    x = first_tensor(args, kwargs)
    return output + linear(linear(x.to(A.dtype), A), B).to(output.dtype)
