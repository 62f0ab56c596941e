"""Discovery, with no record to look at, finds the sites that the records name, and proves nothing false."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import zoo
from conformance import measure_model
from contextfold.anatomy import bind
from contextfold.anatomy.discover import discover, source
from contextfold.errors import ProbeFailed, UnsupportedModel

MORE = (
    "phi3",
    "falcon",
    "mamba",
    "nemotron_h",
    "longcat_flash",
    "xmod",
    "dbrx",
    "jetmoe",
    "granitemoehybrid",
    "mllama",
    "olmo_hybrid",
    "beam",
    "zaya",
)
"""Fused maps, in-place sums, no MLP, mixed layers, two MLPs, an adapter, packed experts, attention that is a mixture,
two modules in one branch, layers that do not run, two wirings in one stack, multipliers that depend on the depth,
learned biases in the sum and a router that reads the one below."""


@pytest.mark.parametrize("model_type", [*zoo.TWELVE, *MORE])
def test_the_sites_are_those_of_the_record(model_type):
    model = zoo.build(model_type)
    recorded = {site for block in bind(model).blocks for site in block.sites}
    name, model.config.model_type = model.config.model_type, "nobody"
    with pytest.raises(UnsupportedModel, match="nobody"):
        bind(model)
    family = discover(model)
    assert {site for block in bind(model, family).blocks for site in block.sites} == recorded
    model.config.model_type = name
    found = measure_model(model, family)
    assert found.worst <= found.limit


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("hrm_text", "run 6 times"),
        ("dory", "run 2 times"),
        ("zamba2", None),
        ("inkling_text", None),
        ("gemma3n_text", None),
        ("deepseek_v4", None),
        ("prophetnet", None),
        ("blt", None),
        ("rwkv", None),
        ("xlnet", None),
        ("reformer", None),
    ],
)
def test_nothing_false_is_proven(model_type, reason):
    with pytest.raises(UnsupportedModel, match=reason or "."):
        discover(zoo.build(model_type))


def test_a_layer_that_mixes_tokens_behind_the_mlp_is_refused():
    model = zoo.build("llama")

    def mixed(layer, args, output):
        return output + 0.1 * output.roll(1, 1)

    model.model.layers[1].register_forward_hook(mixed)
    with pytest.raises(UnsupportedModel):
        discover(model)


def test_a_second_path_to_the_logits_is_refused():
    """Every block is what it says, but the logits also read the first layer's result."""
    model = zoo.build("llama")
    kept = []
    model.model.layers[0].register_forward_hook(lambda m, a, out: kept.append(out))
    model.model.norm.register_forward_hook(lambda m, a, out: out + kept[-1].roll(1, 1))
    with pytest.raises(ProbeFailed, match="logits"):
        bind(model)


def test_a_record_of_the_wrong_mlp_is_refused():
    """LongCat has two MLPs in a layer; behind the first one another attention follows."""
    model = zoo.build("longcat_flash")
    family = bind(model).family
    sites = family.sites[0]
    wrong = replace(
        sites,
        input_maps=("mlps.0.gate_proj", "mlps.0.up_proj"),
        output_map="mlps.0.down_proj",
        wiring=replace(
            sites.wiring,
            norm_pre="post_attention_layernorm.0",
            residual=(),
            total=replace(sites.wiring.residual[0], module="input_layernorm.1"),
        ),
    )
    with pytest.raises(ProbeFailed, match="function of the finished sum"):
        bind(model, replace(family, sites=(wrong,)))


def test_discovery_leaves_the_model_as_it_was():
    model = zoo.build("gemma4_text")
    before = [p.clone() for p in model.parameters()]
    discover(model)
    assert all(bool((a == b).all()) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def weighed(model, numbers):
    """Every layer's MLP is multiplied by a number that nothing in the layer tells."""
    for layer, number in zip(model.model.layers, numbers, strict=True):
        layer.mlp.forward = partial(lambda plain, number, x: number * plain(x), layer.mlp.forward, number)
    return model


@pytest.mark.parametrize("numbers", [(0.5, 0.25, 2.0, 1.5), (0.5, 1.0, 1.0, 0.25), (0.5,) * 4])
def test_a_multiplier_that_nothing_names_is_measured_in_every_layer(numbers):
    model = weighed(zoo.build("llama"), numbers)
    with pytest.raises(ProbeFailed, match="alpha"):
        bind(model)
    family = discover(model)
    found = [float(block.alpha) for block in bind(model, family).blocks]
    assert found == pytest.approx(numbers, rel=1e-9)
    assert isinstance(family.sites[0].wiring.alpha, float) == (len(set(numbers)) == 1)
    measured = measure_model(model, family)
    assert measured.worst <= measured.limit


def test_a_record_of_one_depth_is_refused_for_a_deeper_model():
    family = discover(weighed(zoo.build("llama"), (0.5, 0.25, 2.0, 1.5)))
    deeper = weighed(zoo.build("llama", num_hidden_layers=5), (0.5, 0.25, 2.0, 1.5, 0.75))
    with pytest.raises(UnsupportedModel, match=r"layers\.4: a multiplier depends on the depth.* 0, 1, 2, 3 only"):
        bind(deeper, family)


def test_a_constant_in_the_sum_that_nothing_holds_is_refused():
    model = zoo.build("llama")
    hidden = torch.linspace(-1, 1, model.config.hidden_size).double()
    model.model.layers[1].register_forward_hook(lambda m, a, out: out + hidden)
    with pytest.raises(UnsupportedModel):
        discover(model)


def test_a_bias_in_the_sum_that_the_layer_holds_is_found():
    model = zoo.build("llama")
    for layer in model.model.layers:
        layer.register_parameter("offset", nn.Parameter(torch.randn(model.config.hidden_size).double()))
        layer.register_forward_hook(lambda m, a, out: out + m.offset)
    family = discover(model)
    assert family.sites[0].wiring.shift == (("offset",),)
    found = measure_model(model, family)
    assert found.worst <= found.limit


def test_a_model_without_layers_is_refused():
    model = zoo.build("llama")
    model.model.layers = nn.ModuleList()
    with pytest.raises(UnsupportedModel, match="no list of layers that run"):
        discover(model)


@pytest.mark.parametrize("model_type", ["nemotron_h", "beam", "zaya"])
def test_the_record_can_be_pasted(model_type):
    from contextfold.anatomy import Dense, Experts, Family, Mixer, Tap, Wiring

    model = zoo.build(model_type)
    family = discover(model)
    names = {kind.__name__: kind for kind in (Dense, Experts, Family, Mixer, Tap, Wiring)}
    assert eval(source(family), names) == family
