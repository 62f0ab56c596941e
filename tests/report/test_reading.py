"""Which JSON a report accepts, and what it says of other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runs
from contextfold.errors import InputError
from contextfold.report import KINDS, read, run_of
from contextfold.report.page import SECTIONS
from contextfold.report.shapes import Each, Maybe, misfit

MEASURED = Path(__file__).parents[2] / "docs" / "measured"


@pytest.mark.parametrize("name", runs.ALL)
def test_every_kind_is_recognised(name, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(runs.ALL[name]()), encoding="utf-8")
    run = read(path)
    assert run.kind.name == name
    assert run.holds is {"generate": False, "reproduce": None}.get(name, True)
    assert {kind.name for kind in KINDS} == set(runs.ALL) == set(SECTIONS)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("demo", "fold"),
        ("paper-gemma3-270m-float32-balanced", "fold"),
        ("sequence-smollm2-64", "sequence"),
        *((path.stem, "reproduce") for path in MEASURED.glob("reproduce-*.json")),
    ],
)
def test_files_of_the_repository_are_read(file, kind):
    assert read(MEASURED / f"{file}.json").kind.name == kind


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "no object"),
        ("{}", "no keys"),
        ('{"parts": 1, "other": 2}', "an object with other, parts"),
        ("[" * 100_000, "is not JSON"),
        ("\x00\xff", "is not JSON"),
    ],
)
def test_other_files_are_refused_by_what_they_are(text, words, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=words) as met:
        read(path)
    assert str(path) in str(met.value)
    assert "--json" in str(met.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            read(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: run.pop("tokens"), "key tokens is missing"),
        (lambda run: run.update(tokens="two"), "tokens should be a whole number, but is 'two'"),
        (lambda run: run.update(tokens=True), "tokens should be a whole number, but is True"),
        (lambda run: run.update(proven=1), "proven should be true or false"),
        (lambda run: run["controls"]["other_context"].pop("tokens"), "key controls.other_context.tokens is missing"),
        (lambda run: run["steps"][1].update(kl_nats=None), r"steps\[1\].kl_nats should be a number, but is None"),
        (lambda run: run["steps"][1]["texts"].update(patched=[1]), r"steps\[1\].texts.patched should be a text"),
        (lambda run: run.update(layers={}), "layers should be a list"),
        (lambda run: run.update(layers=[]), "nothing stands under layers"),
        (lambda run: run.update(steps=[]), "nothing stands under steps"),
        (lambda run: run["steps"][0]["weight_ratio"].pop(), "weight_ratio that belong together have lengths 1, 2"),
        (lambda run: run["layers"][0]["u_counts"].pop(), "u_counts that belong together have lengths 3, 4"),
        (lambda run: run["spectra"][0]["numbers"].pop(), "singular_values of .* have lengths 2, 3"),
    ],
)
def test_damage_is_named_where_it_is(change, words):
    damaged = runs.fold()
    change(damaged)
    with pytest.raises(InputError, match=words):
        run_of(damaged)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: run["rows"][0].update(ours=[1]), r"rows\[0\].ours should be a number or a text, but is \[1\]"),
        (lambda run: run["rows"][0].update(ours=True), r"rows\[0\].ours should be a number or a text, but is True"),
        (lambda run: run["rows"][1].pop("note"), r"key rows\[1\].note is missing"),
        (lambda run: run.update(rows=[]), "nothing stands under rows"),
        (lambda run: run["parts"].append(run["parts"][0]), "parts that belong together have lengths 1, 2"),
        (lambda run: part(run)["u"]["counts"][0].pop(), "counts of float32-prompt-1 .* have lengths 19, 20"),
        (lambda run: part(run)["unpatched"]["logit_gap"].pop(), "logit_gap of float32-prompt-1 .* lengths 1, 2"),
        (
            lambda run: part(run)["curves"]["x"].pop("written"),
            "key details.float32-prompt-1.curves.x.written is missing",
        ),
        (lambda run: part(run)["curves"]["theorem"]["perturbed"]["logit_gap"].pop(), "logit_gap of .* lengths 1, 2"),
        (lambda run: part(run)["held"].update(theorem={"alone": [True]}), "theorem.alone.* should be a list"),
    ],
)
def test_damage_of_a_reproduction_is_named_too(change, words):
    damaged = runs.reproduce()
    change(damaged)
    with pytest.raises(InputError, match=words):
        run_of(damaged)


def part(run):
    return run["details"]["float32-prompt-1"]


def test_shapes_say_what_they_met():
    shape = {"a": Maybe([int]), "b": Each({"c": float})}
    assert misfit({"b": {"x": {"c": 1}}}, shape) is None
    assert misfit({"a": None, "b": {}}, shape) is None
    assert misfit({"a": [1, 2.5], "b": {}}, shape) == "a[1] should be a whole number, but is 2.5"
    assert misfit({"b": {"x": {}}}, shape) == "key b.x.c is missing"
    assert misfit({"b": []}, shape) == "b should be an object, but is []"
    assert misfit(3, shape) == "the whole should be an object, but is 3"


def test_older_files_without_rows_are_still_read():
    old = runs.fold()
    for key in ("steps", "spectra", "u_edges", "context", "query", "receipt"):
        old.pop(key)
    for layer in old["layers"]:
        layer.pop("u_counts")
    assert run_of(old).kind.name == "fold"
