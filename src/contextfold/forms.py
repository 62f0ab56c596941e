"""From the record of a decoder layer to its expression of stages. Only shapes are read, so the meta device will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import nn

from contextfold.anatomy import Bound, Dense, Experts, Family, Mixer, Sites, Tap, Wiring
from contextfold.anatomy.block import stored_shape
from contextfold.anatomy.layer import holds, names_in, required
from contextfold.anatomy.wrapped import inside
from contextfold.calculus import (
    Affine,
    Bias,
    Chain,
    ExpertOutputs,
    Expression,
    Given,
    Mark,
    Multiplier,
    Normalise,
    Pointwise,
    Scale,
    Skip,
    Sum,
)
from contextfold.calculus import Experts as Mixture
from contextfold.errors import UnsupportedModel

__all__ = ["expression_of", "expressions", "kind_of", "sites_of"]

ACTIVATIONS = (
    "hidden_activation",
    "hidden_act",
    "activation_function",
    "activation",
    "mlp_hidden_act",
    "hidden_act_fn",
)
"""Attributes in which configurations keep the name of the nonlinearity."""

ACTIVE = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k",
    "moe_top_k",
)
"""Attributes in which configurations keep how many experts a token uses."""


def sites_of(family: Family, layer: nn.Module, config: Any) -> Sites:
    """The first of the family's kinds that fits the configuration and the layer. Raises `UnsupportedModel`."""
    names = names_in(layer)
    for sites in family.sites:
        if holds(sites.wiring, config) and required(sites) <= names:
            return sites
    raise UnsupportedModel(f"a {type(layer).__name__} has none of the forms that family {family.name!r} describes")


def expressions(bound: Bound) -> tuple[Expression, ...]:
    """The expression of every block of a bound model, in order."""
    config: Any = bound.model.config
    text = config.get_text_config(decoder=True)
    return tuple(expression_of(sites_of(bound.family, b.layer, text), b.layer, text) for b in bound.blocks)


def kind_of(sites: Sites) -> str:
    """One word."""
    return {Dense: "dense", Experts: "experts", Mixer: "mixer"}[type(sites)]


def expression_of(sites: Sites, layer: nn.Module, config: Any) -> Expression:
    """The layer's output: `N_out( r + alpha · m ⊙ Norm(g_out(f(z))) )`, what is absent left out."""
    wiring, form = sites.wiring, _Form(layer, config)
    branch = Chain.of(*form.branch(sites), *form.norm(wiring.norm_post, "u"), *form.multiplier(wiring.alpha))
    reads, residual = form.stream(wiring)
    if isinstance(sites, Mixer):
        block = Chain.of(Sum.of(*(residual or [Given("x")]), Chain.of(Given("h", sites.output_map), branch)))
    elif reads is None:
        block = Chain.of(form.v(wiring), Sum.of(Skip(), Chain.of(*form.norm(wiring.norm_pre, ""), Mark("z"), branch)))
    else:
        block = Chain.of(Sum.of(*residual, Chain.of(reads, *form.norm(wiring.norm_pre, ""), Mark("z"), branch)))
    block = block >> Chain.of(*form.norm(wiring.norm_outer, "")) if wiring.norm_outer else block
    return block if wiring.total is None else Chain.of(block, *form.multiplier(wiring.total.factor))


class _Form:
    """Makes stages from the modules of one layer."""

    def __init__(self, layer: nn.Module, config: Any) -> None:
        self.layer = layer
        self.config = config
        self.phi = next((str(v) for n in ACTIVATIONS if (v := getattr(config, n, None)) is not None), "phi")

    def linear(self, name: str) -> list[Expression]:
        _, module = inside(self.layer.get_submodule(name))
        rows, columns = stored_shape(module)
        # GPT-2 and its kin store (in, out) in a class of this name.
        turned = type(module).__name__ == "Conv1D"
        inputs, outputs = (rows, columns) if turned else (columns, rows)
        bias = [] if module._parameters.get("bias") is None else [Bias(name, outputs)]
        return [Affine(name, inputs, outputs, turned), *bias]

    def norm(self, name: str | None, letter: str) -> list[Expression]:
        if name is None:
            return []
        _, module = inside(self.layer.get_submodule(name))
        centred = "LayerNorm" in type(module).__name__ and "RMS" not in type(module).__name__
        stages: list[Expression] = [Normalise(centred=centred), *([Mark(letter)] if letter else [])]
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        stages += [] if weight is None else [Scale(name, weight.shape[-1])]
        return [*stages, *([] if bias is None else [Bias(name, bias.shape[-1])])]

    def multiplier(self, factor: Any) -> list[Expression]:
        """None for 1. A factor that only the weights tell (or a vector) is known to be there, not how large it is."""
        value = factor(self.layer) if callable(factor) else factor
        if isinstance(factor, str):
            owner, _, name = factor.rpartition(".")
            value = getattr(self.layer.get_submodule(owner), name)
        if isinstance(value, Mapping):
            value = float("nan")
        if isinstance(value, torch.Tensor):
            known = value.numel() == 1 and value.device.type != "meta"
            value = float(value) if known else float("nan")
        return [] if float(value) == 1.0 else [Multiplier(float(value))]

    def v(self, wiring: Wiring) -> Expression:
        """v as the sum of x and what attention's output map gives, where the record tells that map."""
        if wiring.attention_output is None:
            return Given("v")
        heads = Given("a", wiring.attention_output)
        attention = [heads, *self.linear(wiring.attention_output), *self.norm(wiring.norm_attention, "")]
        return Chain.of(Sum.of(Given("x"), Chain.of(*attention)), Mark("v"))

    def stream(self, wiring: Wiring) -> tuple[Given | None, Sequence[Expression]]:
        """What the branch reads, and what it is added to; (None, ...) in a sequential block, where both are v."""
        if not wiring.residual:
            return None, ()
        residual = [Chain.of(_given(tap), *self.multiplier(tap.factor)) for tap in wiring.residual]
        # Without a norm of its own in the record, the branch may share one with attention: then z is what is given.
        return Given("v" if wiring.norm_pre else "z"), [_bare(part) for part in residual]

    def branch(self, sites: Sites) -> list[Expression]:
        match sites:
            case Mixer(output_map):
                return [Mark("h"), *self.linear(output_map)]
            case Dense(input_maps, output_map):
                output = self.linear(output_map)
                return [self.inner(input_maps, output[0]), Mark("h"), *output]
            case Experts():
                inner, outer = self.experts(sites)
                return [inner, Mark("h"), outer]

    def inner(self, names: Sequence[str], output: Expression) -> Expression:
        """`phi(W z)`, or `phi(W_gate z) ⊙ W_up z`; gate and up may be one matrix."""
        maps = [Chain.of(*self.linear(name)) for name in names]
        first = maps[0].parts[0]
        assert isinstance(first, Affine)
        assert isinstance(output, Affine)
        if len(maps) == 1:
            fused = first.outputs > output.inputs
            return maps[0] >> Pointwise(f"gated {self.phi}" if fused else self.phi)
        return reduce(mul, maps[1:], maps[0] >> Pointwise(self.phi))

    def experts(self, sites: Experts) -> tuple[Mixture, ExpertOutputs]:
        turned = sites.transposed if sites.output_transposed is None else sites.output_transposed
        stacked = self.layer.get_parameter(sites.stacked_inputs[0]).shape
        output = next(self._shape(name) for name in sites.outputs if len(self._shape(name)) == len(stacked))
        count, shared = stacked[0], any("shared" in name for name in sites.outputs)
        if sites.packed is not None:
            owner, _, name = sites.packed.rpartition(".")
            count = int(getattr(self.layer.get_submodule(owner), name))
            output = torch.Size((count, output[0] // count, output[1]))
        outputs, hidden = (output[2], output[1]) if turned else (output[1], output[2])
        owners = [vars(self.config), *(vars(module) for module in self.layer.modules())]
        active = next((v for owner in owners for n in ACTIVE if isinstance(v := owner.get(n), int)), 1)
        inputs = stacked[1] if sites.transposed and len(stacked) == 3 else stacked[-1]
        name = sites.branch[0]
        inner = Mixture(name, count, active, inputs, hidden, shared)
        return inner, ExpertOutputs(name, active, hidden, outputs, shared)

    def _shape(self, name: str) -> torch.Size:
        """Of a parameter by its own name, or of the weight of a module."""
        owner, _, parameter = name.rpartition(".")
        stored = self.layer.get_submodule(owner)._parameters.get(parameter)
        return torch.Size(stored_shape(self.layer.get_submodule(name))) if stored is None else stored.shape


def _given(tap: Tap) -> Given:
    if tap.side == "output":
        return Given("attention", tap.module, after=True)
    return Given("x", tap.module) if tap.module == "" else Given("r", tap.module)


def _bare(part: Chain) -> Expression:
    return part.parts[0] if len(part.parts) == 1 else part
