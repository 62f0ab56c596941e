"""A short campaign of faults; `scripts/attack_faults.py` disturbs every command in every way."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import faults

SCRIPT = Path(__file__).parents[1] / "scripts" / "attack_faults.py"
ASKED = (
    "--each",
    "1",
    "--processes",
    "0",
    "--works",
    "fold",
    "--faults",
    "kill -9",
    "SIGINT",
    "two at once",
)


def test_a_disturbed_command_leaves_the_old_or_the_new(tmp_path):
    import contextfold

    environment = {**os.environ, "PYTHONPATH": str(Path(contextfold.__path__[0]).parent)}
    command = [sys.executable, str(SCRIPT), *ASKED, "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["trials"], found["wrong"]) == (3, 0)
    assert all(row["found"] in ("old", "new") for row in found["rows"])
    assert found["rows"][0]["code"] in (-9, 0)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """The campaign as a module; nothing is run."""
    before = dict(os.environ)
    spec = importlib.util.spec_from_file_location("attack_faults", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["attack_faults"] = module
    spec.loader.exec_module(module)
    os.environ.clear()
    os.environ.update(before)
    return module.Campaign(tmp_path_factory.mktemp("campaign"), 0), module.Usual(1.0, None, 0, 0, "old", "new")


@pytest.mark.parametrize(
    ("fault", "code", "found", "said", "words"),
    [
        ("kill -9", -9, "old", [], None),
        ("kill -9", -9, "a half", [], "neither"),
        ("kill -9", -9, None, [], "neither"),
        ("SIGINT", 130, "new", ["interrupted"], None),
        ("SIGINT", 1, "old", [], "exit code 1"),
        ("SIGINT", -2, "new", [], None),
        ("SIGINT", -2, "old", ["Traceback (most recent call last):"], "traceback"),
        ("SIGINT", 130, "old", ["Traceback (most recent call last):"], "traceback"),
        ("full disk", 2, "old", ["error: cannot write"], None),
        ("full disk", 2, "old", ["Traceback (most recent call last):", "error: x"], "not one clear line"),
        ("full disk", 1, "old", ["OSError"], "exit code 1"),
        ("full disk", 0, "old", [], "not the new one"),
        ("memory limit", None, "old", [], "hung"),
    ],
)
def test_what_is_wrong_is_seen(fault, code, found, said, words, campaign):
    judge, usual = campaign
    wrong = judge._judge(fault, usual, code, found, said)
    assert (words is None and not wrong) or any(words in each for each in wrong)


def test_halves_and_leftovers_are_seen(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert faults.digest(folder) is None
    (folder / "a").write_text("whole")
    whole = faults.digest(folder)
    (folder / ".b").write_text("hidden")
    assert faults.digest(folder) == whole
    (folder / "a").write_text("who")
    assert faults.digest(folder) != whole
    (tmp_path / ".folder.0.tmp").mkdir()
    assert faults.leftovers(tmp_path, "folder") == [".tmp"]
    table = tmp_path / "rows.parquet"
    table.write_bytes(b"PAR1")
    assert faults.digest(table).startswith("unreadable")
