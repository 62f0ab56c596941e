"""A folder is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time

import pytest
import torch
from patches import PROOF, baked
from tqdm import tqdm

from contextfold.errors import InputError
from contextfold.export import Checkpoint, PeftFolder, Source, folder
from contextfold.export.card import write_card
from contextfold.export.folder import staged

TRIALS = 40
"""Kills at random moments of one or two writes."""


def write(bound, patch, exporter, out, command):
    """What `export` does, without loading back."""
    source = Source(bound, patch, command=command)
    with staged(out) as stage:
        facts = exporter.write(source, stage.path)
        write_card(source, exporter, stage.path, facts, PROOF)
        stage.publish()


def whole(path):
    """Which write the folder is of; fails unless every file is the one that its receipt names, and no other."""
    receipt = json.loads((path / "receipt.json").read_text())
    files = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {"receipt.json"}
    assert files == set(receipt["files"])
    for name, digest in receipt["files"].items():
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest
    return receipt["command"]


def writing(bound, patches, exporter, out, name, rounds=10**6):
    """A process that goes on replacing the folder."""

    def loop():
        tqdm.set_lock(threading.RLock())  # its own is shared by all forks, and would die locked
        torch.set_num_threads(1)
        for k in range(rounds):
            write(bound, patches[k % 2], exporter, out, f"{name} {k}")

    process = multiprocessing.get_context("fork").Process(target=loop)
    process.start()
    return process


@pytest.fixture(scope="module")
def two(llama):
    bound, folded = llama
    return bound, (folded.patch, baked(bound, folded.patch, 5))


@pytest.mark.parametrize("exporter", [PeftFolder(), Checkpoint()])
def test_a_kill_leaves_the_old_folder_or_the_new_one(exporter, two, tmp_path):
    bound, patches = two
    out = tmp_path / "folder"
    start = time.perf_counter()
    writing(bound, patches, exporter, out, "first", 1).join()
    usual = time.perf_counter() - start  # of starting a process, too
    seen = {whole(out)}
    moments = random.Random(0)
    left = 0
    for trial in range(TRIALS):
        process = writing(bound, patches, exporter, out, f"{trial}")
        time.sleep(moments.uniform(0.0, 2.5 * usual))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        seen.add(whole(out))
        left += sum(path.name.endswith(".tmp") for path in tmp_path.iterdir()) > 0
    assert len(seen) > 5  # many writers got through
    assert left > 5  # and many were killed in the middle


def test_writers_at_the_same_time_replace_each_other_whole(two, tmp_path):
    bound, patches = two
    out = tmp_path / "folder"
    processes = [writing(bound, patches, PeftFolder(), out, name, 40) for name in ("a", "b", "c")]
    while any(process.is_alive() for process in processes):
        if out.is_dir():
            try:
                (out / "receipt.json").read_text()
            except FileNotFoundError:
                pytest.fail("a folder without its receipt was there to see")
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert whole(out).split()[1] == "39"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_of_something_else_is_not_replaced(two, tmp_path):
    bound, patches = two
    out = tmp_path / "home"
    out.mkdir()
    (out / "letters.txt").write_text("keep me")
    with pytest.raises(InputError, match="holds other things"):
        write(bound, patches[0], PeftFolder(), out, "")
    assert [path.name for path in out.iterdir()] == ["letters.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize("bad", ["missing/folder", "file", ".", "link"])
def test_bad_places_are_refused(bad, two, tmp_path):
    bound, patches = two
    (tmp_path / "file").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="--out"):
        write(bound, patches[0], PeftFolder(), tmp_path / bad, "")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken(two, tmp_path):
    bound, patches = two
    (tmp_path / "folder").mkdir()
    write(bound, patches[0], PeftFolder(), tmp_path / "folder", "first")
    assert whole(tmp_path / "folder") == "first"


def test_a_failed_write_leaves_nothing_and_keeps_the_old(two, tmp_path, monkeypatch):
    bound, patches = two
    out = tmp_path / "folder"
    write(bound, patches[0], PeftFolder(), out, "first")
    monkeypatch.setattr(folder, "_put", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(InputError, match="No space left"):
        write(bound, patches[1], PeftFolder(), out, "second")
    assert whole(out) == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_where_the_system_cannot_exchange_the_old_folder_stands_aside(two, tmp_path, monkeypatch):
    bound, patches = two
    out = tmp_path / "folder"
    monkeypatch.setattr(folder.sys, "platform", "other")
    write(bound, patches[0], PeftFolder(), out, "first")
    write(bound, patches[1], PeftFolder(), out, "second")
    assert whole(out) == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    real, calls = os.rename, []

    def broken(source, target):
        calls.append(target)
        if len(calls) == 3:  # after the old folder was renamed, before the new one is
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(folder.os, "rename", broken)
    with pytest.raises(KeyboardInterrupt):
        write(bound, patches[0], PeftFolder(), out, "third")
    (aside,) = tmp_path.iterdir()
    assert aside.name.endswith(".old.tmp")
    assert whole(aside) == "second"


def test_remains_of_killed_writers_go_after_a_day(two, tmp_path):
    bound, patches = two
    old, new, other = (tmp_path / name for name in (".folder.1.tmp", ".folder.2.tmp", ".elsewhere.1.tmp"))
    for path in (old, new, other):
        path.mkdir()
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    write(bound, patches[0], PeftFolder(), tmp_path / "folder", "first")
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)
