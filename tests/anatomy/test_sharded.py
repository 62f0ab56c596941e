"""Tensor parallelism: two processes hold a part of every map, and fold as one process does."""

from __future__ import annotations

import pytest
import torch

import contextfold as cf
import processes
from contextfold import patchfile
from contextfold.fold import fold_sequence
from contextfold.patch import MatrixEdit
from tiny import FLOAT32_NORMS, tokens

CONTEXT, QUERY = tokens(12), tokens(3, seed=2)
DOORS = {"token": cf.fold_token, "sequence": fold_sequence}
WAYS = [(door, written) for door in DOORS for written in (True, False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    for kind in processes.KINDS:
        processes.build(kind).save_pretrained(path / kind)
    return path


@pytest.fixture(scope="module")
def found(folder):
    """What each of two processes found, on every kind of map."""
    return processes.together("fold_all", folder)


@pytest.fixture(scope="module")
def whole(folder):
    """The same models in one piece."""
    return {kind: cf.bind(processes.load(folder / kind)) for kind in processes.KINDS}


def logits(model, run):
    return cf.run(model, run, QUERY.numel())


def rows(name):
    """Where a patch of this kind is exact: the last token, or all of the query."""
    return slice(-1, None) if name == "token" else slice(None)


@pytest.mark.parametrize("kind", processes.KINDS)
@pytest.mark.parametrize(("name", "written"), WAYS)
def test_the_model_without_the_context_answers_as_with_it(kind, name, written, found, whole):
    """The oracle is the model in one piece, with the context in its window."""
    bound, at = whole[kind], rows(name)
    parts = cf.split(bound, CONTEXT, QUERY)
    wanted, without = logits(bound.model, parts.full), logits(bound.model, parts.reduced)
    unpatched = float((wanted - without)[at].abs().max())
    assert unpatched > 0.5
    for process in found:
        met = torch.tensor(process[kind][f"{name}-{written}"], dtype=torch.float64)
        assert float((met - wanted)[at].abs().max()) < FLOAT32_NORMS * unpatched


@pytest.mark.parametrize("kind", processes.KINDS)
@pytest.mark.parametrize(("name", "written"), WAYS)
def test_every_process_has_the_whole_patch_of_one_process(kind, name, written, found, folder, whole):
    one = DOORS[name](whole[kind], CONTEXT, QUERY, written=written).patch
    first, second = (patchfile.load(folder / f"{kind}-{name}-{written}-{rank}.safetensors") for rank in (0, 1))
    assert first.header == second.header == one.header
    assert first.edits.keys() == second.edits.keys() == one.edits.keys()
    for site, edit in one.edits.items():
        if isinstance(edit, MatrixEdit):
            B, A = first.edits[site].delta.B, first.edits[site].delta.A
            assert torch.equal(B, second.edits[site].delta.B)
            assert torch.equal(A, second.edits[site].delta.A)
            wanted = edit.delta.to_dense()
            assert float((B @ A - wanted).norm()) < FLOAT32_NORMS * float(wanted.norm())
        else:
            assert torch.equal(first.edits[site].value, second.edits[site].value)
            assert torch.allclose(first.edits[site].value, edit.value, rtol=FLOAT32_NORMS)


@pytest.mark.parametrize("kind", processes.KINDS)
def test_the_weights_come_back_bit_for_bit_and_have_the_digest_of_the_whole(kind, found, whole):
    for process in found:
        assert process[kind]["same bits"]
        assert not process[kind]["other bits"], "the last patch acted beside the weights"
        assert process[kind]["fingerprint"] == whole[kind].fingerprint


@pytest.mark.parametrize("kind", processes.KINDS)
def test_the_verdict_is_that_of_one_process(kind, found, whole):
    one = cf.fold_and_prove(whole[kind], cf.Prompt(CONTEXT, QUERY))[1]
    for process in found:
        met = process[kind]
        assert met["proven"]
        assert one.proven
        assert met["unpatched"] == pytest.approx(one.unpatched_logit_gap, rel=FLOAT32_NORMS)
        assert met["gap"] < FLOAT32_NORMS * met["unpatched"]
