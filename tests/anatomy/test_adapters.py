"""Models that PEFT has wrapped: a fold counts the adapter in, is written beneath it, and leaves both as they were."""

from __future__ import annotations

import copy

import pytest
import torch

import zoo
from conformance import gap, tokens
from contextfold.anatomy import bind
from contextfold.errors import NotExportable, PatchMismatch, UnsupportedModel
from contextfold.export import Checkpoint, PeftFolder, Source, export
from contextfold.fold import fold_sequence, fold_token
from contextfold.forms import expressions
from contextfold.runtime import applied, materialised, run
from tiny import bits, build

peft = pytest.importorskip("peft")

MAPS = ["gate_proj", "down_proj", "q_proj", "o_proj"]


def wrapped(model_type="llama", dtype=torch.float64, targets=MAPS, **options):
    """A tiny model under a LoRA that is not zero, and the model as it was."""
    model = build(model_type, dtype)
    before = copy.deepcopy(model)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, **options)
    torch.manual_seed(7)
    return peft.get_peft_model(model, settings).eval(), before


def merged(model):
    """The oracle: PEFT's own sum of weights and adapters, a plain model."""
    return copy.deepcopy(model).merge_and_unload().eval()


def ids(model):
    return tokens(model.get_base_model(), 9, 3), tokens(model.get_base_model(), 6, 103)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("way", [materialised, applied], ids=["materialised", "applied"])
def test_a_fold_under_an_adapter_equals_the_adapted_model_with_its_context(model_type, way):
    model, before = wrapped(model_type)
    inside = bits(model)
    folded = fold_token(model, *ids(model), written=way is materialised)
    reduced, limit = folded.split.reduced, 1e-10 if model_type == "llama" else 1e-6
    wanted = run(merged(model), folded.split.full)[0]  # by weights that PEFT has added up
    unpatched = gap(run(model, reduced)[0], wanted)
    assert unpatched > 1e-2
    assert gap(run(before, folded.split.full)[0], wanted) > 1e-2  # the adapter matters
    with way(model, folded.patch) as patched:
        assert patched is model
        assert gap(run(model, reduced)[0], wanted) <= limit * unpatched
        through = model(input_ids=reduced.ids[None], position_ids=reduced.positions[None],
                        attention_mask=torch.ones(1, reduced.ids.numel())).logits[0, -1]  # fmt: skip
        assert gap(through, wanted) <= limit * unpatched
    assert bits(model) == inside
    assert bits(model.unload()) == bits(before)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_the_weights_that_are_read_are_those_that_peft_would_merge(model_type):
    model, _ = wrapped(model_type)
    one, other = bind(model), bind(merged(model))
    for block, plain in zip(one.blocks, other.blocks, strict=True):
        for mine, theirs in zip(block.maps, plain.maps, strict=True):
            assert torch.allclose(mine.weight, theirs.weight, rtol=0, atol=1e-12)
    assert expressions(one) == expressions(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes_bind(dtype):
    assert bind(wrapped(dtype=dtype)[0]).dtype == dtype


def test_a_whole_sequence_under_an_adapter():
    model, _ = wrapped()
    folded = fold_sequence(bind(model), *ids(model))
    n = folded.in_context.shape[0]
    unpatched = gap(run(model, folded.split.reduced, last=n), folded.in_context)
    with materialised(model, folded.patch):
        assert gap(run(model, folded.split.reduced, last=n), folded.in_context) <= 1e-8 * unpatched


def test_transposed_maps_under_an_adapter():
    model = zoo.build("gpt2")
    settings = peft.LoraConfig(r=2, target_modules=["c_fc", "c_proj"], fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(model, settings).eval()
    folded = fold_token(model, *ids(model))
    wanted = run(merged(model), folded.split.full)[0]
    unpatched = gap(run(model, folded.split.reduced)[0], wanted)
    with materialised(model, folded.patch):
        assert gap(run(model, folded.split.reduced)[0], wanted) <= 1e-9 * unpatched


def test_norms_and_biases_of_an_adapter_count_too():
    model, _ = wrapped("gemma3_text", modules_to_save=["post_feedforward_layernorm"])
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    before = bits(model)
    folded = fold_token(model, *ids(model))
    assert any(".modules_to_save.default" in site.module for site in folded.patch.edits)
    wanted = run(merged(model), folded.split.full)[0]
    unpatched = gap(run(model, folded.split.reduced)[0], wanted)
    with materialised(model, folded.patch):
        assert gap(run(model, folded.split.reduced)[0], wanted) <= 1e-6 * unpatched
    assert bits(model) == before
    biased, _ = wrapped(targets=["down_proj"], lora_bias=True)
    for name, parameter in biased.named_parameters():
        if name.endswith("lora_B.default.bias"):
            parameter.data += torch.randn_like(parameter)
    folded = fold_token(biased, *ids(biased))
    with materialised(biased, folded.patch):
        assert gap(run(biased, folded.split.reduced)[0], folded.in_context) <= 1e-9


def test_a_patch_belongs_to_the_adapters_that_acted():
    model, _ = wrapped()
    patch = fold_token(model, *ids(model)).patch
    with model.disable_adapter(), pytest.raises(PatchMismatch, match="fold again"), applied(model, patch):
        pass
    with applied(model, patch):
        pass
    layer = next(m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer))
    layer.set_scale("default", 0.5)
    with pytest.raises(PatchMismatch, match="fold again"), applied(model, patch):
        pass


def test_adapters_that_were_put_in_need_no_wrapper():
    model = build("llama")
    before = bits(model)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False), model)
    model.eval()
    folded = fold_token(model, tokens(model, 9, 3), tokens(model, 6, 103))
    unpatched = gap(run(model, folded.split.reduced)[0], folded.in_context)
    with materialised(model, folded.patch):
        assert gap(run(model, folded.split.reduced)[0], folded.in_context) <= 1e-10 * unpatched
    left = {name.replace(".base_layer", ""): value for name, value in bits(model).items() if "lora_" not in name}
    assert left == before


def test_switched_off_adapters_are_not_there():
    model, before = wrapped()
    with model.disable_adapter():
        folded = fold_token(model, *ids(model))
        with materialised(model, folded.patch):
            found = run(model, folded.split.reduced)[0]
    wanted = run(before, folded.split.full)[0]
    assert gap(found, wanted) <= 1e-10 * gap(run(before, folded.split.reduced)[0], wanted)


def dora():
    return wrapped(use_dora=True)[0]


def ia3():
    settings = peft.IA3Config(target_modules=MAPS, feedforward_modules=["down_proj"], init_ia3_weights=False)
    torch.manual_seed(7)
    return peft.get_peft_model(build("llama"), settings).eval()


@pytest.mark.parametrize("adapted", [dora, ia3])
def test_an_adapter_that_acts_on_the_weight_itself_takes_actions_only(adapted):
    """DoRA divides by the norm of the edited weight, IA3 scales what is read or given: an edit inside is not added."""
    model = adapted()
    with pytest.raises(UnsupportedModel, match=r"gate_proj\.weight of a Linear is quantised or wrapped.*written=False"):
        fold_token(model, *ids(model))
    folded = fold_token(model, *ids(model), written=False)
    unpatched = gap(run(model, folded.split.reduced)[0], folded.in_context)
    assert unpatched > 1e-2
    with applied(model, folded.patch):
        assert gap(run(model, folded.split.reduced)[0], folded.in_context) <= 1e-9 * unpatched


def test_what_pretends_to_add_up_is_refused():
    model, _ = wrapped()
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    plain = layer.base_layer.weight.data.clone()

    def stiff(x):
        """The right output for these weights, whatever is written into them."""
        return torch.nn.functional.linear(x, plain + layer.get_delta_weight("default"), layer.base_layer.bias)

    layer.forward = stiff
    with pytest.raises(UnsupportedModel, match=r"down_proj\.\w+ after an edit is not W x \+ b and the edit"):
        bind(model)


def test_adapters_outside_the_maps_are_refused_by_name():
    model = build("llama", torch.float32)
    prompt = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with pytest.raises(UnsupportedModel, match="adapter 'default' is of type PROMPT_TUNING and acts in the call"):
        bind(prompt)


def test_dropout_that_is_on_is_refused():
    model = build("llama", torch.float32)
    settings = peft.LoraConfig(r=2, target_modules=["down_proj"], lora_dropout=0.1, init_lora_weights=False)
    with pytest.raises(UnsupportedModel, match=r"lora_dropout\.default is in training mode.*eval"):
        bind(peft.get_peft_model(model, settings))


def test_experts_under_an_adapter_are_refused():
    model = zoo.build("qwen2_moe")
    settings = peft.LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"], init_lora_weights=False)
    with pytest.raises(UnsupportedModel, match=r"has no mlp\.experts\.\S+, .* PEFT has wrapped .* merge"):
        bind(peft.get_peft_model(model, settings).eval())


def test_a_patch_on_an_adapted_model_is_not_exported(tmp_path):
    model, _ = wrapped(dtype=torch.float32)
    source = Source(bind(model), fold_token(model, *ids(model)).patch)
    for exporter in (PeftFolder(), Checkpoint()):
        with pytest.raises(NotExportable, match=r"is wrapped by PEFT.*merge_and_unload"):
            export(source, exporter, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    plain = merged(model)
    folded = fold_token(plain, *ids(model))
    assert export(Source(bind(plain), folded.patch), PeftFolder(), tmp_path / "out").proven
