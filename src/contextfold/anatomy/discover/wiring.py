"""How a branch joins the stream, found by moving the branch and watching what answers in proportion."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from contextfold.anatomy.block import first_output
from contextfold.anatomy.discover.tape import LayerCall, Passing, Tape
from contextfold.anatomy.discover.values import by_token, factor_between, same
from contextfold.anatomy.record import Factor, Tap, Wiring, given_by, read_by
from contextfold.errors import UnsupportedModel

__all__ = ["find_wiring"]

MOVE = 1e-2
"""Size of a trial movement, relative to the branch."""


@dataclass(frozen=True)
class _Finder:
    call: LayerCall
    tape: Tape
    limit: float

    def rows(self, value: Tensor) -> Tensor | None:
        return by_token(value, self.call.tokens)

    def answers(self, module: str, seed: int) -> tuple[Tensor, Tape]:
        """Move what `module` gives at every token, and play."""
        owner = self.call.layer.get_submodule(module)
        moved: list[Tensor] = []

        def hook(_module: nn.Module, _args: object, output: object) -> object:
            value = first_output(output)
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
            noise = noise * MOVE * value.double().square().mean().sqrt().to(value)
            moved.append(noise)
            value.add_(noise)
            return output

        handle = owner.register_forward_hook(hook)
        try:
            tape = self.call.play()
        finally:
            handle.remove()
        return moved[0], tape

    def named(self, factor: Tensor) -> Factor:
        """The attribute of the layer that holds a measured multiplier, or the number itself."""
        if factor.dim() == 0 and abs(float(factor) - 1) <= self.limit:
            return 1.0
        layer = self.call.layer
        held = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
        held |= {name: torch.tensor(v) for name, v in vars(layer).items() if type(v) is float}
        for name, value in held.items():
            if isinstance(value, Tensor) and same(value.double().reshape(-1).squeeze(), factor, self.limit):
                return name
        if factor.dim() == 0:
            return float(factor)
        raise UnsupportedModel("the stream is multiplied by a vector that no attribute of the layer holds")


def find_wiring(
    call: LayerCall, tape: Tape, branch: str, z: Tensor, limit: float, beside: tuple[str, ...] = ()
) -> Wiring:
    """The wiring of the branch that the module `branch` gives, with those `beside` it whose results are added to it.

    Raises `UnsupportedModel` when none fits.
    """
    find = _Finder(call, tape, limit)
    passing = next((p for p in tape.passings if p.module == branch), None)
    if passing is None:
        raise UnsupportedModel("the layer is one map by itself")
    post = _norm_after(find, passing)
    end = passing if post is None else post
    total, alpha, values = _total(find, end)
    b = find.rows(end.result)
    assert b is not None
    b = b.clone()
    for p in tape.passings:
        part = find.rows(p.result)
        if p.module in beside and part is not None:
            b += part
    r = values - alpha * b
    residual = _residual(find, r, passing)
    norm_pre = _norm_before(find, z, branch)
    _check_follows(find, total)
    default = read_by(norm_pre.module) if norm_pre is not None else None
    outer = _outer(find, total)
    return Wiring(
        norm_pre=None if norm_pre is None else norm_pre.module,
        norm_post=None if post is None else post.module,
        norm_outer=outer,
        residual=() if residual == (default,) else residual,
        total=None if total == given_by("") or outer is not None else total,
        alpha=find.named(alpha),
    )


def _norm_after(find: _Finder, branch: Passing) -> Passing | None:
    """A module with one vector of weights that is called on what the branch gives, or gives it as the last of it."""
    layer = find.call.layer
    for p in find.tape.passings:
        shapes = [w.dim() for w in layer.get_submodule(p.module).parameters(recurse=False)]
        at_its_end = p.module.startswith(f"{branch.module}.") and p.result.shape[-1] == branch.result.shape[-1]
        reads = same(find.rows(p.given), find.rows(branch.result), find.limit)
        closes = at_its_end and same(find.rows(p.result), find.rows(branch.result), find.limit)
        if p.module != branch.module and shapes == [1] and (reads or closes):
            return p
    return None


def _norm_before(find: _Finder, z: Tensor, branch: str) -> Passing | None:
    """A module that gives z and reads something else of the same shape."""
    for p in find.tape.passings:
        given = find.rows(p.given)
        gives = p.module != branch and same(find.rows(p.result), z, find.limit)
        if gives and given is not None and given.shape == z.shape and not same(given, z, find.limit):
            return p
    return None


def _total(find: _Finder, end: Passing) -> tuple[Tap, Tensor, Tensor]:
    """Where the finished sum can be read, the multiplier of the branch in it, and its value `(T, d)`."""
    (first, one), (second, two) = (find.answers(end.module, seed) for seed in (1, 2))
    moves = [find.rows(first), find.rows(second)]
    b = find.rows(end.result)
    for tap, before, after_one, after_two in _places(find, one, two):
        differences = [after_one - before, after_two - before]
        if any(m is None or d.shape != m.shape for m, d in zip(moves, differences, strict=True)) or b is None:
            continue
        both = factor_between(torch.cat(differences), torch.cat([m for m in moves if m is not None]), ANSWER)
        if both is not None and bool((both != 0).all()) and not same(both * b, before, ANSWER):
            return tap, both, before
    raise UnsupportedModel(
        f"nothing answers in proportion to what {end.module} gives, so no edit of it can be aimed (tokens are mixed "
        "after it, several streams, or an unknown norm)"
    )


ANSWER = 1e-4
"""Relative deviation from proportionality that differences of rounded values may show."""


def _places(find: _Finder, one: Tape, two: Tape) -> Iterator[tuple[Tap, Tensor, Tensor, Tensor]]:
    """The layer's result first, then what modules are called on, in the order of the calls."""
    values = [find.rows(t.result) for t in (find.tape, one, two)]
    if values[0] is not None and values[1] is not None and values[2] is not None:
        yield given_by(""), values[0], values[1], values[2]
    calls: dict[str, int] = {}
    for p in find.tape.passings:
        calls[p.module] = calls.get(p.module, 0) + 1
    seen: set[str] = set()
    for p, q, s in zip(find.tape.passings, one.passings, two.passings, strict=False):
        rows = [find.rows(v.given) for v in (p, q, s)]
        if p.module not in seen and rows[0] is not None and rows[1] is not None and rows[2] is not None:
            seen.add(p.module)
            yield Tap(p.module, "input", calls=calls[p.module]), rows[0], rows[1], rows[2]


def _check_follows(find: _Finder, total: Tap) -> None:
    """With the other tokens disturbed and the sum at the last one held, the layer's last result must not move."""
    if total == given_by(""):
        return
    owner = find.call.layer.get_submodule(total.module)
    passing = next(p for p in find.tape.passings if p.module == total.module)

    count = itertools.count()

    def hold(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if next(count) % total.calls == 0:
            args[0].reshape(-1, args[0].shape[-1])[-1].copy_(passing.given.reshape(-1, args[0].shape[-1])[-1])

    handle = owner.register_forward_pre_hook(hold)
    try:
        moved = find.rows(find.call.play(disturb=1.0).result)
    finally:
        handle.remove()
    before = find.rows(find.tape.result)
    if moved is None or before is None or not same(moved[-1], before[-1], find.limit):
        raise UnsupportedModel(f"behind {total.module} the layer mixes tokens again")


def _residual(find: _Finder, r: Tensor, branch: Passing) -> tuple[Tap, ...]:
    """A value that is r up to a factor; or two values that add up to it."""
    x = find.rows(find.tape.given)
    # What began later than the branch, or runs twice, cannot be read in time.
    values = [(read_by(""), x)]
    once = [p for p in find.tape.passings if sum(q.module == p.module for q in find.tape.passings) == 1]
    values += [(read_by(p.module), find.rows(p.given)) for p in once if p.started <= branch.started]
    ended = find.tape.passings[: find.tape.passings.index(branch)]
    values += [(given_by(p.module), find.rows(p.result)) for p in once if p in ended and p.started < branch.started]
    fitting = []
    for tap, value in values:
        factor = None if value is None or value.shape != r.shape else factor_between(r, value, find.limit)
        if factor is not None:
            fitting.append(Tap(tap.module, tap.side, find.named(factor)))
    if fitting:
        return (min(fitting, key=lambda tap: tap.factor != 1.0),)
    shaped = [(tap, value) for tap, value in values if value is not None and value.shape == r.shape]
    for (tap, value), (other, second) in itertools.combinations(shaped, 2):
        if same(value + second, r, find.limit):
            return (tap, other)
    raise UnsupportedModel("what the branch is added to is not a value that passes a module of the layer")


def _outer(find: _Finder, total: Tap) -> str | None:
    """The module that turns the finished sum into the layer's result."""
    if total == given_by("") or total.calls > 1:
        return None
    passing = next(p for p in find.tape.passings if p.module == total.module)
    return total.module if same(find.rows(passing.result), find.rows(find.tape.result), find.limit) else None
