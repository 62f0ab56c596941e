"""The proof at binding: one forward, every identity of the block form checked on every block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from contextfold.anatomy.bind import Bound, resolve
from contextfold.anatomy.block import (
    AdaptedMap,
    Block,
    DenseBlock,
    ExpertBlock,
    LinearMap,
    QuantisedMap,
    Reading,
    first_output,
    first_tensor,
)
from contextfold.anatomy.closure import prove_closed
from contextfold.anatomy.experts import Call, lent
from contextfold.anatomy.proof import Limits, seen_once
from contextfold.anatomy.proof_experts import prove_experts
from contextfold.anatomy.record import Family
from contextfold.anatomy.sharded import whole_input, whole_output
from contextfold.errors import ProbeFailed
from contextfold.lowrank import LowRank

__all__ = ["bind", "plain_arguments"]

PROBE_TOKENS = 7

Hook = torch.utils.hooks.RemovableHandle


def bind(model: nn.Module, family: Family | None = None) -> Bound:
    """Bind `model` to its family and prove every block.

    Two rows of random tokens run through the model once. In the second row the outputs of the input maps are
    replaced by those of the first row in reversed order of positions; so h must come out reversed too, which shows
    that it depends on z through the input maps alone, token by token, whatever the activation is. Mixtures of
    experts are proven on single tokens, by editing and comparing.

    `family`: a record to use in place of the registered one; it has to pass the same proof.

    Raises `UnsupportedModel` when no family fits, `ProbeFailed` when one does not hold. The model is unchanged.
    """
    bound = resolve(model, family)
    model = bound.model  # the one inside, where PEFT has wrapped it
    probes = [_Probe(block, bound.dtype) for block in bound.blocks]
    handles = [handle for probe in probes for handle in probe.hooks()]
    handles += [layer.register_forward_pre_hook(_refuse_idle) for layer in bound.idle]
    try:
        with torch.no_grad():
            model(**plain_arguments(model, _text(bound, 0).repeat(2, 1)))
    finally:
        for handle in handles:
            handle.remove()
    for probe in probes:
        probe.check(model)
    prove_closed(
        bound.blocks,
        lambda seed: model(**plain_arguments(model, _text(bound, seed))),
        Limits.of("the model", bound.dtype),
    )
    return bound


def _text(bound: Bound, seed: int) -> Tensor:
    """`(1, T)` random tokens that end in the same one for every seed."""
    ids = torch.randint(0, bound.vocabulary, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(seed))
    ids[0, -1] = 1
    return ids.to(bound.device)


def plain_arguments(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """What a model is called with for `ids (B, T)`: a mask of ones, no cache, and positions where it takes any."""
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return given


class _Probe:
    """Listens to one block during the forward, then compares."""

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        self.block = block
        self.limits = Limits.of(block.name, dtype)
        self.seen: dict[str, list[Tensor]] = {}
        self.early: set[str] = set()
        self.call = Call()

    def hooks(self) -> Iterator[Hook]:
        block = self.block
        yield block.layer.register_forward_hook(self._around("x", "y"), with_kwargs=True)
        yield self._listen("total", block.total)
        for k, reading in enumerate(block.residual):
            yield self._listen(f"r{k}", reading)
        if block.norm_post is not None:
            yield block.norm_post.module.register_forward_hook(self._around("q", "b"), with_kwargs=True)
        if block.attention_output is not None:
            yield block.attention_output.module.register_forward_hook(self._around("a", "o"), with_kwargs=True)
            if block.norm_attention is not None:
                yield block.norm_attention.register_forward_hook(self._around("oq", "on"), with_kwargs=True)
        match block:
            case DenseBlock():
                yield from self._dense_hooks(block)
            case ExpertBlock():
                for k, module in enumerate(block.branch):
                    yield module.register_forward_hook(self._around(f"z{k}", f"p{k}"), with_kwargs=True)
                yield block.branch[0].register_forward_pre_hook(self._mark_early)
                yield block.branch[0].register_forward_pre_hook(self._keep_call, with_kwargs=True)

    def _dense_hooks(self, block: DenseBlock) -> Iterator[Hook]:
        yield block.output_map.module.register_forward_pre_hook(self._mark_early)
        yield block.output_map.module.register_forward_hook(self._around("h", "p"), with_kwargs=True)
        if block.norm_pre is not None and block.input_maps:
            yield block.norm_pre.register_forward_hook(self._around("v", "z"), with_kwargs=True)
        for k, linear in enumerate(block.input_maps):
            yield linear.module.register_forward_hook(self._around(f"z{k}", f"i{k}"), with_kwargs=True)
            yield linear.module.register_forward_hook(_reverse_second_row)

    def _around(self, before: str, after: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._keep(before, whole_input(module, first_tensor(args, kwargs)))
            self._keep(after, whole_output(module, first_output(output)))

        return hook

    def _listen(self, name: str, reading: Reading) -> Hook:
        return reading.listen(lambda value: self._keep(name, value))

    def _keep(self, name: str, value: Tensor) -> None:
        self.seen.setdefault(name, []).append(value.detach().to(self.block.anchor.device, copy=True))

    def _mark_early(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.early = set(self.seen)

    def _keep_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call = Call.of(args, kwargs)

    def check(self, model: nn.Module) -> None:
        block = self.block
        t = {name: seen_once(block.name, name, values) for name, values in self.seen.items()}
        for name in sorted(self._expected() - set(t)):
            seen_once(block.name, name, [])
        for k in range(len(block.residual)):
            self.limits.require(f"r{k}" in self.early, "r is complete before the branch's maps run")
        match block:
            case DenseBlock():
                self._check_dense(block, t)
                branch = t["p"]
            case ExpertBlock():
                branch = self._check_experts(model, block, t)
        self._check_sum(branch.double(), t)
        if block.attention_output is not None:
            attention = t["o"] if block.norm_attention is None else t["on"]
            self._check_map(block.attention_output, "W_o a + b", t["o"], t["a"])
            self.limits.same("v", "x + attention branch", t["r0"], t["x"].double() + attention.double())

    def _expected(self) -> set[str]:
        block = self.block
        expected = {"x", "y", "total", *(f"r{k}" for k in range(len(block.residual)))}
        if block.norm_post is not None:
            expected |= {"q", "b"}
        if block.attention_output is not None:
            expected |= {"a", "o"} if block.norm_attention is None else {"a", "o", "oq", "on"}
        match block:
            case DenseBlock():
                return expected | {"h", "p", *(f"{letter}{k}" for k in range(len(block.input_maps)) for letter in "zi")}
            case ExpertBlock():
                return expected | {f"{letter}{k}" for k in range(len(block.branch)) for letter in "zp"}
        raise TypeError(f"{type(block).__name__} is no known kind of block")

    def _check_experts(self, model: nn.Module, block: ExpertBlock, t: dict[str, Tensor]) -> Tensor:
        """The branch `(…, d)`, proven."""
        for k in range(1, len(block.branch)):
            self.limits.same(f"input of branch module {k}", "z", _flat(t[f"z{k}"]), _flat(t["z0"]))
        branch = sum((_shaped(t[f"p{k}"], t["total"]) for k in range(len(block.branch))), torch.zeros(()))
        if block.norm_post is not None:
            # The norm may stand inside the branch's module.
            branch = t["q"]
        prove_experts(model, block, _flat(t["z0"]), _flat(branch), self.call, self.limits)
        return branch

    def _check_dense(self, block: DenseBlock, t: dict[str, Tensor]) -> None:
        for k, linear in enumerate(block.input_maps):
            self.limits.same(f"input of {linear.site.module}", "z, read by all input maps", t[f"z{k}"], t["z0"])
            self._check_map(linear, "W z + b", t[f"i{k}"], t[f"z{k}"])
        if block.norm_pre is not None and block.input_maps:
            self.limits.same("z", "the output of the norm before the MLP", t["z0"], t["z"])
        if block.input_maps:
            h = t["h"].reshape(2, -1, t["h"].shape[-1]) if t["h"].dim() == 2 else t["h"]
            self.limits.same("h with reversed input maps", "h reversed", h[1], h[0].flip(0))
        self._check_map(block.output_map, "W_out h + b", t["p"], t["h"])

    def _check_map(self, linear: LinearMap, form: str, met: Tensor, inputs: Tensor) -> None:
        """A quantised map is linear if it rounds its weights, but not if it rounds what it reads to a few bits too."""
        limits = self.limits
        if isinstance(linear, QuantisedMap):
            limits, form = limits.rounded_once(), f"{form}, as where weights alone are quantised"
        limits.same(_output_of(linear), form, met, linear.exact(inputs))
        if isinstance(linear, AdaptedMap):
            self._check_added(linear, inputs)

    def _check_added(self, linear: AdaptedMap, inputs: Tensor) -> None:
        """What is written into the weight inside adds up with the adapter: the proof is an edit."""
        x = inputs.reshape(-1, inputs.shape[-1])
        W, first = linear.weight.double(), x[:1].double()
        delta = LowRank((W @ first.T).flip(0), first / first.square().sum())
        with lent([(linear, delta)]), torch.no_grad():
            moved = linear.module.forward(x)
        self.limits.same(f"output of {linear.site.module} after an edit", "W x + b and the edit", moved,
                         linear.exact(x) + delta(x.double()))  # fmt: skip

    def _check_sum(self, branch: Tensor, t: dict[str, Tensor]) -> None:
        block = self.block
        if block.norm_post is not None:
            self.limits.same("input of the norm after the MLP", "W_out h + b", _flat(t["q"]), _flat(branch))
            branch = block.norm_post.scale * block.norm_post.unscaled(t["q"])
            self.limits.same("output of the norm after the MLP", "m ⊙ u", t["b"], branch)
        parts = {f"r{k}": reading.factor * _shaped(t[f"r{k}"], t["total"]) for k, reading in enumerate(block.residual)}
        r = sum(parts.values(), block.shift)
        total = t["total"].double() / block.total.factor
        plain = block.total.module is block.layer and block.total.side == "output"
        what = "y" if plain else "the finished sum"
        self.limits.same(what, "r + alpha · branch", total, r + block.alpha * _shaped(branch, total))
        # The norm's own rounding is not to be taken for a multiplier.
        added = branch if block.norm_post is None else t["b"]
        parts["the branch"] = block.alpha * _shaped(added, total)
        if bool(block.shift.any()):
            parts["the constant"] = block.shift.expand_as(total)
        self.limits.add_up(what, total, parts)


def _refuse_idle(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise ProbeFailed(
        f"a {type(module).__name__} that text was not expected to run did run; such a model is not supported"
    )


def _output_of(linear: LinearMap) -> str:
    """A class that is not torch's own may not be linear in its weights: quantising layers, adapters."""
    plain = type(linear.module) in (nn.Linear, Conv1D)
    kind = "" if plain else f" (a {type(linear.module).__name__}: quantised or wrapped?)"
    return f"output of {linear.site.module}{kind}"


def _flat(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _shaped(value: Tensor, like: Tensor) -> Tensor:
    """Some modules flatten the tokens of the batch."""
    return value.reshape(like.shape).double()


def _reverse_second_row(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    rows = output.reshape(2, -1, output.shape[-1]) if output.dim() == 2 else output
    return torch.stack([rows[0], rows[0].flip(0)]).reshape(output.shape)
