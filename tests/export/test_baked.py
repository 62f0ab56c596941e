"""Baked patches in the programs that they are for: the same answers there, nearer to those with the context."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import tiny
from conformance import gap
from contextfold.anatomy import bind
from contextfold.bake import Frame, answered, bake
from contextfold.export import Checkpoint, PeftFolder, Source, export
from contextfold.runtime import Run, applied, run

FRAME = Frame(tiny.tokens(2, seed=3), tiny.tokens(9, seed=4))


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def baked(request):
    """A bound model, a patch of rank above one, and the examples that it was learnt from."""
    bound = bind(tiny.build(request.param, torch.float32))
    questions = [tiny.tokens(3 + i % 4, seed=50 + i) for i in range(8)]
    examples = answered(bound, FRAME.full, questions, tokens=3)
    return bound, bake(bound, FRAME, examples, lam0=1e-4, batch=8).patch, examples


def answers(model, examples, before):
    """Logits of every answer, `before` standing in front of the question."""
    found = []
    for example in examples:
        ids = torch.cat([before, example.tail])
        n = example.tail.numel() - example.answer + 1
        found.append(run(model, Run(ids, torch.arange(ids.numel())), last=n))
    return torch.cat(found)


def through_peft(bound, folder):
    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(bound.model), str(folder)).eval().get_base_model()


def through_transformers(bound, folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize(("exporter", "load"), [(PeftFolder(), through_peft), (Checkpoint(), through_transformers)])
def test_a_baked_patch_answers_there_as_here(exporter, load, baked, tmp_path):
    bound, patch, examples = baked
    assert max(edit.delta.rank for edit in patch.edits.values() if hasattr(edit, "delta")) > 1
    proof = export(Source(bound, patch), exporter, tmp_path / "out")
    assert proof.proven, proof.sentence()
    loaded = load(bound, tmp_path / "out")
    wanted, bare = answers(bound.model, examples, FRAME.full), answers(bound.model, examples, FRAME.kept)
    with applied(bound, patch) as model:
        ours = answers(model, examples, FRAME.kept)
    theirs = answers(loaded, examples, FRAME.kept)
    assert gap(theirs, ours) < 1e-4 * gap(bare, ours)
    assert gap(bare, ours) > 1e-2
    assert float((theirs - wanted).norm()) < 0.9 * float((bare - wanted).norm())
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert (receipt["patch"]["kind"], receipt["patch"]["exact_at"]) == ("bake", [])
    assert "calibrated" in (tmp_path / "out" / "README.md").read_text()
