"""Solved places on disk: whole or not at all, their bits, and nobody else's files."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contextfold.anatomy import bind
from contextfold.errors import InputError
from contextfold.pausing import Pausable
from contextfold.store import Store, clear, key_of
from tiny import build, shared

CPU = torch.device("cpu")


def test_bits_come_back_and_so_does_the_report(tmp_path):
    store = Store(tmp_path / "deep" / "work", "key")
    odd = torch.tensor([0.1, float("inf"), -0.0, float("nan")], dtype=torch.float64)
    store.put("0001", {"odd": odd, "turned": torch.arange(6.0).reshape(2, 3).T}, {"error": 0.1, "words": ["a"]})
    tensors, report = store.get("0001", CPU)
    assert tensors["odd"].view(torch.int64).tolist() == odd.view(torch.int64).tolist()
    assert torch.equal(tensors["turned"], torch.tensor([[0.0, 3], [1, 4], [2, 5]]))
    assert report == {"error": 0.1, "words": ["a"]}
    # Memory of its own, aligned as torch aligns it, and not a view into the file.
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())


def test_files_of_other_work_and_halves_of_files_are_no_help(tmp_path):
    mine, other = Store(tmp_path, "mine"), Store(tmp_path, "other")
    mine.put("a", {"x": torch.ones(100)}, {})
    assert mine.get("a", CPU) is not None
    assert other.get("a", CPU) is None
    assert mine.get("b", CPU) is None
    file = next(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:-4])
    assert mine.get("a", CPU) is None


def test_a_write_that_fails_leaves_the_file_that_was_there_and_nothing_else(tmp_path, monkeypatch):
    store = Store(tmp_path, "key")
    store.put("a", {"x": torch.ones(3)}, {})

    def fail(*_args, **_named):
        raise OSError("no space left on device")

    monkeypatch.setattr("contextfold.files.os.replace", fail)
    with pytest.raises(InputError, match="no space left"):
        store.put("a", {"x": torch.zeros(3)}, {})
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(store.get("a", CPU)[0]["x"], torch.ones(3))


def test_a_folder_that_cannot_be_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another folder"):
        Store(tmp_path / "file" / "work", "key")


def test_clearing_takes_its_own_files_only(tmp_path):
    Store(tmp_path / "work" / "one", "key").put("a", {"x": torch.ones(1)}, {})
    Store(tmp_path / "work" / "two", "key").put("a", {"x": torch.ones(1)}, {})
    (tmp_path / "work" / "one" / ".b.solved.17.part").write_text("half")
    (tmp_path / "work" / "two" / "note").write_text("mine")
    clear(tmp_path / "work")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "work",
        "work/two",
        "work/two/note",
    ]
    clear(tmp_path / "nothing")


def test_the_key_tells_weights_and_questions_apart():
    one, other = bind(shared("llama")), bind(build("llama", seed=1))
    keys = {key_of(one, "a", 1), key_of(one, "a", 2), key_of(other, "a", 1)}
    assert len(keys) == 3
    assert key_of(one, "a", 1) in keys


@given(st.lists(st.integers(0, 3), max_size=8))
def test_calls_that_pause_take_turns(order):
    """Any order of turns: each call counts for itself, and ends with its own result."""
    calls = {}

    def count(name):
        for _ in range(2):
            calls[name].pause()
            seen.append(name)
        return name

    seen, turns = [], dict.fromkeys(range(4), 0)
    calls |= {name: Pausable(lambda name=name: count(name)) for name in range(4)}
    for name in order:
        turns[name] += 1
        assert calls[name].go_on() == (turns[name] < 3)
    assert sorted(seen) == sorted(name for name, k in turns.items() for _ in range(min(2, max(0, k - 1))))
    assert [calls[name].result() for name in range(4)] == list(range(4))


def test_what_a_call_raises_comes_out_where_it_was_gone_on_with():
    def fail():
        call.pause()
        raise KeyError("inside")

    call = Pausable(fail)
    assert call.go_on()
    with pytest.raises(KeyError, match="inside"):
        call.go_on()
    assert not call.go_on()


def test_a_call_that_is_closed_runs_its_finally():
    ended = []

    def run():
        try:
            call.pause()
        finally:
            ended.append(True)

    call = Pausable(run)
    call.go_on()
    call.close()
    call.close()
    assert ended == [True]
    Pausable(run).close()  # never begun
    assert ended == [True]
