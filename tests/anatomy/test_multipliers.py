"""What a configuration or a model adds to a block without being described is refused, or changes nothing that matters.

There is no list of known names: whatever an unknown attribute does to a block shows in the proof, and what it does
before v, or behind the last block, is no part of what a fold relies on.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import zoo
from conformance import measure_model
from contextfold.anatomy import FAMILIES, bind
from contextfold.anatomy.record import read_by
from contextfold.errors import ProbeFailed, UnsupportedModel
from tiny import TYPES, build

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)


def on_branch(change):
    def install(layer):
        plain = layer.mlp.forward
        layer.mlp.forward = lambda x: change(plain(x))

    return install


def on_stream(change):
    """What `change` of v is, instead of v, goes into the sum beside the branch."""

    def install(layer):
        kept = []
        layer.post_attention_layernorm.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
        layer.register_forward_hook(lambda m, args, out: out + (change(kept[-1]) - kept[-1]))

    return install


UNKNOWN = {
    "a multiplier of the branch": on_branch(lambda b: 1.01 * b),
    "a multiplier of the stream": on_stream(lambda v: 0.99 * v),
    "a sign": on_branch(lambda b: -b),
    "a soft cap of the branch": on_branch(lambda b: 2 * torch.tanh(b / 2)),
    "a norm over the branch": on_branch(lambda b: torch.nn.functional.rms_norm(b, b.shape[-1:])),
    "a scale of the whole layer": lambda layer: layer.register_forward_hook(lambda m, args, out: 1.01 * out),
    "a soft cap of the sum": lambda layer: layer.register_forward_hook(lambda m, args, out: 9 * torch.tanh(out / 9)),
    "a constant in the sum": lambda layer: layer.register_forward_hook(lambda m, args, out: out + 0.05),
}


@DTYPES
@pytest.mark.parametrize("what", UNKNOWN)
def test_what_no_record_describes_is_refused(what, dtype):
    """One percent shows in bfloat16 too, where every single entry is right to no more than that."""
    model = build("llama", dtype)
    bind(model)
    UNKNOWN[what](model.model.layers[1])
    with pytest.raises(ProbeFailed, match=r"^layer 1: "):
        bind(model)


@DTYPES
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("off", [0.99, 1.01])
def test_a_record_with_a_multiplier_slightly_off_is_refused(model_type, dtype, off):
    family = next(f for f in FAMILIES if model_type in f.model_types)
    model = build(model_type, dtype)
    for change in ({"alpha": off}, {"residual": (read_by(family.sites[0].wiring.norm_pre, off),)}):
        sites = tuple(replace(s, wiring=replace(s.wiring, **change)) for s in family.sites)
        with pytest.raises(ProbeFailed):
            bind(model, replace(family, sites=sites))


# Every attribute below changes the mathematics of its model. A fold must stay exact, or the model be refused.

ATTRIBUTES = [
    ("granite", {"residual_multiplier": 0.7}),
    ("granite", {"attention_multiplier": 0.1}),
    ("granite", {"embedding_multiplier": 3.0}),
    ("granite", {"logits_scaling": 4.0}),
    ("xmod", {"pre_norm": True}),
    ("minicpm3", {"scale_depth": 2.5}),
    ("minicpm3", {"scale_emb": 3}),
    ("cohere", {"logit_scale": 0.5}),
    ("falcon_h1", {"mlp_multipliers": [0.3, 0.7]}),
    ("falcon_h1", {"attention_out_multiplier": 0.3}),
    ("falcon_h1", {"lm_head_multiplier": 0.3}),
    ("gemma2", {"attn_logit_softcapping": 2.0}),
    ("gemma2", {"final_logit_softcapping": 2.0}),
    ("gemma3_text", {"final_logit_softcapping": 2.0}),
    ("nanochat", {"final_logit_softcapping": 2.0}),
    ("deepseek_v3", {"routed_scaling_factor": 0.4}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("recurrent_gemma", {"logits_soft_cap": 2.0}),
    ("llama", {"mlp_bias": True, "attention_bias": True}),
    ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
]


@pytest.mark.parametrize(("model_type", "options"), ATTRIBUTES, ids=str)
def test_an_attribute_that_changes_the_mathematics_is_handled_or_refused(model_type, options):
    plain, model = zoo.build(model_type), zoo.build(model_type, **options)
    ids = torch.arange(3, 14)[None]
    weights = [dict(m.named_parameters()) for m in (plain, model)]
    same = weights[0].keys() == weights[1].keys()
    assert not (same and torch.equal(plain(input_ids=ids).logits, model(input_ids=ids).logits)), "does nothing"
    try:
        found = measure_model(model)
    except UnsupportedModel:
        return
    assert found.worst <= found.limit, found
