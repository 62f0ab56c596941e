"""GGUF adapters, read by the gguf library; what llama.cpp does with them is in `scripts/interop.py`."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
from patches import fold, random_edits

from contextfold.errors import NotExportable
from contextfold.export import GgufAdapter, Source, check, export
from contextfold.patch import MatrixEdit


@pytest.fixture(scope="module")
def plain():
    """A tiny Llama without biases, and a baked patch of ranks 2 and 5 with attention output maps."""
    bound, folded = fold("llama", mlp_bias=False)
    edits = {**random_edits(bound, 5, attention=True), **random_edits(bound, 2)}
    return bound, replace(folded.patch, edits=edits)


def read(folder):
    reader = gguf.GGUFReader(folder / "adapter.gguf")
    return reader, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def test_pairs_stand_under_the_names_of_llama_cpp(plain, tmp_path):
    bound, patch = plain
    proof = export(Source(bound, patch), GgufAdapter(), tmp_path / "adapter")
    assert proof.proven, proof.sentence()
    assert proof.matched == proof.expected == len(patch.edits)
    reader, tensors = read(tmp_path / "adapter")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["general.type"] == "adapter"
    assert fields["adapter.type"] == "lora"
    assert fields["adapter.lora.alpha"] == 5  # the rank of every pair, so the scale is 1
    for site, edit in patch.edits.items():
        word = "attn_output" if "self_attn" in site.module else "ffn_down"
        A, B = (tensors[f"blk.{site.layer}.{word}.weight.lora_{part}"] for part in "ab")
        assert A.shape[0] == B.shape[1] == 5
        assert np.allclose(B @ A, edit.delta.to_dense().numpy(), rtol=1e-5, atol=1e-6)


def test_a_lost_pair_is_counted(plain, tmp_path, monkeypatch):
    bound, patch = plain
    real = gguf.GGUFWriter.add_tensor

    def forgetful(self, name, tensor):
        if "blk.1.ffn_down" not in name:
            real(self, name, tensor)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", forgetful)
    proof = export(Source(bound, patch), GgufAdapter(), tmp_path / "adapter")
    assert not proof.proven
    assert (proof.matched, proof.missing) == (proof.expected - 1, ("model.layers.1.mlp.down_proj.weight",))
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_sign_is_seen(plain, tmp_path):
    bound, patch = plain
    assert export(Source(bound, patch), GgufAdapter(), tmp_path / "adapter").proven
    proof = check(Source(bound, -patch), GgufAdapter(), tmp_path / "adapter")
    assert not proof.proven
    assert proof.matched == 0


def test_what_the_format_cannot_hold_is_refused(gemma, tmp_path):
    bound, folded = gemma
    with pytest.raises(NotExportable, match="norm scales"):
        export(Source(bound, folded.patch), GgufAdapter(), tmp_path / "adapter")


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "qwen2_moe", "gemma3_text"])
def test_families_that_are_not_run_in_llama_cpp_are_refused(model_type, tmp_path):
    bound, folded = fold(model_type)
    edits = {site: edit for site, edit in folded.patch.edits.items() if isinstance(edit, MatrixEdit)}
    with pytest.raises(NotExportable, match=f"llama.*{model_type}"):
        export(Source(bound, replace(folded.patch, edits=edits)), GgufAdapter(), tmp_path / "adapter")


def test_maps_whose_rows_llama_cpp_moves_are_refused(plain, tmp_path):
    bound, patch = plain
    (site, edit) = next((s, e) for s, e in patch.edits.items() if "self_attn" in s.module)
    moved = replace(patch, edits={replace(site, module=site.module.replace("o_proj", "q_proj")): edit})
    with pytest.raises(NotExportable, match="q_proj"):
        export(Source(bound, moved), GgufAdapter(), tmp_path / "adapter")
