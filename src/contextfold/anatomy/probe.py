"""The proof at binding: one forward, every identity of the block form checked on every block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy.bind import Block, Bound, resolve
from contextfold.errors import ProbeFailed

__all__ = ["TOLERANCE", "bind", "first_output", "first_tensor"]

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative error per vector and dtype. Upstream norms compute in float32 whatever the model's dtype, which sets
the first entry; a wrong form misses by far more than any of these."""

PROBE_TOKENS = 7


def bind(model: nn.Module) -> Bound:
    """Bind `model` to its family and prove every block.

    Two rows of random tokens run through the model once. In the second row the outputs of the input maps are
    replaced by those of the first row in reversed order of positions; so h must come out reversed too, which shows
    that it depends on z through the input maps alone, token by token, whatever the activation is.

    Raises `UnsupportedModel` when no family fits, `ProbeFailed` when one does not hold. The model is unchanged.
    """
    bound = resolve(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, bound.vocabulary, (1, PROBE_TOKENS), generator=generator).repeat(2, 1)
    probes = [_Probe(block, bound.dtype) for block in bound.blocks]
    handles = [handle for probe in probes for handle in probe.hooks()]
    try:
        with torch.no_grad():
            positions = torch.arange(PROBE_TOKENS).repeat(2, 1)
            model(
                input_ids=ids.to(bound.device),
                position_ids=positions.to(bound.device),
                attention_mask=torch.ones_like(ids).to(bound.device),
                use_cache=False,
            )
    finally:
        for handle in handles:
            handle.remove()
    for probe in probes:
        probe.check()
    return bound


class _Probe:
    """Listens to one block during the forward, then compares."""

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        self.block = block
        self.limit = TOLERANCE.get(dtype, 0.0)
        self.seen: dict[str, list[Tensor]] = {}

    def hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        block = self.block
        pairs = [
            (block.layer, "x", "y"),
            (block.norm_pre, "v", "z"),
            (block.output_map.module, "h", "p"),
            (block.attention_output.module, "a", "o"),
            *((linear.module, f"z{k}", f"i{k}") for k, linear in enumerate(block.input_maps)),
        ]
        if block.norm_post is not None:
            pairs.append((block.norm_post.module, "q", "b"))
        if block.norm_attention is not None:
            pairs.append((block.norm_attention, "oq", "on"))
        handles = [m.register_forward_hook(self._note(i, o), with_kwargs=True) for m, i, o in pairs]
        return handles + [linear.module.register_forward_hook(_reverse_second_row) for linear in block.input_maps]

    def _note(self, before: str, after: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.seen.setdefault(before, []).append(first_tensor(args, kwargs).detach().clone())
            self.seen.setdefault(after, []).append(first_output(output).detach().clone())

        return hook

    def check(self) -> None:
        block = self.block
        t = {name: self._once(name) for name in self._expected()}
        for k, linear in enumerate(block.input_maps):
            self._same(f"input of {linear.site.module}", "z, the norm's output", t[f"z{k}"], t["z"])
            self._same(f"output of {linear.site.module}", "W z + b", t[f"i{k}"], linear.exact(t[f"z{k}"]))
        self._same("h with reversed input maps", "h reversed", t["h"][1], t["h"][0].flip(0))
        self._same(f"output of {block.output_map.site.module}", "W_out h + b", t["p"], block.output_map.exact(t["h"]))
        branch = t["p"].double()
        if block.norm_post is not None:
            self._same("input of the norm after the MLP", "W_out h + b", t["q"], t["p"])
            branch = block.norm_post.scale * block.norm_post.unscaled(t["p"])
            self._same("output of the norm after the MLP", "m ⊙ u", t["b"], branch)
        self._same("y", "v + alpha · branch", t["y"], t["v"].double() + block.alpha * branch)
        attention = t["o"] if block.norm_attention is None else t["on"]
        self._same("v", "x + attention branch", t["v"], t["x"].double() + attention.double())

    def _expected(self) -> list[str]:
        names = ["x", "y", "v", "z", "h", "p", "a", "o"]
        names += [f"{letter}{k}" for k in range(len(self.block.input_maps)) for letter in "zi"]
        names += ["q", "b"] if self.block.norm_post is not None else []
        return names + (["oq", "on"] if self.block.norm_attention is not None else [])

    def _once(self, name: str) -> Tensor:
        values = self.seen.get(name, [])
        if len(values) != 1:
            raise ProbeFailed(
                f"{self.block.name}: {name} was seen {len(values)} times in one forward instead of once (a looped or "
                "shared layer, or a kernel that bypasses the module); such a block is not supported"
            )
        return values[0]

    def _same(self, what: str, form: str, met: Tensor, rebuilt: Tensor) -> None:
        met, rebuilt = met.double(), rebuilt.double()
        error = float((met - rebuilt).norm() / rebuilt.norm().clamp_min(torch.finfo(torch.float64).tiny))
        if met.shape != rebuilt.shape or not error <= self.limit:
            raise ProbeFailed(
                f"{self.block.name}: {what} is not {form}: relative error {error:.2g}, limit {self.limit:.2g}; "
                "the model's blocks do not have the form that its family describes"
            )


def _reverse_second_row(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return torch.stack([output[0], output[0].flip(0)])


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that a module was called on, passed by position or by name."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise ProbeFailed("a module of the block was called without a tensor")


def first_output(output: Any) -> Tensor:
    """The tensor of a module's output: itself, or the first of a tuple."""
    return output if isinstance(output, Tensor) else first_tensor(tuple(output), {})
