"""Tensor parallelism: two processes hold a part of every map, and fold as one process does."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import contextfold as cf
import processes
from contextfold import patchfile
from contextfold.errors import UnsupportedModel
from contextfold.fold import fold_sequence
from contextfold.patch import MatrixEdit
from tiny import FLOAT32_NORMS, build, letters, tokens

CONTEXT, QUERY = tokens(12), tokens(3, seed=2)
DOORS = {"token": cf.fold_token, "sequence": fold_sequence}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    for kind in processes.KINDS:
        processes.build(kind).save_pretrained(path / kind)
    letters().save_pretrained(path / "sharded")
    return path


@pytest.fixture(scope="module")
def found(folder):
    """What each of two processes found, on every kind of map."""
    return processes.together(folder)


@pytest.fixture(scope="module")
def whole(folder):
    """The same models in one piece."""
    return {kind: cf.bind(processes.load(folder / kind)) for kind in processes.KINDS}


def logits(model, run):
    return cf.run(model, run, QUERY.numel())


def same(first, second, one):
    """The edits of two processes, and those of one."""
    assert first.edits.keys() == second.edits.keys() == one.edits.keys()
    for site, edit in one.edits.items():
        if isinstance(edit, MatrixEdit):
            B, A = first.edits[site].delta.B, first.edits[site].delta.A
            assert torch.equal(B, second.edits[site].delta.B)
            assert torch.equal(A, second.edits[site].delta.A)
            wanted = edit.delta.to_dense()
            assert float((B @ A - wanted).norm()) <= FLOAT32_NORMS * float(wanted.norm())
        else:
            assert torch.equal(first.edits[site].value, second.edits[site].value)
            assert torch.allclose(first.edits[site].value, edit.value, rtol=FLOAT32_NORMS)


@pytest.mark.parametrize("kind", processes.KINDS)
@pytest.mark.parametrize("name", DOORS)
def test_the_model_without_the_context_answers_as_with_it(kind, name, found, whole):
    """The oracle is the model in one piece, with the context in its window."""
    bound = whole[kind]
    at = slice(-1, None) if name == "token" else slice(None)  # where the patch is exact
    parts = cf.split(bound, CONTEXT, QUERY)
    wanted, without = logits(bound.model, parts.full), logits(bound.model, parts.reduced)
    unpatched = float((wanted - without)[at].abs().max())
    assert unpatched > 0.5
    for process in found:
        met = torch.tensor(process[kind][name], dtype=torch.float64)
        assert float((met - wanted)[at].abs().max()) < FLOAT32_NORMS * unpatched


@pytest.mark.parametrize("kind", processes.KINDS)
@pytest.mark.parametrize("name", DOORS)
def test_every_process_has_the_whole_patch_of_one_process(kind, name, found, folder, whole):
    one = DOORS[name](whole[kind], CONTEXT, QUERY, written=processes.FOLDS[name]).patch
    first, second = (patchfile.load(folder / f"{kind}-{name}-{rank}.safetensors") for rank in (0, 1))
    assert first.header == second.header == one.header
    same(first, second, one)


@pytest.mark.parametrize("kind", processes.KINDS)
def test_the_weights_come_back_bit_for_bit_and_have_the_digest_of_the_whole(kind, found, whole):
    for process in found:
        met = process[kind]
        assert met["fingerprint"] == whole[kind].fingerprint
        assert not met["token, same bits meanwhile"], "it was written"
        assert met["token, same bits"]
        assert met["sequence, same bits"]


@pytest.mark.parametrize("kind", processes.KINDS)
def test_the_verdict_is_that_of_one_process(kind, found, whole):
    one = cf.fold_and_prove(whole[kind], cf.Prompt(CONTEXT, QUERY))[1]
    for process in found:
        met = process[kind]
        assert met["proven"]
        assert one.proven
        assert met["unpatched"] == pytest.approx(one.unpatched_logit_gap, rel=FLOAT32_NORMS)
        assert met["gap"] < FLOAT32_NORMS * met["unpatched"]


def test_a_bake_of_two_processes_is_that_of_one(found, folder, whole):
    first, second = (patchfile.load(process["bake"]) for process in found)
    same(first, second, processes.baked_of(whole["sharded"]).patch)


@pytest.mark.parametrize("kind", processes.KINDS)
def test_two_processes_generate_step_by_step_what_one_does(kind, found, whole):
    one = processes.steps_of(whole[kind])
    assert len(one) == 4
    for process in found:
        for met, wanted in zip(process[kind]["steps"], one, strict=True):
            assert met["tokens"] == list(wanted["tokens"])
            assert met["gap"] < 1e-12
            assert ("written" in met) is ("written" in wanted)
            if "written" in met:
                assert met["written"] < FLOAT32_NORMS * met["size"]
                assert wanted["size"] > 0.1
                assert met["size"] == pytest.approx(wanted["size"], rel=FLOAT32_NORMS)


def test_a_command_that_generates_prints_in_one_process(found, folder, call):
    texts = ("--context", "abc def. ", "--prompt", "the", "--tokens", "3", "--json")
    one = json.loads(call("generate", folder / "sharded", *texts)[1])
    (code, printed), (other, silent) = (process["command"] for process in found)
    assert (code, other, silent) == (0, 0, "")
    told = json.loads(printed)
    assert told["text"] == one["text"]
    assert [step["chosen"] for step in told["steps"]] == [step["chosen"] for step in one["steps"]]
    assert told["holds"]


def test_what_needs_the_whole_is_refused_by_name(found):
    for process in found:
        said = process["refusals"]
        for name in ("export", "store", "weights"):
            assert said[name].startswith("UnsupportedModel")
            assert "one process" in said[name]


def test_what_does_not_fit_on_one_process_is_refused_on_both(found):
    for process in found:
        said = process["refusals"]["overflow on one process"]
        assert said.startswith("NotControllable")
        assert "entries beyond torch.float32 = 32" in said


def test_processes_do_not_wait_for_one_that_stopped(found, folder):
    """That they ended within the time allowed is seen by all of these tests."""
    assert found[0]["exit code"] != 0
    assert not (folder / "never").exists()


@pytest.mark.parametrize("setting", ["pp_size", "fsdp_size", "ep_size"])
def test_other_kinds_of_parallelism_are_refused_by_name(setting):
    model = build("llama")
    model.config.distributed_config = SimpleNamespace(tp_size=2, **{setting: 2})
    with pytest.raises(UnsupportedModel, match=f"{setting}.*tensor parallelism"):
        cf.bind(model)


def test_sequence_parallelism_is_refused_by_name():
    model = build("llama")
    model.config.distributed_config = SimpleNamespace(tp_size=2)
    model._tp_plan = {"layers.*.input_layernorm": "sequence_parallel"}
    with pytest.raises(UnsupportedModel, match="sequence_parallel"):
        cf.bind(model)
