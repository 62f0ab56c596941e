"""The command line in several processes: one of them prints and writes, and what they cannot share is refused."""

from __future__ import annotations

import json

import pytest

import processes
from contextfold.errors import InputError
from contextfold.models import load
from tiny import build, letters

CONTEXT, QUERY = "abc def. The keeper.", "The k"
TEXTS = ("--context", CONTEXT, "--query", QUERY)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    letters().save_pretrained(path)
    build("llama").save_pretrained(path)
    return path


@pytest.fixture
def two(monkeypatch):
    """As `torchrun` leaves the first of two processes, but for the other one."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_two_processes_fold_what_one_then_verifies_and_exports(llama, tmp_path, call):
    out = tmp_path / "patch.safetensors"
    run = processes.start(
        ["-m", "contextfold", "fold", str(llama), *TEXTS, "--positions", "all", "--out", str(out), "--json"]
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)  # one object, of one process
    assert said["proven"]
    assert said["patch"] == str(out)
    assert said["worst_logit_gap"] < 1e-5 < 0.5 < said["unpatched_logit_gap"]
    assert list(tmp_path.iterdir()) == [out]
    code, printed, _ = call("verify", llama, "--patch", out, *TEXTS, "--json")
    verified = json.loads(printed)
    assert code == 0
    assert verified["worst_logit_gap"] < 1e-5
    assert verified["unpatched_logit_gap"] == pytest.approx(said["unpatched_logit_gap"], rel=1e-4)
    code, printed, _ = call("export", llama, out, "--to", "checkpoint", "--out", tmp_path / "folder", "--json")
    assert code == 0
    assert json.loads(printed)["proven"]


def test_commands_for_one_process_say_so(llama, two, call):
    code, printed, said = call("ablate", llama, "--part", f"a={CONTEXT}", "--query", QUERY)
    assert code == 2
    assert printed == ""
    assert "error on process 0: 2 processes were started, and ablate runs in one" in " ".join(said.split())


def test_a_silent_process_still_looks_at_what_is_shown(monkeypatch, capsys):
    """What one process looks at may be in the hands of all of them."""
    from contextfold.cli import common

    monkeypatch.setattr(common.out, "quiet", True)
    looked = []
    common.show_or_json(False, {}, lambda: looked.append(True) or "table")
    common.show_or_json(True, {}, lambda: "table")
    assert looked == [True]
    assert capsys.readouterr().out == ""


def test_a_type_without_a_plan_is_refused_by_name(tmp_path, two):
    import zoo

    letters().save_pretrained(tmp_path)
    zoo.build("gpt2").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no tensor-parallel plan for the type 'gpt2'"):
        load(str(tmp_path), shared=True)


def test_heads_that_cannot_be_dealt_out_are_refused(llama, two, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="3 processes cannot share the 4 attention heads"):
        load(str(llama), shared=True)


def test_one_process_shares_nothing(llama):
    with pytest.raises(InputError, match="start it by torchrun"):
        load(str(llama), shared=True)


def test_a_ceiling_on_memory_is_for_one_process(llama, two):
    with pytest.raises(InputError, match="choose one"):
        load(str(llama), shared=True, max_memory=2**30)
