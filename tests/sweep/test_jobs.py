"""A jobs file: what it expands to, what changes a digest, and what is refused."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.sweep.conftest import QUESTIONS, write

from contextfold.errors import InputError
from contextfold.sweep import read_jobs

BAKE = {"estimators": ["two-sites", "output"], "queries": QUESTIONS, "tokens": 2}


def test_a_file_is_the_product_of_its_lists(place, model):
    (place / "again").symlink_to(model)
    contexts = {"one": "abc", "two": {"text": "def", "queries": ["p", "q"], "held_out": ["q", "r"]}}
    path = write(
        place, models=["model", "again"], contexts=contexts, seeds=[0, 7], bake=BAKE,
        fold={"queries": ["x", "y"], "rules": ["balanced", "floored"], "keep": "none"},
    )  # fmt: skip
    jobs = read_jobs(path)
    wanted = {
        *itertools.product(["bake"], ["model", "again"], ["one", "two"], ["two-sites", "output"], [0, 7], [None]),
        *itertools.product(["fold"], ["model", "again"], ["one", "two"], ["balanced", "floored"], [None], ["x", "y"]),
    }
    assert len(jobs) == len(wanted) == 32
    assert {(j.kind, j.model, j.context, j.method, j.seed, j.options.get("query")) for j in jobs} == wanted
    assert len({job.digest for job in jobs}) == 32
    models = [job.model for job in jobs]
    assert models == sorted(models, reverse=True)  # those of one model stand together
    asked = {j.context: (j.options["queries"], j.options["held_out"]) for j in jobs if j.kind == "bake"}
    assert asked["one"] == (["what is q", "what is r", "what is s"], ["what is p", "what is t"])  # every fourth
    assert asked["two"] == (["p"], ["q", "r"])


def test_the_example_of_the_page_is_what_the_page_says(place, model):
    page = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text(encoding="utf-8")
    text = page.split("```yaml\n")[1].split("```")[0]
    (place / "again").symlink_to(model)
    (place / "handbook.txt").write_text("who may order what")
    (place / "about-the-handbook.txt").write_text("who?\nwhat?\n")
    (place / "questions.txt").write_text("\n".join(QUESTIONS))
    (place / "jobs.yaml").write_text(text.replace("[smollm2, ./my-model]", "[model, ./again]"))
    jobs = read_jobs(place / "jobs.yaml")
    assert f"= {len(jobs)} jobs" in page
    assert {job.options["held_out"][0] for job in jobs if job.context == "handbook" and job.kind == "bake"} == {
        "Who signs a purchase order?"
    }


def test_paths_start_at_the_file(place, monkeypatch):
    (place / "context.txt").write_text("from a file")
    (place / "asked.txt").write_text("p?\n\nq?\np?\nr?\ns?\n")
    path = write(place, contexts={"one": "@context.txt"}, bake={"queries": "@asked.txt"}, fold=None)
    monkeypatch.chdir("/")
    (job,) = read_jobs(path)
    assert (job.text, job.options["held_out"], job.options["queries"]) == ("from a file", ["p?"], ["q?", "r?", "s?"])


def test_a_digest_follows_every_input(place, model):
    path = write(place, bake=BAKE, fold=None)
    job = read_jobs(path)[0]
    assert read_jobs(path)[0].digest == job.digest
    others = [
        replace(job, **{name: "other"}) for name in ("kind", "model", "stamp", "dtype", "context", "text", "method")
    ]
    others += [replace(job, seed=5)]
    others += [replace(job, options={**job.options, key: "other"}) for key in job.options]
    assert len({job.digest, *(other.digest for other in others)}) == len(others) + 1
    assert replace(job, source="/elsewhere").digest == job.digest  # the same model in another place

    (place / "model").unlink()
    shutil.copytree(model, place / "model")
    assert read_jobs(path)[0].digest == job.digest
    weights = place / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert read_jobs(path)[0].digest != job.digest


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"models": None}, "models is missing"),
        ({"models": ["nowhere"]}, "no model 'nowhere'"),
        ({"models": ["model", "model"]}, "names 'model' twice"),
        ({"models": "model"}, "not a list"),
        ({"model": ["model"]}, "key 'model' is unknown"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"contexts": {}}, "contexts"),
        ({"contexts": {"one": 3}}, "one"),
        ({"contexts": {"one": {"text": "abc", "query": "p"}}}, "key 'query' is unknown"),
        ({"contexts": {"one": "@missing.txt"}}, "missing.txt"),
        ({"fold": None}, "asks for nothing"),
        ({"fold": {"queries": []}}, "not a list with something"),
        ({"fold": {"queries": ["p"], "rules": ["magic"]}}, "rule 'magic'"),
        ({"fold": {"queries": ["p"], "keep": "5:2"}}, "5:2"),
        ({"seeds": [1]}, "only a bake has"),
        ({"bake": {"queries": QUESTIONS, "answers": 1}, "seeds": [1, 2]}, "answers: 1"),
        ({"bake": BAKE, "seeds": [-1]}, "seeds -1"),
        ({"bake": {"estimators": ["magic"], "queries": QUESTIONS}}, "estimator 'magic'"),
        ({"bake": {"estimators": ["output"]}}, "no queries"),
        ({"bake": {"queries": ["p", "q"]}}, "too few"),
        ({"bake": {"queries": ["p"], "held_out": ["p"]}}, "held out"),
        ({"bake": {**BAKE, "tokens": 0}}, "tokens 0"),
        ({"bake": {**BAKE, "anchors": 41}}, "between 0 and 40"),
        ({"bake": {**BAKE, "penalty": "much"}}, "penalty 'much'"),
        ({"bake": {**BAKE, "tol": -1}}, "tol -1"),
        ({"bake": {**BAKE, "controls": "some"}}, "controls 'some'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(place, changed, words):
    with pytest.raises(InputError, match=words) as refused:
        read_jobs(write(place, **changed))
    assert "\n" not in str(refused.value)


def test_what_is_no_mapping_is_refused(place):
    path = place / "jobs.yaml"
    for text, words in (("a: [", "is not YAML"), ("- a", "key: value"), ("", "key: value"), ("1: a", "key 1")):
        path.write_text(text)
        with pytest.raises(InputError, match=words) as refused:
            read_jobs(path)
        assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="existing file"):
        read_jobs(place / "missing.yaml")


def test_numbers_that_yaml_takes_for_texts_are_numbers(place):
    path = place / "jobs.yaml"
    path.write_text(
        f"models: [model]\ncontexts: {{one: abc}}\nbake: {{queries: {QUESTIONS}, penalty: 1e-3, tol: 1e-2}}"
    )
    options = read_jobs(path)[0].options
    assert (options["penalty"], options["tol"]) == (0.001, 0.01)
