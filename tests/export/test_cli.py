"""`contextfold export` on a tiny model folder: exit codes, JSON, one-line errors, nothing written on bad input."""

from __future__ import annotations

import json

import pytest
import torch

from contextfold.cli.export import Target
from contextfold.export import EXPORTERS
from tiny import build, letters

CONTEXT, QUERY = "a b c d e f g h ", "i j k l"


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tokenizer = letters()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(path)
    build(request.param, torch.float32).save_pretrained(path)
    return path


@pytest.fixture
def patch(call, folder, tmp_path):
    path = tmp_path / "patch.safetensors"
    assert call("fold", folder, "--context", CONTEXT, "--query", QUERY, "--out", path, "--json")[0] == 0
    return path


def test_the_choices_are_the_exporters():
    assert [target.value for target in Target] == [kind.name for kind in EXPORTERS]


@pytest.mark.parametrize("to", ["peft", "checkpoint"])
def test_an_export_is_proven_and_says_so(to, call, folder, patch, tmp_path):
    code, printed, _ = call("export", folder, patch, "--to", to, "--out", tmp_path / "out", "--json")
    found = json.loads(printed)
    assert (code, found["proven"], found["folder"]) == (0, True, str(tmp_path / "out"))
    assert found["matched"] == found["expected"] > 0
    assert found["base_gap"] > found["rounding_gap"] >= found["logit_gap"]
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["base_model"]["name"] == str(folder)
    assert receipt["command"].startswith("contextfold export")
    assert receipt["patch"]["context_sha256"]
    assert receipt["loaded"]["proven"] is True
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Proven" in card
    assert CONTEXT not in card
    if to == "checkpoint":
        code, printed, _ = call("inspect", tmp_path / "out", "--json")  # a model like any other
        assert code == 0
        assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_tables_end_with_a_verdict(call, folder, patch, tmp_path):
    options = ("--to", "peft", "--out", tmp_path / "out", "--uniform-rank", "auto")
    code, printed, _ = call("export", folder, patch, *options)
    assert code == 0
    for words in ("loaded back by peft", "Proven", "Wrote"):
        assert words in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{patch}", "--to", "peft", "--out", "/no/such/folder/x"], "--out"),
        (["{patch}", "--to", "peft", "--out", "{folder}"], "holds other things"),
        (["missing.safetensors", "--to", "peft", "--out", "{out}"], "no patch file"),
        (["{patch}", "--to", "peft", "--out", "{out}", "--uniform-rank", "4"], "rank 4"),
        (["{patch}", "--to", "peft", "--out", "{out}", "--uniform-rank", "many"], "many"),
        (["{patch}", "--to", "checkpoint", "--out", "{out}", "--lora-only"], "--lora-only"),
        (["{patch}", "--to", "peft", "--out", "{out}", "--dtype", "bfloat16"], "other weights|made for weights"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(call, folder, patch, tmp_path, arguments, message):
    import re

    before = sorted(tmp_path.iterdir()), sorted(folder.iterdir())
    values = {"folder": folder, "patch": patch, "out": tmp_path / "out"}
    code, printed, errors = call("export", folder, *(a.format(**values) for a in arguments))
    assert (code, printed) == (2, "")
    (line,) = [line for line in errors.splitlines() if line.strip()]
    assert re.search(message, line)
    assert (sorted(tmp_path.iterdir()), sorted(folder.iterdir())) == before


def test_scales_are_refused_where_only_pairs_are_wanted(call, folder, patch, tmp_path):
    code, _, errors = call("export", folder, patch, "--to", "peft", "--lora-only", "--out", tmp_path / "out")
    assert code == (2 if "gemma3_text" in str(folder) else 0)
    assert ("norm scales" in errors) == (code == 2)
    assert (tmp_path / "out").exists() == (code == 0)
