"""The door: generate token by token, folding at every step and proving every so often."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound, bind
from contextfold.errors import InputError, NotControllable, UnsupportedModel
from contextfold.fold import DEFAULT_RULE, reference
from contextfold.outcomes import Finding, Outcome
from contextfold.runtime import takes_positions
from contextfold.stepwise.cache import KeptCache, check_cache, empty_cache, stacked
from contextfold.stepwise.pair import Pair, Pairing, forward
from contextfold.stepwise.proof import Proof, Rules, prove
from contextfold.stepwise.token import Token
from contextfold.stepwise.window import PAPER, Batch, Window, batch
from contextfold.verify.verdict import EXACT

__all__ = ["History", "generate"]

ODD = {
    "openai-gpt": "has no cache and computes everything anew for every token",
    "gpt_neox_japanese": "reshapes its keys in place, which one cache for two rows does not allow",
}
"""Model types that two rows over one cache do not serve, for reasons of their own."""

ROWS = 10.0
"""A batch of two may round otherwise than a batch of one: by this many times what counts as exact."""

History = Literal["free", "forced"]
"""Whether the patched model's choice goes on, or the in-context model's, as in the paper."""


def generate(
    model: Bound | nn.Module,
    prompts: Tensor | Sequence[Tensor],
    window: Window | Sequence[Window] = PAPER,
    *,
    tokens: int = 20,
    history: History = "free",
    prove_every: int = 40,
    rule: str = DEFAULT_RULE,
    fallback: str | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[Token]:
    """Yield tokens as they come, sequence by sequence within a step.

    At every step the tokens that the window lacks are folded into the weights for the current token, and the patched
    model, seeing the window alone, chooses the next. One forward serves the in-context model and the patched one
    (`stepwise.pair`); the first step and every `prove_every`-th after it are proven on written weights and the
    unmodified model (`stepwise.proof`), which then also chooses. Kept tokens have the keys and values that they had
    when they were current, under the patch of that step.

    Arguments:
        model: a bound model, or a transformers model, which is then bound and proven first.
        prompts: token ids `(n,)`, or several such; those are padded on the left and run together.
        window: what the patched model sees besides the current token, for all prompts or for each.
        tokens: how many to generate.
        history: `free` or `forced`.
        prove_every: 1 proves every token, 0 only the first.
        rule: member of the post-norm class, as for `fold_token`.
        fallback: the same where `rule` is undefined; None refuses.
        temperature: 0 is greedy. Both models are sampled with the same noise.
        seed: of the noise; the k-th sequence draws what it would draw alone with `seed + k`.
        stop: token ids that end a sequence.

    Interrupting, or not exhausting, the iterator leaves the model as it was: between steps no hook is set and no
    weight is changed.

    Raises `InputError`, `UnsupportedModel` (by name, where the cache is no plain key-value cache), and
    `NotControllable` where no exact patch exists.
    """
    bound = model if isinstance(model, Bound) else bind(model)
    items = [prompts] if isinstance(prompts, Tensor) else list(prompts)
    windows = [window] * len(items) if isinstance(window, Window) else list(window)
    if history not in ("free", "forced"):
        raise InputError(f"history {history!r} is unknown; choose 'free' or 'forced'")
    if prove_every < 0 or not temperature >= 0:
        raise InputError("prove_every and temperature must not be negative")
    _check_model(bound)
    rules = (reference(rule), None if fallback is None else reference(fallback))
    laid = batch(bound, items, windows, tokens)
    chooser = _Chooser(temperature, [torch.Generator().manual_seed(seed + row) for row in range(len(items))])
    steps = _Steps(bound, laid, rules, chooser, history == "forced", prove_every, frozenset(stop))
    return steps.run(tokens)


def _check_model(bound: Bound) -> None:
    if not takes_positions(bound.model):
        raise UnsupportedModel(
            f"{bound.model_type!r} models count their tokens themselves, so kept tokens cannot keep their positions; "
            "fold each token with fold_token instead"
        )
    if bound.model_type in ODD:
        raise UnsupportedModel(f"{bound.model_type!r} {ODD[bound.model_type]}; fold each token with fold_token instead")
    check_cache(empty_cache(bound.model))
    config: Any = bound.model.config
    if "chunked_attention" in (vars(config.get_text_config(decoder=True)).get("layer_types") or ()):
        raise UnsupportedModel(
            f"{bound.model_type!r} attends in chunks, whose borders would move when only the kept tokens are there; "
            "fold each token with fold_token instead"
        )


@dataclass(frozen=True)
class _Chooser:
    """The next token from logits `(V,)`: the first of them plus Gumbel noise, which is a sample of their softmax."""

    temperature: float
    generators: Sequence[torch.Generator]

    def noise(self, row: int, like: Tensor) -> Tensor | None:
        """Drawn once per step and sequence, for both models."""
        if self.temperature == 0:
            return None
        uniform = torch.rand(like.shape, generator=self.generators[row], dtype=torch.float64)
        return -torch.log(-torch.log(uniform)).to(like.device)

    def __call__(self, logits: Tensor, noise: Tensor | None) -> int:
        return int(logits.argmax() if noise is None else (logits.double() / self.temperature + noise).argmax())


@dataclass(eq=False)
class _Steps:
    """The loop."""

    bound: Bound
    batch: Batch
    rules: Rules
    chooser: _Chooser
    forced: bool
    prove_every: int
    stop: frozenset[int]

    def run(self, tokens: int) -> Iterator[Token]:
        cache = _prefilled(self.bound.model, self.batch)
        pairing = Pairing(self.bound, self.batch.rows)
        alive = set(range(self.batch.rows))
        for index in range(tokens):
            due = index == 0 or (self.prove_every > 0 and index % self.prove_every == 0)
            kept = self._kept(cache, alive) if due else {}
            plain = self._plain(cache) if index == 0 else None
            step = pairing(self.batch, cache, due)
            if plain is not None:
                _check_first_row(self.bound, plain, step.in_context)
            chosen = torch.zeros(self.batch.rows, dtype=torch.int64)
            for row in sorted(alive):
                token = self._token(row, index, step, kept.get(row))
                chosen[row] = token.chosen
                if token.chosen in self.stop:
                    alive.discard(row)
                yield token
            if not alive:
                return
            self.batch.append(chosen)

    def _kept(self, cache: Any, alive: Collection[int]) -> dict[int, KeptCache]:
        """Before the step, since a sliding window forgets a column in it."""
        seen = self.batch.ids.shape[1] - 1
        return {row: KeptCache.of(self.bound.model, cache, row, self.batch.columns(row), seen) for row in alive}

    def _plain(self, cache: Any) -> Tensor:
        """Logits `(B, V)` by plain decoding, on a copy of the cache."""
        last = (self.batch.ids[:, -1:], self.batch.real, self.batch.positions[:, -1:])
        logits: Tensor = forward(self.bound.model, *last, copy.deepcopy(cache)).logits[:, -1]
        return logits

    def _token(self, row: int, index: int, step: Pair, kept: KeptCache | None) -> Token:
        wanted, acting = step.in_context[row], step.patched[row]
        gap = float((wanted - acting).abs().max())
        if not gap < float("inf"):
            where = f"step {index}"
            raise NotControllable([Finding(Outcome.NOT_FINITE, where, "logit gap", gap, float("inf"))])
        proof: Proof | None = None
        if kept is not None:
            proof, acting = prove(self.bound, self.batch, row, kept, step.wanted[row], wanted, self.rules)
        noise = self.chooser.noise(row, wanted)
        first, second = self.chooser(wanted, noise), self.chooser(acting, noise)
        return Token(
            sequence=row,
            index=index,
            position=int(self.batch.real[row].sum()) - 1,
            in_context=first,
            patched=second,
            chosen=first if self.forced else second,
            logit_gap=gap,
            margin=0.0 if first == second else _margin(wanted, noise, self.chooser.temperature, first, second),
            proof=proof,
        )


def _margin(logits: Tensor, noise: Tensor | None, temperature: float, first: int, second: int) -> float:
    """In logits; under sampling the noise counts, since it helped to choose."""
    scores = logits.double() if noise is None else logits.double() + temperature * noise
    return float(scores[first] - scores[second])


@torch.no_grad()
def _prefilled(model: nn.Module, batch: Batch) -> Any:
    """The cache of every column but the last."""
    width = batch.ids.shape[1] - 1
    if width == 0:
        return empty_cache(model)
    caches = [_sequence(model, batch.ids[row, :-1][batch.real[row, :-1]]) for row in range(batch.rows)]
    return caches[0] if len(caches) == 1 else stacked(model, caches, width)


def _sequence(model: nn.Module, ids: Tensor) -> Any:
    """The cache of one sequence `(n,)`; None when it is empty."""
    if ids.numel() == 0:
        return None
    positions = torch.arange(ids.numel())[None]
    cache = forward(model, ids[None], torch.ones(1, ids.numel()), positions, None, last=0).cache
    check_cache(cache)
    return cache


def _check_first_row(bound: Bound, plain: Tensor, first: Tensor) -> None:
    """The first row must be the model itself: the sharing of the cache and the mask are proven, not assumed."""
    gap = float((plain - first).abs().max())
    limit = ROWS * EXACT[bound.dtype] * float(plain.abs().max())
    if not gap <= limit:
        raise UnsupportedModel(
            f"{bound.model_type!r}: in a batch of two over one cache the model with its whole context gives other "
            f"logits than alone (gap {gap:.3g}, limit {limit:.3g}); fold each token with fold_token instead"
        )
