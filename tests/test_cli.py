"""The command line on a tiny model folder: exit codes, JSON, one-line errors, nothing written on bad input."""

from __future__ import annotations

import json
import sys

import pytest

from contextfold import cli
from contextfold.patchfile import load

CONTEXT, QUERY = "a b c d e f g h ", "i j k l"


def test_fold_proves_and_writes_a_patch_that_verify_accepts(call, folder, tmp_path):
    out = tmp_path / "patch.safetensors"
    code, printed, _ = call("fold", folder, "--context", CONTEXT, "--query", QUERY, "--out", out, "--json")
    found = json.loads(printed)
    assert (code, found["proven"], found["patch"]) == (0, True, str(out))
    assert load(out).header.kind == "token"
    code, printed, _ = call("verify", folder, "--patch", out, "--context", CONTEXT, "--query", QUERY, "--json")
    assert (code, json.loads(printed)["top1_matches"]) == (0, 1)
    code, printed, _ = call("inspect", out, "--json")
    assert (code, json.loads(printed)["header"]["model_type"]) == (0, "gemma3_text")


def test_tables_end_with_a_verdict(call, folder, tmp_path):
    code, printed, _ = call("fold", folder, "--context", CONTEXT, "--query", QUERY, "--out", tmp_path / "p.safetensors")
    assert code == 0
    for words in ("Proven", "without patch (control)", "shuffled context (control)", "per layer", "Wrote"):
        assert words in printed


@pytest.mark.parametrize("sites", ["output", "all"])
def test_one_patch_for_all_positions_verifies_too(call, folder, tmp_path, sites):
    out, texts = tmp_path / "patch.safetensors", ("--context", CONTEXT, "--query", QUERY)
    code, printed, _ = call("fold", folder, *texts, "--positions", "all", "--sites", sites, "--out", out, "--json")
    found = json.loads(printed)
    assert (code, found["proven"], found["sites"], found["tokens"]) == (0, True, sites, 7)
    assert found["protocol"].startswith("7 tokens folded;")
    code, printed, _ = call("verify", folder, "--patch", out, *texts, "--json")
    assert (code, json.loads(printed)["sites"]) == (0, sites)


def test_typical_text_makes_another_patch(call, folder):
    texts = ("--context", CONTEXT, "--query", QUERY, "--positions", "all", "--json")
    plain, white = (json.loads(call("fold", folder, *texts, *more)[1]) for more in ((), ("--typical", "x y z " * 9)))
    assert white["proven"]
    assert white["layers"][0]["weight_ratio"] > plain["layers"][0]["weight_ratio"]  # no longer the smallest


def test_the_suite_prints_one_json_object(call, folder):
    code, printed, _ = call(
        "verify", "--suite", "paper", "--model", folder, "--tokens", 1, "--json", "--rule", "floored"
    )
    found = json.loads(printed)
    assert code in (0, 1)
    assert found["tokens"] == 5
    assert {"scatter_top1_matches", "scatter_logit_gap", "max_abs_dm", "controls"} <= set(found)


def test_inspect_shows_the_anatomy(call, folder):
    code, printed, _ = call("inspect", folder, "--json")
    found = json.loads(printed)
    assert (code, found["family"], len(found["blocks"])) == (0, "gemma2", 3)
    assert found["blocks"][0]["norm_post_convention"] == "1 + w"


def test_arguments_from_a_file(call, folder, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text(CONTEXT)
    code, _, _ = call("fold", folder, "--context", f"@{note}", "--query", QUERY, "--json")
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fold", "nowhere", "--context", CONTEXT, "--query", QUERY], "nowhere"),
        (["fold", "{folder}", "--context", "", "--query", QUERY], "empty"),
        (["fold", "{folder}", "--context", "@missing.txt", "--query", QUERY], "missing.txt"),
        (["fold", "{folder}", "--context", CONTEXT, "--query", QUERY, "--keep", "5:2"], "5:2"),
        (["fold", "{folder}", "--context", CONTEXT, "--query", QUERY, "--rule", "magic"], "balanced"),
        (["fold", "{folder}", "--context", CONTEXT, "--query", QUERY, "--out", "/no/such/folder/x"], "--out"),
        (["fold", "{folder}", "--context", CONTEXT, "--query", QUERY, "--sites", "all"], "--positions all"),
        (
            [
                "fold",
                "{folder}",
                "--context",
                CONTEXT,
                "--query",
                QUERY,
                "--positions",
                "all",
                "--sites",
                "attention",
            ],
            "norm follows its attention",
        ),
        (["verify", "{folder}"], "--suite"),
        (["verify", "--suite", "paper"], "model"),
        (["verify", "{folder}", "--suite", "other"], "paper"),
        (
            ["verify", "{folder}", "--patch", "missing.safetensors", "--context", CONTEXT, "--query", QUERY],
            "no patch file",
        ),
        (["inspect", "missing.safetensors"], "no patch file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(call, folder, tmp_path, arguments, message):
    before = sorted(tmp_path.iterdir())
    code, printed, errors = call(*(a.format(folder=folder) for a in arguments))
    assert code == 2
    assert printed == ""
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in errors
    assert sorted(tmp_path.iterdir()) == before


def test_brackets_in_a_message_are_no_markup(call, folder, tmp_path):
    code, _, errors = call("report", "[/x] [bold].json", "--out", tmp_path / "r.html")
    assert (code, "[/x] [bold].json" in errors) == (2, True)
    asked = "one?\ntwo?\nthree?\nfour?\nfive?"
    code, _, errors = call("bake", folder, "--context", "a [/b] [INST] c", "--queries", asked, "--tokens", 2)
    assert code in (0, 1)
    assert "[INST]" in errors.replace(" ", "").replace("\n", "")


def test_debug_shows_the_traceback(monkeypatch):
    from contextfold.errors import InputError

    monkeypatch.setattr(sys, "argv", ["contextfold", "--debug", "verify", "x"])
    with pytest.raises(InputError):
        cli.main()


def test_the_public_surface_is_the_list():
    import contextfold

    assert contextfold.__all__ == sorted(contextfold.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n))
    for name in contextfold.__all__:
        assert getattr(contextfold, name) is not None
    assert set(contextfold.__all__) == set(contextfold._HOME)
    with pytest.raises(AttributeError):
        contextfold.nothing  # noqa: B018


ASKED = "one?\ntwo?\nthree?\nfour?\nfive?\nsix?\nseven?\neight?"
BAKE = ("--context", CONTEXT, "--queries", ASKED, "--tokens", 3)


def test_bake_judges_by_questions_that_it_did_not_learn_from(call, folder, tmp_path):
    out = tmp_path / "patch.safetensors"
    code, printed, _ = call("bake", folder, *BAKE, "--out", out, "--json", "--max-memory", "1TiB")
    found = json.loads(printed)
    assert found["questions"] == 2
    assert found["max_memory"] == 2**40 > found["peak_bytes"] > found["resident_bytes"] > found["streamed_bytes"] == 0
    assert set(found["controls"]) == {"other_context", "shuffled_context", "random_patch"}
    windows = {name: control["in_window"] for name, control in found["controls"].items()}
    assert windows.pop("random_patch") is None
    assert all(set(window) == {"kl_recovered", "interval", "kl_patched", "top1"} for window in windows.values())
    assert found["kl_recovered"] == 1 - found["kl_patched"] / found["kl_unpatched"]
    assert {site["role"] for site in found["sites"]} == {"attention output map", "output map"}
    assert found["estimator"] == "two-sites"
    assert (code == 0) == found["holds"] == (found["patch"] is not None) == out.exists()
    assert list(tmp_path.iterdir()) == ([out] if found["holds"] else [])


def test_bake_asks_only_what_is_new_when_answers_are_kept(call, folder, tmp_path, monkeypatch):
    from contextfold.bake import examples

    rows = []
    batch = examples._batch
    monkeypatch.setattr(examples, "_batch", lambda *a: rows.append(len(a[1])) or batch(*a))
    bake = ("--context", CONTEXT, "--held-out", "who?", "--tokens", 3, "--no-controls", "--json")
    asked, found = "one?\ntwo?\nthree?\nfour?", []
    for queries in (asked, asked, asked + "\nfive?"):
        rows.clear()
        _, printed, _ = call("bake", folder, *bake, "--queries", queries, "--keep-answers", tmp_path / "kept")
        found.append((json.loads(printed), sum(rows)))
    asked_first, again, more = (count for _, count in found)
    # The patched model and the bare one answer the held-out question each time; then a greedy answer and a sampled one.
    assert (again, more) == (2, 2 + 2)
    assert asked_first > 2 + 9
    assert found[0][0]["kl_recovered"] == found[1][0]["kl_recovered"]
    assert found[2][0]["calibration_tokens"] > found[1][0]["calibration_tokens"]


def test_a_curve_tells_what_fewer_questions_would_do(call, folder):
    _, printed, _ = call("bake", folder, *BAKE, "--curve", "--no-controls", "--json")
    found = json.loads(printed)
    assert list(found["fewer"]) == ["1", "3"]  # of six, an eighth and a quarter are one question
    assert all(row["kl_recovered"] == 1 - row["kl_patched"] / found["kl_unpatched"] for row in found["fewer"].values())
    _, table, _ = call("bake", folder, *BAKE, "--curve", "--no-controls")
    assert "from 3 questions" in table


def test_an_interrupted_command_says_so(call, folder, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("contextfold.verify.fold_and_prove", interrupt)
    code, printed, errors = call("fold", folder, "--context", CONTEXT, "--query", QUERY)
    assert (code, printed) == (130, "")
    assert "interrupted; the model and all files are as they were" in errors


def test_bake_learns_from_sampled_answers_too(call, folder):
    tokens = []
    for answers in (1, 3):
        _, printed, _ = call("bake", folder, *BAKE, "--answers", answers, "--no-controls", "--json")
        tokens.append(json.loads(printed)["calibration_tokens"])
    assert 1.5 * tokens[0] < tokens[1] <= 3 * tokens[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--estimator", "magic"), "two-sites, output, attention, matrix, all"),
        (("--anchors", 99), "not between 0 and 40"),
        (("--penalty", "much"), "neither a number nor auto"),
        (("--answers", 0), "give at least 1"),
        (("--queries", "one?\ntwo?"), "too few to hold some out"),
        (("--held-out", " "), "one per line"),
    ],
)
def test_bake_refuses_bad_options_in_one_line(call, folder, tmp_path, arguments, words):
    out = tmp_path / "patch.safetensors"
    code, printed, errors = call("bake", folder, *BAKE, "--out", out, *arguments)
    assert (code, printed) == (2, "")
    assert words in errors
    assert not out.exists()
