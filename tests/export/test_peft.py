"""PEFT folders, loaded by PEFT: every family, every kind of edit, every rank, and every mistake seen."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace

import pytest
import torch
from patches import baked, fold, random_edits, sign
from safetensors.torch import load_file, save_file

import zoo
from conformance import gap
from contextfold.errors import InputError, NotExportable, PatchMismatch
from contextfold.export import SERVED_RANKS, PeftFolder, Source, check, export
from contextfold.export import peft as peft_module
from contextfold.patch import BiasEdit, MatrixEdit, Site
from contextfold.runtime import run

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def load(bound, folder):
    """The oracle: PEFT itself, on a copy of the model."""
    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(bound.model), str(folder)).eval()


def settings(folder):
    return json.loads((folder / CONFIG).read_text())


@pytest.mark.parametrize("model_type", zoo.TWELVE)
def test_every_family_loads_and_answers_as_with_its_context(model_type, tmp_path):
    bound, folded = fold(model_type)
    out = tmp_path / "adapter"
    proof = export(Source(bound, folded.patch), PeftFolder(), out)
    assert proof.proven, proof.sentence()
    assert proof.matched == proof.expected > 0
    reduced, wanted = folded.split.reduced, folded.in_context
    found = run(load(bound, out).get_base_model(), reduced)[0]
    unpatched = gap(run(bound.model, reduced)[0], wanted)
    assert unpatched > 1e-2
    assert gap(found, wanted) < 1e-3 * unpatched


@pytest.mark.parametrize("model_type", ["laguna", "longcat_flash"])
def test_names_that_loaders_rename_come_back(model_type, tmp_path):
    """One type stores its shared experts under another name; the other has dense maps named like experts of old."""
    bound, folded = fold(model_type)
    proof = export(Source(bound, folded.patch), PeftFolder(), tmp_path / "adapter")
    assert proof.proven, proof.sentence()
    reduced, wanted = folded.split.reduced, folded.in_context
    unpatched = gap(run(bound.model, reduced)[0], wanted)
    assert gap(run(load(bound, tmp_path / "adapter").get_base_model(), reduced)[0], wanted) < 1e-3 * unpatched
    names = load_file(tmp_path / "adapter" / WEIGHTS)
    assert any(".mlp.shared_expert." in name for name in names) == (model_type == "laguna")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "qwen2_moe"])
def test_other_dtypes(model_type, dtype, tmp_path):
    bound, folded = fold(model_type, dtype)
    proof = export(Source(bound, folded.patch), PeftFolder(), tmp_path / "adapter")
    assert proof.proven, proof.sentence()


def test_pairs_have_scaling_one_whatever_their_rank(llama, tmp_path):
    bound, folded = llama
    ranks = {site: 1 + 2 * site.layer for site in random_edits(bound, 1)}
    patch = replace(folded.patch, edits={site: random_edits(bound, rank)[site] for site, rank in ranks.items()})
    assert export(Source(bound, patch), PeftFolder(), tmp_path / "adapter").proven
    found = settings(tmp_path / "adapter")
    assert (found["r"], found["lora_alpha"], found["use_rslora"]) == (max(ranks.values()), max(ranks.values()), False)
    assert found["rank_pattern"] == found["alpha_pattern"] != {}
    from peft.tuners.lora import LoraLayer

    layers = [module for module in load(bound, tmp_path / "adapter").modules() if isinstance(module, LoraLayer)]
    assert {layer.scaling["default"] for layer in layers} == {1.0}
    assert sorted(layer.r["default"] for layer in layers) == sorted(ranks.values())


def test_merging_in_peft_gives_the_written_weights(llama, tmp_path):
    bound, folded = llama
    export(Source(bound, folded.patch), PeftFolder(), tmp_path / "adapter")
    merged = load(bound, tmp_path / "adapter").merge_and_unload()
    for site, edit in folded.patch.edits.items():
        stored = bound.model.get_submodule(site.module).get_parameter(site.parameter)
        found = merged.get_submodule(site.module).get_parameter(site.parameter)
        assert torch.allclose(found, edit.merged(stored, site), rtol=1e-5, atol=1e-6)


def test_transposed_weights(tmp_path):
    bound, folded = fold("gpt2")
    export(Source(bound, folded.patch), PeftFolder(), tmp_path / "adapter")
    assert settings(tmp_path / "adapter")["fan_in_fan_out"] is True


def test_scales_are_saved_whole_or_refused(gemma, tmp_path):
    bound, folded = gemma
    assert export(Source(bound, folded.patch), PeftFolder(), tmp_path / "adapter").proven
    norms = settings(tmp_path / "adapter")["modules_to_save"]
    assert norms == sorted(block.norm_post.site.module for block in bound.blocks)
    with pytest.raises(NotExportable, match=r"norm scales, .*post_feedforward_layernorm.*checkpoint"):
        export(Source(bound, folded.patch), PeftFolder(lora_only=True), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_biases_are_added_or_refused(llama, tmp_path):
    bound, folded = llama
    linear = bound.blocks[1].output_map
    site = Site(1, linear.site.module, "bias")
    delta = torch.linspace(-1, 1, linear.weight.shape[0])
    patch = replace(folded.patch, edits={**folded.patch.edits, site: BiasEdit(delta)})
    proof = export(Source(bound, patch), PeftFolder(), tmp_path / "adapter")
    assert proof.proven, proof.sentence()
    base = load(bound, tmp_path / "adapter").get_base_model()
    assert torch.equal(base.get_submodule(site.module).lora_B["default"].bias, delta)
    with pytest.raises(NotExportable, match="biases"):
        export(Source(bound, patch), PeftFolder(lora_only=True), tmp_path / "other")
    alone = replace(folded.patch, edits={site: BiasEdit(delta)})
    assert export(Source(bound, alone), PeftFolder(), tmp_path / "alone").proven


def test_an_edit_of_gate_alone_brings_up_along(llama, tmp_path):
    bound, folded = llama
    gate, up = bound.blocks[0].input_maps
    edits = {gate.site: folded.patch.edits[gate.site]}
    assert export(Source(bound, replace(folded.patch, edits=edits)), PeftFolder(), tmp_path / "adapter").proven
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    pair = [tensors[f"base_model.model.{up.site.module}.lora_{part}.weight"] for part in "AB"]
    assert [t.count_nonzero().item() for t in pair] == [0, 0]


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (20, 32), (33, 64)])
def test_a_uniform_rank_pads_and_changes_nothing(rank, served, llama, tmp_path):
    bound, folded = llama
    patch = baked(bound, folded.patch, rank, attention=True)
    proof = export(Source(bound, patch), PeftFolder(lora_only=True, uniform_rank="auto"), tmp_path / "adapter")
    assert proof.proven, proof.sentence()
    assert proof.losses == {}
    found = settings(tmp_path / "adapter")
    assert (found["r"], found["rank_pattern"]) == (served, {})
    for name, tensor in load_file(tmp_path / "adapter" / WEIGHTS).items():
        assert tensor.shape[0 if ".lora_A." in name else 1] == served


def test_a_smaller_rank_is_the_best_one_and_says_what_it_lost(llama, tmp_path):
    bound, folded = llama
    patch = baked(bound, folded.patch, 20)
    proof = export(Source(bound, patch), PeftFolder(uniform_rank=8), tmp_path / "adapter")
    assert proof.proven, proof.sentence()  # the folder holds what was cut, exactly
    assert proof.cut_gap > proof.rounding_gap  # which is not the patch
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    for site, edit in patch.edits.items():
        dense = edit.delta.to_dense().double()
        tail = torch.linalg.svdvals(dense)[8:]
        B, A = (tensors[f"base_model.model.{site.module}.lora_{part}.weight"].double() for part in "BA")
        assert float((dense - B @ A).norm()) == pytest.approx(float(tail.norm()), rel=1e-4)
        assert proof.losses[site.name] == pytest.approx(float(tail.norm() / dense.norm()), rel=1e-4)


def test_ranks_that_no_server_takes_are_refused():
    for rank in (0, 4, 1024):
        with pytest.raises(InputError, match=", ".join(map(str, SERVED_RANKS))):
            PeftFolder(uniform_rank=rank)


def test_experts_in_one_matrix_are_refused_by_name(tmp_path):
    bound, folded = fold("dbrx")
    with pytest.raises(NotExportable, match=r"peft .* does not take this patch .*; export a checkpoint"):
        export(Source(bound, folded.patch), PeftFolder(), tmp_path / "adapter")
    with pytest.raises(NotExportable, match=r"ffn\.experts\.mlp\.\w+ holds several experts in one matrix"):
        export(Source(bound, folded.patch), PeftFolder(uniform_rank=1), tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_patch_without_a_matrix_is_refused(gemma, tmp_path):
    bound, folded = gemma
    scales = {site: edit for site, edit in folded.patch.edits.items() if not isinstance(edit, MatrixEdit)}
    with pytest.raises(NotExportable, match="no matrix"):
        export(Source(bound, replace(folded.patch, edits=scales)), PeftFolder(), tmp_path / "adapter")


def test_without_peft_the_message_says_what_to_install(llama, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"contextfold\[peft\]"):
        export(Source(llama[0], llama[1].patch), PeftFolder(), tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


# --- the door can fail ------------------------------------------------------------------------------------------


@pytest.fixture
def written(llama, tmp_path):
    bound, folded = llama
    assert export(Source(bound, folded.patch), PeftFolder(), tmp_path / "adapter").proven
    return tmp_path / "adapter"


def spoil(folder, change):
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors), folder / WEIGHTS)
    sign(folder)


def test_a_missing_pair_is_counted(llama, written):
    bound, folded = llama
    gone = bound.blocks[2].output_map.site.module
    spoil(written, lambda tensors: {name: t for name, t in tensors.items() if gone not in name})
    proof = check(Source(bound, folded.patch), PeftFolder(), written)
    assert not proof.proven
    assert (proof.matched, proof.missing) == (proof.expected - 1, (f"{gone}.weight",))


def test_other_names_are_not_silently_ignored(llama, written):
    bound, folded = llama
    spoil(written, lambda tensors: {name.replace("model.layers", "layers"): t for name, t in tensors.items()})
    proof = check(Source(bound, folded.patch), PeftFolder(), written)
    assert not proof.proven
    assert proof.matched == 0


def test_a_wrong_sign_is_seen(llama, written):
    bound, folded = llama
    spoil(written, lambda tensors: {name: -t if ".lora_B." in name else t for name, t in tensors.items()})
    proof = check(Source(bound, folded.patch), PeftFolder(), written)
    assert not proof.proven
    assert proof.logit_gap > 100 * proof.rounding_gap


def test_a_wrong_scaling_is_seen(llama, tmp_path, monkeypatch):
    bound, folded = llama
    right = peft_module._settings

    def wrong(*args):
        return {**right(*args), "lora_alpha": 2 * right(*args)["r"]}

    monkeypatch.setattr(peft_module, "_settings", wrong)
    proof = export(Source(bound, folded.patch), PeftFolder(), tmp_path / "adapter")
    assert (proof.matched, proof.proven) == (proof.expected, False)


def test_a_patch_that_does_nothing_proves_nothing(llama, tmp_path):
    bound, folded = llama
    proof = export(Source(bound, folded.patch * 0.0), PeftFolder(), tmp_path / "adapter")
    assert not proof.proven
    assert "without patch" in proof.sentence()
    assert list(tmp_path.iterdir()) == []


def test_a_changed_file_is_named(llama, written):
    bound, folded = llama
    (written / CONFIG).write_text("{}")
    with pytest.raises(InputError, match=CONFIG):
        check(Source(bound, folded.patch), PeftFolder(), written)


def test_a_patch_of_another_model_is_refused(llama, gemma, tmp_path):
    with pytest.raises(PatchMismatch):
        export(Source(gemma[0], llama[1].patch), PeftFolder(), tmp_path / "adapter")
