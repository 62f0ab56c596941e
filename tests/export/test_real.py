"""The built-in models, exported to every target that can hold their patches."""

from __future__ import annotations

import pytest
import torch

import contextfold as cf
from contextfold import prompts
from contextfold.errors import NotExportable
from contextfold.export import Checkpoint, GgufAdapter, PeftFolder, Source, export

pytestmark = pytest.mark.real

CONTEXT, QUERY = "The lighthouse on Gull Rock has a keeper called Edmund.", " The keeper is called"


def folded(name, dtype):
    loaded = cf.load(name, dtype=dtype)
    bound = cf.bind(loaded.model)
    ids = prompts.encode(loaded.tokenizer, CONTEXT, QUERY)
    patch = cf.fold_token(bound, ids.context, ids.query).patch
    return Source(bound, patch, name=name, save_tokenizer=loaded.tokenizer.save_pretrained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smollm2_goes_everywhere(dtype, tmp_path):
    source = folded("smollm2", dtype)
    for exporter in (PeftFolder(lora_only=True, uniform_rank="auto"), Checkpoint(), GgufAdapter()):
        proof = export(source, exporter, tmp_path / exporter.name)
        assert proof.proven, proof.sentence()
        assert proof.matched == proof.expected >= 90


def test_gemma_takes_its_scales_along_or_is_refused(tmp_path):
    source = folded("gemma3-270m", torch.float32)
    for exporter in (PeftFolder(), Checkpoint()):
        proof = export(source, exporter, tmp_path / exporter.name)
        assert proof.proven, proof.sentence()
    for exporter in (PeftFolder(lora_only=True), GgufAdapter()):
        with pytest.raises(NotExportable, match="norm scales"):
            export(source, exporter, tmp_path / "refused")
