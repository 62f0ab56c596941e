"""Binding proves the form of every block, and refuses by name what it cannot prove."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from contextfold.anatomy import bind
from contextfold.errors import InputError, ProbeFailed, UnsupportedModel
from tiny import TYPES, bits, build, shared


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", TYPES)
def test_every_family_binds_and_stays_unchanged(model_type, dtype):
    model = build(model_type, dtype)
    before = bits(model)
    bound = bind(model)
    assert len(bound.blocks) == 3
    assert bits(model) == before
    offsets = {b.norm_post.offset for b in bound.blocks if b.norm_post is not None}
    assert offsets == ({1} if model_type in ("gemma2", "gemma3_text") else set())


def test_large_scales_do_not_hide_the_convention():
    """Under bfloat16 a scale of 100 says nothing about a one more or less; the fit must not be fooled."""
    model = build("gemma3_text")
    for layer in model.model.layers:
        layer.post_feedforward_layernorm.weight.data *= 100
    assert {b.norm_post.offset for b in bind(model.to(torch.bfloat16)).blocks} == {1}


def test_a_norm_of_unknown_convention_is_refused():
    model = build("gemma3_text")
    norm = model.model.layers[1].post_feedforward_layernorm
    norm.forward = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * (2.0 + norm.weight)
    with pytest.raises(UnsupportedModel, match="unknown convention"):
        bind(model)


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ("model.layers.1.mlp", lambda m: setattr(m, "forward", lambda x: 1.01 * type(m).forward(m, x)), "y is not"),
        ("model.layers.2.mlp", lambda m: position_mixing(m), "h with reversed"),
        ("model.layers.0.mlp.down_proj", lambda m: m.register_forward_hook(lambda *a: a[2] + 1e-2), "W_out"),
        ("model.layers.0.mlp.up_proj", lambda m: m.register_forward_hook(lambda *a: a[2] * 1.01), "W z"),
    ],
)
def test_a_block_of_another_form_is_refused(where, change, message):
    model = build("llama")
    change(model.get_submodule(where))
    with pytest.raises(ProbeFailed, match=message):
        bind(model)


def position_mixing(mlp):
    """An MLP that looks at the token before."""

    def forward(x):
        h = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        return mlp.down_proj(h + 0.1 * h.roll(1, -2))

    mlp.forward = forward


def test_a_looped_layer_is_refused():
    model = build("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UnsupportedModel, match=r"shares its memory|times in one forward"):
        bind(model)


def test_tied_maps_are_refused():
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(UnsupportedModel, match="shares its memory"):
        bind(model)


def test_training_mode_is_refused():
    model = build("llama").train()
    with pytest.raises(UnsupportedModel, match=r"model\.eval"):
        bind(model)


def test_meta_device_is_refused():
    with pytest.raises(UnsupportedModel, match="meta"):
        bind(shared("llama").__class__(shared("llama").config).to("meta").eval())


def test_wrapped_maps_are_refused():
    model = build("llama")
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj)
    with pytest.raises(UnsupportedModel, match=r"Sequential|up_proj"):
        bind(model)


def test_other_objects_are_refused():
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        bind("smollm2")
    with pytest.raises(UnsupportedModel, match="not a transformers model"):
        bind(nn.Linear(2, 2).eval())


def test_an_unknown_model_type_lists_what_is_supported():
    model = build("llama")
    model.config.model_type = "surprise"
    with pytest.raises(UnsupportedModel, match=r"surprise.*llama"):
        bind(model)
