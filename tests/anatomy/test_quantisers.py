"""Weights that libraries have quantised, loaded as transformers loads them: a patch acts beside them, exactly.

quanto is always here. torchao is not: transformers imports it whenever it is installed, at two seconds a process; `make
interop-eval` runs this file with it.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModelForCausalLM, QuantoConfig, TorchAoConfig

import zoo
from conformance import gap, tokens
from contextfold.anatomy import bind
from contextfold.errors import NotExportable, PatchMismatch, UnsupportedModel
from contextfold.export import Checkpoint, PeftFolder, Source, export
from contextfold.fold import fold_token
from contextfold.runtime import Decoder, applied, materialised, run


def quanto8():
    return QuantoConfig(weights="int8")


def quanto4():
    return QuantoConfig(weights="int4")


def torchao8():
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def torchao4():
    pytest.importorskip("torchao")
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


BITS = pytest.mark.parametrize("how", [quanto8, quanto4, torchao8, torchao4])


def quantised(tmp_path, how, dtype=torch.float32, model_type="llama"):
    """A tiny model as it was, and the same with its maps quantised."""
    plain = zoo.build(model_type, dtype)
    plain.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=dtype, attn_implementation="eager", quantization_config=how()
    )
    return plain, model.eval()


def ids(model):
    return tokens(model, 9, 3), tokens(model, 6, 103)


@BITS
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=["float32", "bf16"])
def test_a_fold_acts_exactly_within_the_rounding_of_the_quantised_model(how, model_type, dtype, limit, tmp_path):
    plain, model = quantised(tmp_path, how, dtype, model_type)
    bound = bind(model)
    fingerprint = bound.fingerprint
    folded = fold_token(bound, *ids(model), written=False)
    reduced, wanted = folded.split.reduced, run(model, folded.split.full)[0]
    unpatched = gap(run(model, reduced)[0], wanted)
    assert unpatched > 1e-2
    assert gap(run(plain, folded.split.full)[0], wanted) > limit * unpatched  # it is not the plain model that is met
    with applied(model, folded.patch):
        assert gap(run(model, reduced)[0], wanted) <= limit * unpatched
        decoder = Decoder(model)
        decoder.extend(reduced.ids[:-1], reduced.positions[:-1])
        assert gap(decoder.extend(reduced.ids[-1:], reduced.positions[-1:]), wanted) <= limit * unpatched
    assert bind(model).fingerprint == fingerprint
    with pytest.raises(PatchMismatch), applied(plain, folded.patch):
        pass


@BITS
def test_weights_are_what_the_library_dequantises(how, tmp_path):
    _, model = quantised(tmp_path, how)
    for block in bind(model).blocks:
        for linear in block.maps:
            stored = model.get_submodule(linear.site.module).weight
            assert torch.allclose(linear.weight, stored.dequantize(), rtol=0, atol=1e-6)


@BITS
def test_another_code_is_another_digest(how, tmp_path):
    _, model = quantised(tmp_path, how)
    bound = bind(model)
    before = bound.fingerprint
    codes = bound.blocks[1].output_map.module.weight.data
    while is_traceable_wrapper_subclass(codes):
        codes = getattr(codes, codes.__tensor_flatten__()[0][0])
    codes[0, 0] += 1
    assert bind(model).fingerprint != before


@BITS
def test_what_has_to_be_written_is_refused_in_one_line(how, tmp_path):
    _, model = quantised(tmp_path, how)
    message = r"^model\.layers\.\d\.mlp\.\w+\.weight of a \w+ is quantised or wrapped, [^\n]* written=False[^\n]*$"
    with pytest.raises(UnsupportedModel, match=message):
        fold_token(model, *ids(model))
    patch = fold_token(model, *ids(model), written=False).patch
    with pytest.raises(UnsupportedModel, match=message), materialised(model, patch):
        pass
    for exporter in (Checkpoint(), PeftFolder()):
        with pytest.raises(NotExportable, match=r"^model\.layers\.\d\.mlp\.\w+\.weight of a \w+ is quantised, [^\n]*$"):
            export(Source(bind(model), patch), exporter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@BITS
def test_an_adapter_over_quantised_weights_takes_actions(how, tmp_path):
    peft = pytest.importorskip("peft")
    _, model = quantised(tmp_path, how)
    settings = peft.LoraConfig(r=2, target_modules=["down_proj", "gate_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, settings).eval()
    context, query = ids(model.get_base_model())
    folded = fold_token(model, context, query, written=False)
    unpatched = gap(run(model, folded.split.reduced)[0], folded.in_context)
    with model.disable_adapter():
        assert gap(run(model, folded.split.full)[0], folded.in_context) > 1e-2
    with applied(model, folded.patch):
        assert gap(run(model, folded.split.reduced)[0], folded.in_context) <= 1e-5 * unpatched
