"""Exports of models whose weights stay in their files: proven by the same loaders, the files left as they are."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from contextfold import ceiling, models
from contextfold.anatomy import bind
from contextfold.export import Checkpoint, GgufAdapter, PeftFolder, Source, check, export
from contextfold.fold import fold_token
from tiny import build, letters, tokens

pytest.importorskip("accelerate")


@pytest.fixture
def both(tmp_path, monkeypatch):
    """The same model from its files and in memory, a patch of it, and the folder that it comes from."""
    monkeypatch.setattr(ceiling, "_kept", lambda *_: set())

    def load(model_type, dtype=torch.float32):
        folder = tmp_path / "model"
        build(model_type, dtype).save_pretrained(folder, max_shard_size="20KB")
        letters().save_pretrained(folder)
        kept = bind(models.load(str(folder), dtype=dtype, max_memory=2**50).model)
        plain = bind(models.load(str(folder), dtype=dtype).model)
        return Source(kept, fold_token(kept, tokens(9), tokens(6, 2)).patch), plain, folder

    return load


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def away(bound):
    return [name for name, p in bound.model.named_parameters(remove_duplicate=False) if p.device.type == "meta"]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_peft_folder_is_proven_and_the_model_of_its_files_is_not_touched(both, model_type, tmp_path):
    """PEFT itself renames tensors in the files of a model that it is given with a map of devices."""
    source, plain, folder = both(model_type)
    before, elsewhere = digests(folder), away(source.bound)
    proof = export(source, PeftFolder(), tmp_path / "kept")
    assert proof.proven, proof.sentence()
    assert digests(folder) == before
    assert away(source.bound) == elsewhere
    assert export(Source(plain, source.patch), PeftFolder(), tmp_path / "plain").proven
    found, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("kept", "plain"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert proof.base_gap > 100 * proof.logit_gap


def test_a_peft_folder_with_a_wrong_sign_is_not_proven(both, tmp_path):
    source, _, _ = both("llama")
    assert export(source, PeftFolder(), tmp_path / "out").proven
    turned = check(Source(source.bound, source.patch * -1), PeftFolder(), tmp_path / "out")
    assert not turned.proven
    assert turned.matched < turned.expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_is_written_file_by_file_with_what_rounding_took(both, dtype, tmp_path):
    source, plain, folder = both("llama", dtype)
    before = digests(folder)
    for name, each in (("kept", source), ("plain", Source(plain, source.patch))):
        proof = export(each, Checkpoint(), tmp_path / name)
        assert proof.proven, proof.sentence()
        assert proof.logit_gap == 0
    assert digests(folder) == before
    files = sorted((tmp_path / "kept").glob("*.safetensors"))
    found = {key: value for file in files for key, value in load_file(file).items()}
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    most = max(value.numel() * value.element_size() for value in wanted.values())
    assert len(files) > 1
    assert all(sum(v.numel() * v.element_size() for v in load_file(file).values()) <= most for file in files)
    lost = tmp_path / "kept" / "rounding" / "lost.safetensors"
    assert lost.exists() == (dtype is torch.bfloat16)
    if lost.exists():
        with safe_open(lost, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
        exact = {f"{site.module}.{site.parameter}": edit for site, edit in source.patch.edits.items()}
        assert load_file(lost).keys() == exact.keys()
        for name, part in load_file(lost).items():
            edit = exact[name]
            W = plain.model.get_parameter(name).double()
            dense = edit.delta.B.double() @ edit.delta.A.double()
            torch.testing.assert_close(wanted[name].double() + part.double(), W + dense, rtol=0, atol=1e-7)
            assert part.abs().max() > 1e-5


def test_a_checkpoint_with_another_tensor_is_not_proven(both, tmp_path):
    source, _, _ = both("llama")
    assert export(source, Checkpoint(), tmp_path / "out").proven
    turned = check(Source(source.bound, source.patch * -1), Checkpoint(), tmp_path / "out")
    assert not turned.proven
    assert set(turned.missing) == {f"{site.module}.{site.parameter}" for site in source.patch.edits}


def test_a_gguf_adapter_needs_no_second_model(both, tmp_path):
    pytest.importorskip("gguf")
    source, _, _ = both("llama")
    assert export(source, GgufAdapter(), tmp_path / "out").proven
