"""Shared fixtures. Real models are loaded once per session and never changed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_grad_enabled(False)

if find_spec("hypothesis"):  # the environments of lm-eval and Ray do without
    from hypothesis import settings

    # How long an example takes is the machine's affair: on a busy one the usual limit of 200 ms fails right code.
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the command line in this process: exit code, what it printed, what it said on standard error."""
    from contextfold import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["contextfold", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        return stopped.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny Gemma 3 on disk, with a tokenizer of one token per letter."""
    from tiny import build, letters

    path = tmp_path_factory.mktemp("model")
    letters().save_pretrained(path)
    build("gemma3_text", torch.float32).save_pretrained(path)
    return str(path)
