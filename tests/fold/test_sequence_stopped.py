"""A fold of a sequence that was stopped, by an exception or by the system, goes on where it was, with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
import zoo
from contextfold.errors import NotControllable
from contextfold.fold import fold_sequence
from contextfold.patch import MatrixEdit
from contextfold.store import clear
from tiny import bits, build, tokens

CONTEXT, QUERY = tokens(11), tokens(24, seed=3)
TYPICAL = tokens(60, seed=8)

WAYS = {
    "output": ("llama", {}),
    "all maps": ("qwen2", {"sites": "all"}),
    "attention": ("mistral", {"sites": "attention"}),
    "action": ("llama", {"written": False}),
    "whitened": ("llama", {"typical": TYPICAL}),
    "through a norm": ("gemma3_text", {}),
    "mixture": ("mixtral", {}),
}


class Stop(Exception):
    pass


def stop_at(layer):
    def progress(found):
        if found.layer == layer:
            raise Stop

    return progress


def model_of(model_type):
    return zoo.build(model_type) if model_type == "mixtral" else build(model_type, torch.float32)


def tensors(patch):
    """Every tensor of a patch by name, to the bit."""
    found = {}
    for site, edit in patch.edits.items():
        parts = (edit.delta.B, edit.delta.A) if isinstance(edit, MatrixEdit) else (edit.base, edit.value)
        found |= {(site.name, i): part.contiguous().numpy().tobytes() for i, part in enumerate(parts)}
    return found


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_with_the_same_bits(way, tmp_path):
    model_type, options = WAYS[way]
    model = model_of(model_type)
    before = bits(model)
    whole = fold_sequence(model, CONTEXT, QUERY, **options)
    last = whole.layers[-2].layer
    with pytest.raises(Stop):
        fold_sequence(model, CONTEXT, QUERY, store=tmp_path, progress=stop_at(last), **options)
    assert bits(model) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    kept = times(tmp_path)
    assert len(kept) == len(whole.layers) - 1
    seen = []
    again = fold_sequence(model, CONTEXT, QUERY, store=tmp_path, progress=seen.append, **options)
    assert [layer.layer for layer in seen] == [layer.layer for layer in whole.layers]
    assert {name: when for name, when in times(tmp_path).items() if name in kept} == kept  # solved once
    assert tensors(again.patch) == tensors(whole.patch)
    assert torch.equal(again.in_context, whole.in_context)
    assert repr(again.layers) == repr(whole.layers)
    assert again.patch.header == whole.patch.header
    assert bits(model) == before


def test_a_fold_that_is_done_is_there_at_once(tmp_path):
    model = build("llama")
    first = fold_sequence(model, CONTEXT, QUERY, store=tmp_path)
    kept, calls = times(tmp_path), []
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    again = fold_sequence(model, CONTEXT, QUERY, store=tmp_path)
    handle.remove()
    assert len(calls) == 1 + _binding()  # the run with the context, and what binding takes
    assert times(tmp_path) == kept
    assert tensors(again.patch) == tensors(first.patch)


def _binding():
    """How often the first layer runs when a model is bound."""
    from contextfold.anatomy import bind

    model, calls = build("llama"), []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    bind(model)
    return len(calls)


@pytest.mark.parametrize(
    "other",
    [
        {"query": tokens(24, seed=4)},
        {"context": tokens(11, seed=9)},
        {"keep": ((0, 2),)},
        {"at": [3, 5]},
        {"sites": "all"},
        {"typical": TYPICAL},
        {"written": False},
        {"positions": "renumbered"},
        {"seed": 1},
        {"dtype": torch.float32},
    ],
    ids=lambda other: next(iter(other)),
)
def test_work_of_another_fold_is_not_used(other, tmp_path):
    fold_sequence(build("llama"), CONTEXT, QUERY, store=tmp_path)
    kept = times(tmp_path)
    model = build("llama", other.pop("dtype", torch.float64), seed=other.pop("seed", 0))
    arguments = {"context": CONTEXT, "query": QUERY, **other}
    found = fold_sequence(model, **arguments, store=tmp_path)
    assert tensors(found.patch) == tensors(fold_sequence(model, **arguments).patch)
    assert not set(times(tmp_path).items()) & set(kept.items())


def test_strict_is_not_satisfied_by_what_was_kept(tmp_path):
    model = build("llama")
    query = tokens(60, seed=3)  # more than its maps serve
    fold_sequence(model, CONTEXT, query, store=tmp_path)
    with pytest.raises(NotControllable, match="least squares"):
        fold_sequence(model, CONTEXT, query, strict=True, store=tmp_path)


def test_a_head_that_reads_lengths_is_found_out_from_disk_too(tmp_path):
    model = build("gemma3_text")
    model.model.norm = nn.Identity()
    whole = fold_sequence(model, CONTEXT, QUERY, store=tmp_path)
    assert whole.layers[-1].outcome == "scale infeasible"
    again = fold_sequence(model, CONTEXT, QUERY, store=tmp_path)
    assert again.layers[-1].outcome == "scale infeasible"
    assert tensors(again.patch) == tensors(whole.patch) == tensors(fold_sequence(model, CONTEXT, QUERY).patch)


KILLED = """
import os, signal, sys
from pathlib import Path
import tiny
from contextfold import files
from contextfold.fold import fold_sequence

def kill(layer):
    if where == "after a layer" and layer.layer == 1:
        os.kill(os.getpid(), signal.SIGKILL)

replace = os.replace

def in_the_middle(source, target):
    if where == "while writing" and "0002" in str(target):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

where, folder = sys.argv[1:]
files.os.replace = in_the_middle
fold_sequence(tiny.build("gemma3_text"), tiny.tokens(11), tiny.tokens(24, seed=3), store=Path(folder), progress=kill)
"""


@pytest.mark.parametrize("where", ["after a layer", "while writing"])
def test_killed_by_the_system(where, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(tiny.__file__).parent), *sys.path])}
    work = tmp_path / "work"
    died = subprocess.run([sys.executable, "-c", KILLED, where, str(work)], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    kept = {name: when for name, when in times(work).items() if name.endswith(".solved")}
    assert len(kept) == 2
    model = build("gemma3_text")
    again = fold_sequence(model, CONTEXT, QUERY, store=work)
    assert {name: when for name, when in times(work).items() if name in kept} == kept
    assert tensors(again.patch) == tensors(fold_sequence(model, CONTEXT, QUERY).patch)
    clear(work)
    assert not work.exists()


@pytest.mark.parametrize("stopped_in", [1, 2, 3, 4])
def test_a_proof_that_was_stopped_repeats_no_fold(stopped_in, tmp_path):
    """Written, as action, another context, a shuffled one: each keeps what it has solved."""
    from contextfold.verify import FOLDS, Prompt, fold_and_prove_sequence

    model = build("llama")
    prompt = Prompt(CONTEXT, tokens(5, seed=3), ((0, 1),))
    patch, verdict = fold_and_prove_sequence(model, prompt)
    seen = []

    def progress(layer):
        seen.append(layer)
        if len(seen) == 3 * stopped_in - 1:
            raise Stop

    with pytest.raises(Stop):
        fold_and_prove_sequence(model, prompt, store=tmp_path / "work", progress=progress)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.solved")}
    assert len(kept) == 3 * stopped_in - 1
    assert FOLDS == 4
    again, repeated = fold_and_prove_sequence(model, prompt, store=tmp_path / "work")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert tensors(again) == tensors(patch)
    first, second = verdict.to_json(), repeated.to_json()
    for one in (first, second):
        del one["receipt"]
    assert json.dumps(first) == json.dumps(second)


def test_the_command_goes_on_too_and_takes_its_work_away(call, folder, tmp_path, monkeypatch):
    from contextfold.fold import sequence
    from contextfold.patchfile import load

    asked = ("fold", folder, "--context", "a b c d ", "--query", "e f g", "--positions", "all", "--json", "--out")
    assert call(*asked, tmp_path / "whole")[0] == 0
    solved = []

    def interrupted(job, known, free, report):
        def hear(layer):
            report(layer)
            solved.append(layer)
            if len(solved) == 5:
                raise KeyboardInterrupt

        return original(job, known, free, hear)

    original = sequence.solve_in_step
    monkeypatch.setattr(sequence, "solve_in_step", interrupted)
    code, printed, _ = call(*asked, tmp_path / "patch")
    assert (code, printed) == (130, "")
    work = tmp_path / ".patch.work"
    assert len(list(work.rglob("*.solved"))) == 5
    assert not (tmp_path / "patch").exists()
    code, printed, _ = call(*asked, tmp_path / "patch")
    assert (code, json.loads(printed)["proven"]) == (0, True)
    assert len(solved) == 4 * 3  # layers of four folds, none of them twice
    assert not work.exists()
    assert tensors(load(tmp_path / "patch")) == tensors(load(tmp_path / "whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["patch", "whole"]


def test_a_command_that_is_refused_leaves_no_work(call, folder, tmp_path):
    asked = ("fold", folder, "--context", "a b c d ", "--query", " ".join("e" * 40), "--positions", "all", "--strict")
    code, _, errors = call(*asked, "--out", tmp_path / "patch")
    assert code == 2
    assert "least squares" in errors or "scale infeasible" in errors
    assert not list(tmp_path.iterdir())
