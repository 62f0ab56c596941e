"""Patches as values: algebra, immutability, and the file format under attack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from contextfold import patchfile
from contextfold.errors import (
    InputError,
    PatchFileDamaged,
    PatchFileError,
    PatchFileForeign,
    PatchFileNewer,
    PatchMismatch,
)
from contextfold.fold import fold_token
from contextfold.patch import BiasEdit, MatrixEdit, Patch, ScaleEdit, Site
from contextfold.runtime import materialised, run
from tiny import build, shared, tokens

CONTEXT, QUERY = tokens(11), tokens(3, seed=2)


@pytest.fixture(scope="module")
def folded():
    return fold_token(shared("gemma3_text"), CONTEXT, QUERY)


@pytest.fixture
def saved(folded, tmp_path):
    return patchfile.save(folded.patch, tmp_path / "patch.safetensors")


def same(first, second):
    if first.header != second.header or list(first.edits) != list(second.edits):
        return False
    pairs = zip(first.edits.values(), second.edits.values(), strict=True)
    return all(
        torch.equal(a.value, b.value) and torch.equal(a.base, b.base) and a.offset == b.offset
        if isinstance(a, ScaleEdit)
        else torch.equal(a.delta.B, b.delta.B) and torch.equal(a.delta.A, b.delta.A)
        for a, b in pairs
    )


def test_a_patch_survives_the_file(folded, saved):
    sorted_edits = dict(sorted(folded.patch.edits.items()))
    assert same(replace(folded.patch, edits=sorted_edits), patchfile.load(saved))


def test_a_patch_cannot_be_changed(folded):
    with pytest.raises(TypeError):
        folded.patch.edits[next(iter(folded.patch.edits))] = None


def test_half_a_patch_lies_between_and_the_whole_is_itself(folded):
    model, reduced = build("gemma3_text"), folded.split.reduced
    with materialised(model, folded.patch * 1.0):
        whole = run(model, reduced)[0]
    with materialised(model, folded.patch * 0.0):
        none = run(model, reduced)[0]
    assert torch.allclose(whole, folded.in_context, rtol=1e-5, atol=1e-5)
    assert torch.allclose(none, run(model, reduced)[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(whole, none, rtol=1e-2)


def test_patches_of_disjoint_layers_add_up_to_the_whole(folded):
    parts = folded.patch.select([0]) + folded.patch.select([1, 2])
    model = build("gemma3_text")
    with materialised(model, parts):
        assert torch.allclose(run(model, folded.split.reduced)[0], folded.in_context, rtol=1e-5, atol=1e-5)
    assert parts.header.exact_at == ()  # nobody claims exactness for a sum


def test_two_edits_of_one_scale_are_refused(folded):
    with pytest.raises(InputError, match="scales do not add"):
        folded.patch + folded.patch


def test_matrix_edits_add():
    patch = fold_token(shared("llama"), CONTEXT, QUERY).patch
    twice, site = patch + patch, next(iter(patch.edits))
    assert torch.allclose(twice.edits[site].delta.to_dense(), 2 * patch.edits[site].delta.to_dense())


def test_patches_of_two_models_do_not_add(folded):
    with pytest.raises(PatchMismatch):
        folded.patch + fold_token(shared("gemma2"), CONTEXT, QUERY).patch


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3))
def test_a_bias_edit_scales(values):
    edit = BiasEdit(torch.tensor(values, dtype=torch.float64)).scaled(0.5)
    merged = edit.merged(torch.ones(3, dtype=torch.float64), Site(0, "m", "bias"))
    assert torch.allclose(merged, 1 + 0.5 * torch.tensor(values, dtype=torch.float64))


def test_transposed_storage_is_merged_transposed():
    from contextfold.lowrank import LowRank

    delta = LowRank(torch.randn(3, 1), torch.randn(1, 5))
    stored = torch.randn(5, 3)
    merged = MatrixEdit(delta).merged(stored, Site(0, "m", transposed=True))
    assert torch.allclose(merged, stored + delta.to_dense().T)


# --- the file under attack -------------------------------------------------------------------------------------


def test_no_such_file(tmp_path):
    with pytest.raises(InputError, match="no patch file"):
        patchfile.load(tmp_path / "nothing.safetensors")


def test_no_such_folder(folded, tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        patchfile.save(folded.patch, tmp_path / "nowhere" / "patch.safetensors")


def test_a_foreign_file(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(PatchFileForeign, match="not a contextfold patch"):
        patchfile.load(tmp_path / "x.safetensors")


def rewrite(path, **metadata):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        old = file.metadata()
    save_file(load_file(path), path, metadata={**old, **metadata})


def test_a_newer_version(saved):
    rewrite(saved, version="2")
    with pytest.raises(PatchFileNewer, match="upgrade"):
        patchfile.load(saved)


@pytest.mark.parametrize("version", ["", "one", "-1", "1e99", "9" * 400, "٣"])
def test_an_unreadable_version(saved, version):
    rewrite(saved, version=version)
    with pytest.raises(PatchFileDamaged):
        patchfile.load(saved)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_truncation_and_noise_end_in_typed_errors(data, saved_bytes, tmp_path_factory):
    broken = bytearray(saved_bytes)
    if data.draw(st.booleans()):
        broken = broken[: data.draw(st.integers(0, len(broken) - 1))]
    else:
        at = data.draw(st.integers(0, len(broken) - 1))
        broken[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("noise") / "patch.safetensors"
    path.write_bytes(bytes(broken))
    try:
        found = patchfile.load(path)  # a flipped bit inside a tensor is still a number
    except PatchFileError:
        return
    assert isinstance(found, Patch)


@pytest.fixture(scope="module")
def saved_bytes(folded, tmp_path_factory):
    return patchfile.save(folded.patch, tmp_path_factory.mktemp("good") / "patch.safetensors").read_bytes()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(header=JUNK, sites=JUNK)
@settings(max_examples=60, deadline=None)
def test_junk_in_the_header_ends_in_typed_errors(header, sites, saved_bytes, tmp_path_factory):
    path = tmp_path_factory.mktemp("junk") / "patch.safetensors"
    path.write_bytes(saved_bytes)
    rewrite(path, header=json.dumps(header), sites=json.dumps(sites))
    with pytest.raises(PatchFileDamaged):
        patchfile.load(path)


@pytest.mark.parametrize("change", ["edit", "offset", "layer", "extra", "nan", "missing"])
def test_a_header_that_disagrees_with_its_tensors(saved, change):
    from safetensors import safe_open

    with safe_open(saved, framework="pt") as file:
        old = file.metadata()
    sites, tensors = json.loads(old["sites"]), load_file(saved)
    scale = next(i for i, row in enumerate(sites) if row["edit"] == "scale")
    match change:
        case "edit":
            sites[scale]["edit"] = "matrix"
        case "offset":
            sites[scale]["offset"] = 2
        case "layer":
            sites[scale]["layer"] = "0"
        case "extra":
            tensors["99.B"] = torch.zeros(2)
        case "nan":
            tensors[f"{scale}.value"][0] = float("nan")
        case "missing":
            del tensors[f"{scale}.value"]
    save_file(tensors, saved, metadata={**old, "sites": json.dumps(sites)})
    with pytest.raises(PatchFileDamaged):
        patchfile.load(saved)


def test_a_killed_write_leaves_the_old_file(saved):
    """The writer is killed just before the rename: the old file is whole, and can be loaded."""
    before = saved.read_bytes()
    script = (
        "import os, sys; from contextfold import patchfile\n"
        "patch = patchfile.load(sys.argv[1]) * 0.5\n"
        "os.replace = lambda *a: os.kill(os.getpid(), 9)\n"
        "patchfile.save(patch, sys.argv[1])\n"
    )
    died = subprocess.run([sys.executable, "-c", script, str(saved)], env=dict(os.environ), check=False)
    assert died.returncode == -9
    assert saved.read_bytes() == before


def test_a_failed_write_leaves_nothing_behind(folded, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(patchfile, "save_file", full)
    with pytest.raises(InputError, match="No space left"):
        patchfile.save(folded.patch, tmp_path / "patch.safetensors")
    assert list(tmp_path.iterdir()) == []
