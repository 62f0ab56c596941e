"""Checkpoint folders, loaded by plain transformers and by safetensors."""

from __future__ import annotations

import json

import pytest
import torch
from patches import fold, sign
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import zoo
from conformance import gap
from contextfold.errors import PatchMismatch
from contextfold.export import Checkpoint, Source, check, export
from contextfold.runtime import run
from tiny import bits


def stored(folder):
    """Every tensor of the model files, as safetensors reads them."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("model_type", zoo.TWELVE)
def test_every_family_loads_and_answers_as_with_its_context(model_type, tmp_path):
    bound, folded = fold(model_type)
    before = bits(bound.model)
    out = tmp_path / "model"
    proof = export(Source(bound, folded.patch), Checkpoint(), out)
    assert proof.proven, proof.sentence()
    assert bits(bound.model) == before
    loaded = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    assert type(loaded) is type(bound.model)
    if hasattr(loaded, "set_experts_implementation"):
        loaded.set_experts_implementation("eager")
    reduced, wanted = folded.split.reduced, folded.in_context
    unpatched = gap(run(bound.model, reduced)[0], wanted)
    assert unpatched > 1e-2
    assert gap(run(loaded, reduced)[0], wanted) < 1e-3 * unpatched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_untouched_tensors_are_the_same_bits_and_touched_ones_are_the_sum(dtype, tmp_path):
    bound, folded = fold("gemma3_text", dtype)
    bound.model.save_pretrained(tmp_path / "base")
    assert export(Source(bound, folded.patch), Checkpoint(), tmp_path / "model").proven
    base, found = stored(tmp_path / "base"), stored(tmp_path / "model")
    assert base.keys() == found.keys()
    touched = {f"{site.module}.{site.parameter}": (site, edit) for site, edit in folded.patch.edits.items()}
    assert touched.keys() <= base.keys()
    for name, tensor in found.items():
        assert tensor.dtype == base[name].dtype == dtype
        assert torch.equal(tensor, base[name]) == (name not in touched)
    if dtype == torch.float64:
        assert not (tmp_path / "model" / "rounding").exists()
        return
    lost = load_file(tmp_path / "model" / "rounding" / "lost.safetensors")
    assert lost.keys() == touched.keys()
    for name, (site, edit) in touched.items():
        exact = edit.merged(base[name].double(), site)
        assert lost[name].dtype == torch.float32
        assert torch.allclose(found[name].double() + lost[name].double(), exact, rtol=1e-9, atol=1e-12)
        assert float(lost[name].abs().max()) > 0


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_tied_embeddings_stay_tied(model_type, tmp_path):
    bound, folded = fold(model_type, tie_word_embeddings=True)
    assert export(Source(bound, folded.patch), Checkpoint(), tmp_path / "model").proven
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert "lm_head.weight" not in stored(tmp_path / "model")


def test_shards_have_an_index_and_load(tmp_path):
    bound, folded = fold("llama")
    assert export(Source(bound, folded.patch), Checkpoint(shard_size="50KB"), tmp_path / "model").proven
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2


def test_the_tokenizer_and_its_template_come_along(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", chat_template="{{ messages }}")
    bound, folded = fold("llama")
    source = Source(bound, folded.patch, save_tokenizer=tokenizer.save_pretrained)
    assert export(source, Checkpoint(), tmp_path / "model").proven
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (again.get_vocab(), again.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)


def test_nothing_in_the_folder_is_a_pickle(tmp_path):
    bound, folded = fold("llama", torch.bfloat16)
    export(Source(bound, folded.patch), Checkpoint(), tmp_path / "model")
    names = {path.suffix for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert names <= {".json", ".safetensors", ".md"}


# --- the door can fail ------------------------------------------------------------------------------------------


def test_a_changed_weight_is_counted(tmp_path):
    bound, folded = fold("llama")
    source = Source(bound, folded.patch)
    assert export(source, Checkpoint(), tmp_path / "model").proven
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name][0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    sign(tmp_path / "model")
    proof = check(source, Checkpoint(), tmp_path / "model")
    assert not proof.proven
    assert (proof.matched, proof.missing) == (proof.expected - 1, (name,))


def test_an_unpatched_checkpoint_is_not_ours(tmp_path):
    bound, folded = fold("llama")
    source = Source(bound, folded.patch)
    assert export(source, Checkpoint(), tmp_path / "model").proven
    bound.model.save_pretrained(tmp_path / "model")
    sign(tmp_path / "model")
    proof = check(source, Checkpoint(), tmp_path / "model")
    assert not proof.proven
    assert proof.logit_gap > 100 * proof.rounding_gap


def test_a_patch_of_other_weights_is_refused(tmp_path):
    _, folded = fold("llama")
    other, _ = fold("llama", seed=1)
    with pytest.raises(PatchMismatch):
        export(Source(other, folded.patch), Checkpoint(), tmp_path / "model")
