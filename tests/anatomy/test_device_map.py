"""Models that accelerate has placed: in memory as ever, and with layers on disk that come for the time of a call."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from conformance import gap, tokens
from contextfold.anatomy import bind, weights_digest
from contextfold.anatomy.discover import discover
from contextfold.errors import NotControllable, UnsupportedModel
from contextfold.fold import fold_sequence, fold_token
from contextfold.forms import expressions
from contextfold.runtime import Decoder, applied, materialised, run
from tiny import bits, build

pytest.importorskip("accelerate")

LAYER = "model.layers.1"


def saved(tmp_path, model):
    model.save_pretrained(tmp_path / "model")
    return model


def placed(tmp_path, device_map):
    """The saved model, placed by transformers and accelerate."""
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype="auto", device_map=device_map, offload_folder=tmp_path / "offload",
        attn_implementation="eager",
    ).eval()  # fmt: skip


def on_disk(model, *names):
    """A device map with these modules on disk and every other one in memory."""
    found = {}
    for name, module in model.named_modules():
        owns = not any(module.children()) or next(module.parameters(recurse=False), None) is not None
        if name in names or (owns and not any(name.startswith(f"{other}.") for other in names)):
            found[name] = "disk" if name in names else "cpu"
    return found


def ids(model):
    return tokens(model, 9, 3), tokens(model, 6, 103)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_model_in_memory_is_one_like_any_other(model_type, device_map, tmp_path):
    plain = saved(tmp_path, build(model_type, torch.float64))
    model = placed(tmp_path, device_map)
    before = bits(model)
    folded = fold_token(model, *ids(model))
    unpatched = gap(run(plain, folded.split.reduced)[0], folded.in_context)
    assert unpatched > 1e-2
    for way in (materialised, applied):
        for each in (model, plain):
            with way(each, folded.patch):
                assert gap(run(each, folded.split.reduced)[0], folded.in_context) <= 1e-6 * unpatched
    assert bits(model) == before


def test_modules_that_are_moved_by_hooks_are_written_too(tmp_path):
    """Nothing is offloaded here, but every module has its forward replaced."""
    from accelerate import dispatch_model

    model = build("llama", torch.float64)
    whole = weights_digest(model)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert weights_digest(model) == whole
    folded = fold_token(model, *ids(model))
    unpatched = gap(run(model, folded.split.reduced)[0], folded.in_context)
    with materialised(model, folded.patch):
        assert gap(run(model, folded.split.reduced)[0], folded.in_context) <= 1e-10 * unpatched


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_patch_acts_on_layers_that_lie_on_disk(model_type, dtype, tmp_path):
    plain = saved(tmp_path, zoo.build(model_type, dtype))
    layer = LAYER if model_type == "llama" else "transformer.h.1"
    model = placed(tmp_path, on_disk(plain, layer, "lm_head") if model_type == "llama" else on_disk(plain, layer))
    away = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    assert any(name.startswith(layer) for name in away)
    assert weights_digest(model) == weights_digest(plain)
    bound = bind(model)
    assert (bound.dtype, bound.device) == (dtype, torch.device("cpu"))
    assert expressions(bound) == expressions(bind(plain))
    folded = fold_token(bound, *ids(model), written=False)
    reduced, wanted = folded.split.reduced, run(plain, folded.split.full)[0]
    unpatched, limit = gap(run(plain, reduced)[0], wanted), 1e-9 if dtype == torch.float64 else 0.1
    assert unpatched > 1e-2
    for each in (model, plain):  # one digest, so the patch of one is the patch of the other
        with applied(each, folded.patch):
            assert gap(run(each, reduced)[0], wanted) <= limit * unpatched
            decoder = Decoder(each)
            decoder.extend(reduced.ids[:-1], reduced.positions[:-1])
            assert gap(decoder.extend(reduced.ids[-1:], reduced.positions[-1:]), wanted) <= limit * unpatched
    assert [name for name, p in model.named_parameters() if p.device.type == "meta"] == away
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_weights_that_come_from_memory_for_a_call():
    """What a map of devices does to layers that do not fit on the GPU."""
    from accelerate import cpu_offload

    model = build("llama", torch.float64)
    whole = weights_digest(model)
    folded = fold_token(model, *ids(model))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(p.device.type == "meta" for p in model.parameters())
    assert weights_digest(model) == whole
    assert fold_token(model, *ids(model), written=False).patch.edits.keys() == folded.patch.edits.keys()
    with applied(model, folded.patch):
        found = run(model, folded.split.reduced)[0]
    assert gap(found, folded.in_context) <= 1e-10 * gap(run(model, folded.split.reduced)[0], folded.in_context)


def test_maps_are_read_as_they_lie_on_disk(tmp_path):
    plain = saved(tmp_path, build("llama", torch.float64))
    model = placed(tmp_path, on_disk(plain, LAYER))
    for mine, theirs in zip(bind(model).blocks[1].maps, bind(plain).blocks[1].maps, strict=True):
        assert torch.equal(mine.weight, theirs.weight)
        assert torch.equal(mine.bias, theirs.bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fold", [fold_token, fold_sequence])
def test_edits_are_written_into_weights_as_they_come_from_the_disk(fold, dtype, tmp_path):
    """The same patch and the same logits, bit for bit, as where every weight is in memory."""
    saved(tmp_path, build("llama", dtype))
    plain = placed(tmp_path, None)
    model = placed(
        tmp_path, on_disk(plain, *(f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down")), "lm_head")
    )
    patch, whole = (fold(each, *ids(each)).patch for each in (model, plain))
    assert patch.edits.keys() == whole.edits.keys()
    for site, edit in patch.edits.items():
        assert torch.equal(edit.delta.B, whole.edits[site].delta.B)
        assert torch.equal(edit.delta.A, whole.edits[site].delta.A)
    reduced = fold(plain, *ids(plain)).split.reduced
    with materialised(model, patch) as patched, materialised(plain, patch) as beside:
        found, wanted = run(patched, reduced), run(beside, reduced)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, run(model, reduced))


def test_a_fingerprint_tells_that_edited_weights_come_from_the_disk(tmp_path):
    plain = saved(tmp_path, build("llama", torch.float64))
    model = placed(tmp_path, on_disk(plain, *(f"model.layers.{k}.mlp" for k in range(3))))
    bound = bind(model)
    before = bound.fingerprint
    patch = fold_token(bound, *ids(model)).patch
    with materialised(bound, patch):
        assert bound.fingerprint not in (before, weights_digest(plain))
        with materialised(plain, patch):
            assert bound.fingerprint == weights_digest(plain)
    assert bound.fingerprint == before == weights_digest(model)


def test_what_does_not_fit_into_the_dtype_is_refused_on_the_disk_too(tmp_path):
    saved(tmp_path, build("llama", torch.float16))
    model = placed(tmp_path, on_disk(build("llama", torch.float16), LAYER))
    patch = fold_token(model, *ids(model)).patch
    with pytest.raises(NotControllable, match=r"entries beyond torch\.float16"), materialised(model, patch * 1e7):
        pass
    assert weights_digest(model) == patch.header.fingerprint


def test_norm_scales_on_disk_are_refused_by_name(tmp_path):
    plain = saved(tmp_path, build("gemma3_text", torch.float64))
    model = placed(tmp_path, on_disk(plain, LAYER))
    message = r"^model\.layers\.1\.post_feedforward_layernorm\S* .*offloaded.*device_map"
    with pytest.raises(UnsupportedModel, match=message):
        bind(model)
    patch = fold_token(plain, *ids(plain)).patch
    with pytest.raises(UnsupportedModel, match=message), applied(model, patch):
        pass
    model = placed(tmp_path, on_disk(plain, f"{LAYER}.mlp", f"{LAYER}.self_attn"))
    folded = fold_token(model, *ids(model), written=False)
    unpatched = gap(run(plain, folded.split.reduced)[0], folded.in_context)
    with applied(model, folded.patch):
        assert gap(run(model, folded.split.reduced)[0], folded.in_context) <= 1e-6 * unpatched


def test_experts_on_disk_are_refused_by_name(tmp_path):
    plain = saved(tmp_path, zoo.build("qwen2_moe", torch.float64))
    model = placed(tmp_path, on_disk(plain, LAYER))
    model.set_experts_implementation("eager")
    with pytest.raises(UnsupportedModel, match=r"^model\.layers\.1\.mlp\.\S+ of a \w+ is quantised, wrapped or offl"):
        bind(model)
    patch = fold_token(plain, *ids(plain)).patch
    with (
        pytest.raises(UnsupportedModel, match=r"^model\.layers\.1\.mlp\S* of a \w+ is offloaded"),
        applied(model, patch),
    ):
        pass


def test_discovery_wants_the_weights_in_memory(tmp_path):
    plain = saved(tmp_path, build("llama", torch.float32))
    with pytest.raises(UnsupportedModel, match=r"^model\.layers\.1\.\S+ has no data .*offloaded.*in memory"):
        discover(placed(tmp_path, on_disk(plain, LAYER)))
