"""Models that cannot be listened to or written are refused by name, at binding and by discovery alike.

Looped and tied layers, training mode, wrapped maps and one unknown norm are in `test_bind`; types without a foldable
form are in `test_conformance` and `test_discover`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zoo
from contextfold.anatomy import REFUSED, bind, proof
from contextfold.anatomy.discover import discover
from contextfold.errors import InputError, ProbeFailed, UnsupportedModel
from tiny import bits, build

DOORS = pytest.mark.parametrize("door", [bind, discover], ids=["bind", "discover"])


def a_whole(model):
    return torch.compile(model)


def a_whole_in_place(model):
    model.compile()
    return model


def a_layer(model):
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def an_mlp_in_place(model):
    model.model.layers[1].mlp.compile()
    return model


def a_forward(model):
    model.forward = torch.compile(model.forward)
    return model


@DOORS
@pytest.mark.parametrize(
    ("compiled", "name"),
    [
        (a_whole, "OptimizedModule"),
        (a_whole_in_place, "LlamaForCausalLM"),
        (a_layer, r"model\.layers\.1"),
        (an_mlp_in_place, r"model\.layers\.1\.mlp"),
        (a_forward, "LlamaForCausalLM"),
    ],
)
def test_compiled_models_are_refused(door, compiled, name):
    """Nothing is compiled here: torch does that at the first call, which must not come."""
    with pytest.raises(UnsupportedModel, match=rf"^{name} is compiled: .* before torch\.compile"):
        door(compiled(build("llama", torch.float32)))


@DOORS
def test_offloaded_parameters_are_refused(door):
    """As accelerate leaves them: one layer on the meta device, its weights brought in by hooks during a forward."""
    model = build("llama", torch.float32)
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match=r"^model\.layers\.1\.\S+ has no data .*offloaded.*in memory"):
        door(model)


@DOORS
def test_a_kernel_that_swallows_the_hooks_is_refused(door):
    """The values are right, but no sub-module of the MLP is ever called."""
    model = build("llama")
    mlp = model.model.layers[1].mlp
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    ids = torch.arange(5)[None]
    before = model(input_ids=ids).logits

    def fused(x):
        h = F.silu(F.linear(x, gate.weight, gate.bias)) * F.linear(x, up.weight, up.bias)
        return F.linear(h, down.weight, down.bias)

    mlp.forward = fused
    assert torch.equal(model(input_ids=ids).logits, before)
    weights = bits(model)
    with pytest.raises(
        ProbeFailed, match=r"^layer 1: \w+ never passed the module .* kernel .* switch such kernels off"
    ):
        door(model)
    assert bits(model) == weights
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_layer_that_runs_twice_is_refused_by_that_name():
    model = build("llama")
    layer, plain = model.model.layers[1], model.model.layers[1].forward
    layer.forward = lambda x, *args, **kwargs: plain(plain(x, *args, **kwargs), *args, **kwargs)
    with pytest.raises(ProbeFailed, match=r"^layer 1: \w+ passed 2 times in one forward .*looped or shared"):
        bind(model)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v4", "several residual streams (hyper-connections)"),
        ("gemma3n_text", "several residual streams (AltUp)"),
        ("inkling_text", "a short convolution mixes tokens after the MLP"),
        ("zamba2", "run at several depths with the same weights"),
    ],
)
def test_forms_that_cannot_be_folded_are_refused_with_their_reason(model_type, reason):
    assert reason in REFUSED[model_type]
    model = zoo.build(model_type, torch.float32)
    with pytest.raises(UnsupportedModel, match=rf"^model type '{model_type}' cannot be folded: ") as refused:
        bind(model)
    assert reason in str(refused.value)


def test_several_streams_under_an_unknown_name_are_refused_too():
    model = zoo.build("deepseek_v4", torch.float32)
    model.config.model_type = "nobody"
    with pytest.raises(UnsupportedModel, match="several streams"):
        discover(model)


def layer_norm(layer):
    layer.post_feedforward_layernorm = nn.LayerNorm(32).double()


def without_eps(layer):
    norm = layer.post_feedforward_layernorm
    del norm.eps
    norm.forward = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + norm.weight)


def without_scale(layer):
    norm = layer.post_feedforward_layernorm
    del norm.weight
    norm.forward = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (layer_norm, r"is neither w ⊙ x/rms nor \(1 \+ w\) ⊙ x/rms"),
        (without_eps, "without a weight or an eps"),
        (without_scale, "without a weight or an eps"),
    ],
)
def test_norms_of_unknown_convention_are_refused(change, message):
    model = build("gemma3_text")
    change(model.model.layers[1])
    with pytest.raises(UnsupportedModel, match=rf"^model\.layers\.1\.post_feedforward_layernorm .*{message}.*unknown"):
        bind(model)


def test_what_is_no_model_is_refused_by_discovery_too():
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        discover("smollm2")
    with pytest.raises(UnsupportedModel, match="not a transformers model"):
        discover(nn.Linear(2, 2).eval())


def test_every_dtype_that_is_written_has_a_tolerance():
    """Quantised weights are told by their dtype: what binds in `test_bind` must be all that is allowed."""
    assert set(proof.TOLERANCE) == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
