"""How a branch joins the stream, found by moving the branch and watching what answers in proportion."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from contextfold.anatomy.block import first_output
from contextfold.anatomy.discover.tape import LayerCall, Passing, Tape
from contextfold.anatomy.discover.values import affine_between, by_token, factor_between, same
from contextfold.anatomy.record import Dense, Experts, Factor, Mixer, Sites, Tap, Wiring, given_by, read_by
from contextfold.errors import UnsupportedModel

__all__ = ["shortened", "wired"]

S = TypeVar("S", bound=Sites)

MOVE = 1e-2
"""Size of a trial movement, relative to the branch."""


@dataclass(frozen=True, eq=False)
class _Finder:
    call: LayerCall
    tape: Tape

    @property
    def limit(self) -> float:
        return self.call.limit

    def rows(self, value: Tensor) -> Tensor | None:
        return by_token(value, self.call.tokens)

    def passing(self, module: str) -> Passing:
        """The first call of a module."""
        found = next((p for p in self.tape.passings if p.module == module), None)
        if found is None:
            raise UnsupportedModel(f"{module or 'the layer itself'} is not called as a module on one tensor")
        return found

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

    def named(self, factor: Tensor) -> tuple[Factor, Tensor]:
        """The attribute of the layer that holds a measured multiplier, or the number itself; and its value."""
        if factor.dim() == 0 and abs(float(factor) - 1) <= self.limit:
            return 1.0, torch.ones_like(factor)
        layer = self.call.layer
        numbers = {name: torch.tensor(v, dtype=torch.float64) for name, v in vars(layer).items() if type(v) is float}
        for name, value in {**numbers, **self.vectors}.items():
            if same(value, factor, self.limit):
                return name, value
        if factor.dim() == 0:
            return float(factor), factor
        raise UnsupportedModel("the stream is multiplied by a vector that no attribute of the layer holds")

    @cached_property
    def vectors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the layer that hold a number or a vector, by dotted name; float64."""
        held, width = self.call.layer, self.tape.result.shape[-1]
        return {
            name: value.detach().double().reshape(-1).squeeze()
            for name, value in itertools.chain(held.named_parameters(), held.named_buffers())
            if value.numel() <= width
        }

    def sum_of_products(self, constant: Tensor, scales: Sequence[Factor]) -> tuple[tuple[str, ...], ...]:
        """One or two vectors of the layer, each times one of the named `scales` or not, that add up to `constant`."""
        names = [scale for scale in scales if isinstance(scale, str)]
        terms: dict[tuple[str, ...], Tensor] = {}
        for name, value in self.vectors.items():
            if value.shape == constant.shape:
                terms[(name,)] = value
                terms |= {(name, scale): value * self.vectors[scale] for scale in names if scale in self.vectors}
        for first, value in terms.items():
            if same(value, constant, self.limit):
                return (first,)
        for (first, value), (second, other) in itertools.combinations(terms.items(), 2):
            if same(value + other, constant, self.limit):
                return (first, second)
        raise UnsupportedModel("a constant joins the sum that is made of no vectors of the layer")


def wired(call: LayerCall, tape: Tape, sites: S) -> S:
    """The maps of `sites`, joined to the stream as this layer does it; everything named, defaults too.

    Raises `UnsupportedModel` when no wiring fits.
    """
    find = _Finder(call, tape)
    match sites:
        case Dense(input_maps, output_map):
            branch, z = (output_map,), find.rows(find.passing(input_maps[0]).given)
        case Experts(branch):
            z = find.rows(find.passing(branch[0]).given)
        case Mixer(output_map):
            branch, z = (output_map,), None
    return replace(sites, wiring=_wiring(find, branch[0], branch[1:], z))


def shortened(wiring: Wiring) -> Wiring:
    """Without what a record leaves out because it is the default."""
    usual = None if wiring.norm_pre is None else (read_by(wiring.norm_pre),)
    residual = () if wiring.residual == usual else wiring.residual
    total = None if wiring.total == given_by("") or wiring.norm_outer is not None else wiring.total
    return replace(wiring, residual=residual, total=total)


def _wiring(find: _Finder, branch: str, beside: tuple[str, ...], z: Tensor | None) -> Wiring:
    """Of the branch that the module `branch` gives, with those `beside` it whose results are added to it."""
    passing = find.passing(branch)
    post = _norm_after(find, passing)
    end = passing if post is None else post
    total, measured, values = _total(find, end)
    alpha, exact = find.named(measured)
    b = find.rows(end.result)
    assert b is not None
    parts = [find.rows(p.result) for p in find.tape.passings if p.module in beside]
    b = b + sum(part for part in parts if part is not None)
    residual, shift = _residual(find, values - exact * b, passing, alpha)
    norm_pre = None if z is None else _norm_before(find, z, branch)
    _check_follows(find, total)
    return Wiring(
        norm_pre=None if norm_pre is None else norm_pre.module,
        norm_post=None if post is None else post.module,
        norm_outer=_outer(find, total),
        residual=residual,
        total=total,
        alpha=alpha,
        shift=shift,
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


def _residual(
    find: _Finder, r: Tensor, branch: Passing, alpha: Factor
) -> tuple[tuple[Tap, ...], tuple[tuple[str, ...], ...]]:
    """A value that is r up to a factor; two values that add up to it; or one up to a factor and a constant."""
    values = [(tap, value) for tap, value in _early(find, branch) if value.shape == r.shape]
    fitting = []
    for tap, value in values:
        factor = factor_between(r, value, find.limit)
        if factor is not None:
            fitting.append(replace(tap, factor=find.named(factor)[0]))
    if fitting:
        return (min(fitting, key=lambda tap: tap.factor != 1.0),), ()
    for (tap, value), (other, second) in itertools.combinations(values, 2):
        if same(value + second, r, find.limit):
            return (tap, other), ()
    for tap, value in values:
        affine = affine_between(r, value, find.limit)
        if affine is not None:
            name, exact = find.named(affine[0])
            constant = (r - exact * value).mean(0)
            return (replace(tap, factor=name),), find.sum_of_products(constant, [alpha, name])
    raise UnsupportedModel("what the branch is added to is not a value that passes a module of the layer")


def _early(find: _Finder, branch: Passing) -> Iterator[tuple[Tap, Tensor]]:
    """Values of the stream's shape that are known before the branch runs, and pass once."""
    passings = find.tape.passings
    once = [p for p in passings if sum(q.module == p.module for q in passings) == 1]
    ended = passings[: passings.index(branch)]
    places = [(read_by(""), find.tape.given)]
    places += [(read_by(p.module), p.given) for p in once if p.started <= branch.started]
    places += [(given_by(p.module), p.result) for p in once if p in ended and p.started < branch.started]
    for tap, value in places:
        rows = find.rows(value)
        if rows is not None:
            yield tap, rows


def _outer(find: _Finder, total: Tap) -> str | None:
    """The module that turns the finished sum into the layer's result."""
    if total == given_by("") or total.calls > 1:
        return None
    passing = next(p for p in find.tape.passings if p.module == total.module)
    return total.module if same(find.rows(passing.result), find.rows(find.tape.result), find.limit) else None
