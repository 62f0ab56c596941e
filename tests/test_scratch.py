"""What is flushed before a rename, and what a failing disk, a wrong clock or a second process leaves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from contextfold import files, patchfile, scratch
from contextfold.cli.common import working
from contextfold.errors import InputError, NotWritten
from contextfold.export.folder import staged
from contextfold.files import Kept, replacing
from contextfold.lowrank import LowRank
from contextfold.patch import Header, MatrixEdit, Patch, Site
from contextfold.scratch import FOLDER, STALE, hidden_file, hidden_folder, sweep
from contextfold.store import Store, clear

CPU = torch.device("cpu")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def calls(monkeypatch):
    """What was flushed and renamed, by name, in order."""
    found: list[tuple[str, str]] = []
    sync, replace, rename = os.fsync, os.replace, os.rename

    def synced(handle):
        found.append(("flush", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        sync(handle)

    def moved(move):
        def call(source, target):
            found.append(("rename", Path(target).name))
            move(source, target)

        return call

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved(replace))
    monkeypatch.setattr(os, "rename", moved(rename))
    return found


def test_content_reaches_the_disk_before_its_name_does(tmp_path, calls):
    folder = tmp_path / "place"
    folder.mkdir()
    with replacing(folder / "file", "choose another") as part:
        part.write_text("new")
    assert calls == [("flush", part.name), ("rename", "file"), ("flush", "place")]


def test_so_does_a_folder_with_all_that_is_in_it(tmp_path, calls):
    folder = tmp_path / "place"
    folder.mkdir()
    with staged(folder / "out") as stage:
        (stage.path / "deep").mkdir()
        (stage.path / "deep" / "file").write_text("new")
        stage.publish()
    assert set(calls[:3]) == {("flush", name) for name in ("file", "deep", stage.path.name)}
    assert calls[3:] == [("rename", "out"), ("flush", "place")]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_file_and_nothing_else(name, tmp_path, monkeypatch):
    def fail(*_args):
        raise OSError(errno.EIO, "Input/output error")

    target = tmp_path / "file"
    target.write_text("old")
    monkeypatch.setattr(os, name, fail)
    with (
        pytest.raises(NotWritten, match="Input/output error; choose another"),
        replacing(target, "choose another") as p,
    ):
        p.write_text("new")
    assert names(tmp_path) == ["file"]
    assert target.read_text() == "old"


def test_a_disk_that_became_read_only_is_one_clear_line(tmp_path, monkeypatch):
    """The hidden file cannot go from there either, which must not hide why."""

    def refuse(*_args, **_options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(NotWritten, match="Read-only file system; choose another"):
        files.write_json(tmp_path / "file", {}, "choose another")


def test_a_file_system_that_flushes_no_folders_is_no_failure(tmp_path, monkeypatch):
    sync = os.fsync

    def only_files(handle):
        if Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    monkeypatch.setattr(os, "fsync", only_files)
    files.write_json(tmp_path / "file", {"a": 1})
    assert names(tmp_path) == ["file"]


def test_the_mode_of_a_file_is_what_the_user_asks_for(tmp_path):
    old = os.umask(0o027)
    try:
        with replacing(tmp_path / "file", "") as part:
            part.write_text("new")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("hidden", [hidden_file, hidden_folder])
def test_a_clock_that_is_ahead_takes_nothing_from_who_is_writing(hidden, tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * STALE)
    with hidden(tmp_path / "out") as path:
        sweep(tmp_path, "out")
        assert path.exists()
    assert names(tmp_path) == []


def test_what_a_killed_writer_left_goes_after_a_day(tmp_path):
    script = (
        "import os, sys, pathlib\nfrom contextfold.scratch import hidden_file, hidden_folder\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "with hidden_file(place / 'out'), hidden_folder(place / 'out'), hidden_file(place / 'other'):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 3
    sweep(tmp_path, "out")
    assert len(names(tmp_path)) == 3  # of today
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    files.write_json(tmp_path / "out", {})
    assert [name.split(".")[1] for name in names(tmp_path) if name.startswith(".")] == ["other"]


def test_a_sweep_between_two_instants_costs_a_writer_a_new_name(tmp_path, monkeypatch):
    """Swept before it could be held: the writer makes another one."""
    hold, seen = scratch._hold, []

    def swept_first(path):
        seen.append(path)
        if len(seen) == 1:
            path.rmdir()
        return hold(path)

    monkeypatch.setattr(scratch, "_hold", swept_first)
    with hidden_folder(tmp_path / "out") as path:
        assert path == seen[1] != seen[0]
        assert path.suffix == FOLDER
        assert path.is_dir()


# ------------------------------------------------------------------------------------------------ who uses them


def patch():
    header = Header(
        kind="bake", model_type="llama", fingerprint="f", positions=(), exact_at=(), tokens_digest="t",
        context_digest="c", model_dtype="float32", factor_dtype="float32", attention="eager", materialised=True,
        plan=("output",), versions={"torch": "1"},
    )  # fmt: skip
    site = Site(layer=0, module="m", parameter="weight", transposed=False, expert=None, experts=0)
    return Patch(header, {site: MatrixEdit(LowRank(torch.ones(3, 1), torch.ones(1, 2)))})


def test_the_same_patch_is_the_same_bytes(tmp_path):
    whole = {patchfile.save(patch(), tmp_path / str(k)).read_bytes() for k in range(8)}
    assert len(whole) == 1
    assert len(patchfile.load(tmp_path / "0").edits) == 1


def test_work_that_another_process_cleared_can_go_on(tmp_path):
    one, two = Store(tmp_path / "work", "key"), Store(tmp_path / "work", "key")
    one.put("a", {"x": torch.ones(3)}, {})
    clear(tmp_path / "work")
    assert not (tmp_path / "work").exists()
    two.put("b", {"x": torch.ones(3)}, {})
    assert two.get("b", CPU) is not None
    kept = Kept(tmp_path / "jobs")
    (tmp_path / "jobs").rmdir()
    kept.put("job", "digest", {"row": 1})
    assert kept.get("job", "digest") == {"row": 1}


def test_clearing_leaves_what_another_process_is_writing(tmp_path):
    Store(tmp_path / "work", "key").put("a", {"x": torch.ones(3)}, {})
    with hidden_file(tmp_path / "work" / "b.solved") as part:
        clear(tmp_path / "work")
        assert names(tmp_path / "work") == [part.name]
    left = tmp_path / "work" / ".c.solved.0.part"  # by a process that was killed, with its clock ahead
    left.write_text("half")
    os.utime(left, (time.time() + STALE,) * 2)
    clear(tmp_path / "work")
    assert names(tmp_path) == []


def test_two_that_clear_at_once_do_not_fail(tmp_path, monkeypatch):
    Store(tmp_path / "work", "key").put("a", {"x": torch.ones(3)}, {})
    unlink = Path.unlink

    def twice(path, *args, **options):
        unlink(path)
        unlink(path, *args, **options)

    monkeypatch.setattr(Path, "unlink", twice)
    clear(tmp_path / "work")
    assert names(tmp_path) == []


def solve(store, error):
    store.put("a", {"x": torch.ones(3)}, {})
    raise error


@pytest.mark.parametrize(("error", "stays"), [(NotWritten("no space"), True), (InputError("refused"), False)])
def test_a_full_disk_does_not_cost_the_work_that_was_done(error, stays, tmp_path):
    with pytest.raises(InputError), working(tmp_path / "patch") as folder:
        solve(Store(folder, "key"), error)
    assert (Store(folder, "key").get("a", CPU) is not None) is stays


@pytest.mark.parametrize("error", [SafetensorError("No space left on device"), OSError(errno.ENOSPC, "No space left")])
def test_an_export_that_finds_no_room_says_so(error, tmp_path):
    with pytest.raises(NotWritten, match=r"No space left.*nothing was changed"), staged(tmp_path / "out"):
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_a_command_that_finds_no_memory_says_so(error, call, folder, monkeypatch):
    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr("contextfold.models.load", fail)
    code, printed, errors = call("inspect", folder)
    assert (code, printed) == (2, "")
    assert "not enough memory" in errors
    assert len(errors.splitlines()) == 1


def test_a_mistake_of_ours_keeps_its_traceback(folder, monkeypatch):
    from contextfold import cli

    def fail(*_args, **_options):
        raise KeyError("a mistake")

    monkeypatch.setattr("contextfold.models.load", fail)
    monkeypatch.setattr(sys, "argv", ["contextfold", "inspect", folder])
    with pytest.raises(KeyError, match="a mistake"):
        cli.main()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt, 130, "interrupted; the model and all files are as they were\n"),
        (MemoryError, 2, "error: there is not enough memory to begin; close other programs\n"),
    ],
)
def test_what_happens_while_modules_are_imported_is_a_line_too(error, code, said, monkeypatch, capsys):
    from contextfold.__main__ import main

    class Slow(types.ModuleType):
        def __getattr__(self, name):
            raise error

    monkeypatch.setitem(sys.modules, "contextfold.cli", Slow("contextfold.cli"))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert (stopped.value.code, capsys.readouterr().err) == (code, said)
