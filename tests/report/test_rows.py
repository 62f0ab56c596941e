"""What the commands print for the report: rows per token, in letters too, and what the patch holds."""

from __future__ import annotations

import json

import pytest

from contextfold.report import run_of

TEXTS = ("--context", "a b c d e f g h ", "--query", "i j k l")


@pytest.fixture
def printed(call):
    def run(*arguments):
        code, text, errors = call(*arguments, "--json")
        assert code in (0, 1), errors
        found = json.loads(text)
        assert run_of(found).kind.name == {"verify": "fold"}.get(arguments[0], arguments[0]) or "positions" in found
        return found

    return run


def test_a_fold_prints_a_row_per_token(printed, folder):
    found = printed("fold", folder, *TEXTS)
    (row,) = found["steps"]
    assert (found["context"], found["query"]) == (TEXTS[1], TEXTS[3])
    assert row["logit_gap"] == found["worst_logit_gap"]
    assert row["unpatched_logit_gap"] == found["unpatched_logit_gap"]
    assert row["weight_ratio"] == [layer["weight_ratio"] for layer in found["layers"]]
    assert set(row["texts"]) == {"in_context", "unpatched", "patched"}
    # A tokenizer of a token per letter, the first two of them special.
    assert all(len(row["texts"][key]) == 1 and ord(row["texts"][key]) == row[key] + 30 for key in row["texts"])
    assert [sum(layer["u_counts"]) for layer in found["layers"]] == [32, 32, 32]
    assert len(found["layers"][0]["u_counts"]) == len(found["u_edges"]) + 1
    assert {row["kind"] for row in found["spectra"]} == {"matrix", "scale"}


def test_a_sequence_prints_what_the_patch_does_at_each_position(printed, folder, tmp_path):
    out = tmp_path / "patch.safetensors"
    found = printed("fold", folder, *TEXTS, "--positions", "all", "--out", out)
    assert "".join(row["texts"]["token"] for row in found["positions"]) == TEXTS[3]
    for row in found["positions"]:
        assert row["top1_match"] == (row["in_context"] == row["patched"])
        assert row["unpatched_top1_match"] == (row["in_context"] == row["unpatched"])
        assert row["in_context_margin"] > 0
    assert all(len(layer["actions"]) == 7 and min(layer["actions"]) > 0 for layer in found["layers"])
    stored = printed("verify", folder, "--patch", out, *TEXTS)
    assert stored["spectra"] == found["spectra"]
    assert stored["layers"] == []


def test_steps_of_a_suite_know_their_prompt(printed, folder):
    found = printed("verify", "--suite", "paper", "--model", folder, "--tokens", 2)
    assert [row["prompt"] for row in found["steps"]] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(found["prompts"]) == 5


def test_generation_says_more_where_it_proved(printed, folder):
    found = printed("generate", folder, "--context", TEXTS[1], "--prompt", TEXTS[3], "--tokens", 3, "--prove-every", 2)
    proven = [row["weight_ratio"] is not None for row in found["steps"]]
    assert proven == [row["proven_gap"] is not None for row in found["steps"]] == [True, False, True]
    # The tokenizer puts spaces between its letters.
    assert "".join(row["texts"]["chosen"] for row in found["steps"]) == found["text"].replace(" ", "")
    assert found["receipt"]["fingerprint"]


def test_ablation_and_baking_print_their_texts(printed, folder):
    found = printed("ablate", folder, "--part", "x=abc", "--part", "y=def", "--query", "ghi")
    assert [part["text"] for part in found["parts"]] == ["abc", "def"]
    assert all(row["patched"] == row["answer"] for part in found["parts"] for row in part["positions"])
    asked = "\n".join(f"question {letter}?" for letter in "abcdefgh")
    found = printed("bake", folder, "--context", TEXTS[1], "--queries", asked, "--tokens", 3)
    rows = found["held_out"]
    assert len(rows) == found["questions"]
    assert sum(row["kl_patched"] for row in rows) / len(rows) == pytest.approx(found["kl_patched"])
    assert found["same_answers"] == sum(row["patched"] == row["in_context"] for row in rows) / len(rows)
    assert {row["texts"]["question"] for row in rows} <= set(asked.splitlines())
    assert {row["kind"] for row in found["spectra"]} == {"matrix", "scale"}
