"""Whatever a patch file says, an export ends in a typed error or in a folder, and never outside of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patches import PROOF
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from contextfold import patchfile
from contextfold.errors import ContextfoldError
from contextfold.export import Checkpoint, PeftFolder, Source
from contextfold.export.card import write_card
from contextfold.export.folder import staged
from contextfold.patch import Site
from contextfold.runtime import check_match

EVIL = st.sampled_from(
    ["", ".", "..", "../../evil", "/tmp/evil", "a/b", "model.layers.0", "model.layers.0..mlp", "lm_head", "\x00"]
)
NAMES = EVIL | st.text(max_size=12)


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    return patchfile.save(llama[1].patch, tmp_path_factory.mktemp("patch") / "patch.safetensors")


def rewritten(saved, path, change):
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    sites, header = json.loads(metadata["sites"]), json.loads(metadata["header"])
    change(sites, header)
    save_file(load_file(saved), path, metadata={**metadata, "sites": json.dumps(sites), "header": json.dumps(header)})
    return path


@given(
    at=st.integers(0, 8),
    key=st.sampled_from(["module", "parameter", "layer", "transposed", "expert", "experts"]),
    value=NAMES | st.integers(-3, 9) | st.booleans() | st.none(),
    header=st.dictionaries(st.sampled_from(["kind", "context_digest", "plan", "exact_at"]), NAMES, max_size=2),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("exporter", [PeftFolder(), Checkpoint()])
def test_fuzzed_headers(exporter, at, key, value, header, saved, llama, tmp_path):
    bound, _ = llama

    def change(sites, found):
        sites[at % len(sites)][key] = value
        found.update({k: [v] if k == "plan" else v for k, v in header.items()})

    path = rewritten(saved, tmp_path / "patch.safetensors", change)
    before = {p.name for p in tmp_path.parent.iterdir()}
    try:
        patch = patchfile.load(path)
        check_match(bound.model, bound.fingerprint, patch)
        source = Source(bound, patch, name="../../evil", command="../../evil")
        with staged(tmp_path / "folder") as stage:
            write_card(source, exporter, stage.path, exporter.write(source, stage.path), PROOF)
            stage.publish()
    except ContextfoldError:
        assert not (tmp_path / "folder").exists() or _is_earlier(tmp_path / "folder")
    assert {p.name for p in tmp_path.iterdir()} <= {"patch.safetensors", "folder"}
    assert {p.name for p in tmp_path.parent.iterdir()} == before
    files = {p.name for p in (tmp_path / "folder").rglob("*")} if (tmp_path / "folder").exists() else set()
    assert files <= {
        "adapter_config.json", "adapter_model.safetensors", "README.md", "receipt.json", "config.json",
        "generation_config.json", "model.safetensors",
    }  # fmt: skip


def _is_earlier(folder):
    """An earlier example of the same test wrote it."""
    return (folder / "receipt.json").is_file()


@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_an_embedding_is_no_place_for_a_pair_of_another_shape(module, llama, saved, tmp_path):
    def change(sites, header):
        sites[0]["module"] = module

    patch = patchfile.load(rewritten(saved, tmp_path / "patch.safetensors", change))
    assert Site(0, module) in patch.edits
    with pytest.raises(ContextfoldError, match="shape"):
        check_match(llama[0].model, llama[0].fingerprint, patch)
