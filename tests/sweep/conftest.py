"""A folder with a tiny model and a jobs file that says everything once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

FILE = {
    "models": ["model"],
    "contexts": {"one": "abc def ghi"},
    "fold": {"queries": [" ijk"]},
}
"""The least that can be asked: one fold."""

QUESTIONS = ["what is p", "what is q", "what is r", "what is s", "what is t"]


def write(folder: Path, **changed) -> Path:
    """The jobs file of `folder`; None takes a key away."""
    whole = {key: value for key, value in {**FILE, **changed}.items() if value is not None}
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump(whole, sort_keys=False))
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny Llama on disk, with a tokenizer of one token per letter."""
    from tiny import build, letters

    path = tmp_path_factory.mktemp("sweep") / "model"
    letters().save_pretrained(path)
    build("llama", torch.float32).save_pretrained(path)
    return path


@pytest.fixture
def place(tmp_path, model):
    """A folder of one's own, with the model in it under the name `model`."""
    (tmp_path / "model").symlink_to(model)
    return tmp_path
