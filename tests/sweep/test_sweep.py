"""A sweep in one process: rows, what is kept, what is run again, and what a failure leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from tests.sweep.conftest import QUESTIONS, write

from contextfold.sweep import COLUMNS, engine, read_jobs, sweep, write_parquet

PAGE = Path(__file__).parents[2] / "docs" / "sweep.md"
BAKE = {"estimators": ["two-sites", "output"], "queries": QUESTIONS, "tokens": 2}


@pytest.fixture
def ran(monkeypatch):
    """Digests of the jobs that were run, in order."""
    found: list[str] = []
    run = engine.Worker.run

    def counted(self, job, digest):
        found.append(digest)
        return run(self, job, digest)

    monkeypatch.setattr(engine.Worker, "run", counted)
    return found


def test_rows_are_what_the_single_commands_say(place, call):
    path = write(place, bake={**BAKE, "held_out": ["what is v", "what is w"], "anchors": 3})
    out = place / "r.parquet"
    code, printed, _ = call("sweep", path, "--out", out, "--json")
    found = json.loads(printed)
    assert (code, found["jobs"], found["ran"], found["failed"], found["workers"]) == (0, 3, 3, 0, 1)
    rows = parquet.read_table(out).to_pylist()
    assert rows == found["rows"]
    assert list(rows[0]) == list(COLUMNS)
    section = (PAGE.parent / "json.md").read_text(encoding="utf-8").split("## `sweep`")[1].split("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == set(found)
    asked = ("--queries", "\n".join(QUESTIONS), "--held-out", "what is v\nwhat is w", "--tokens", 2, "--anchors", 3)
    model = str(place / "model")
    for row in rows[:2]:
        _, printed, _ = call(
            "bake", model, "--context", "abc def ghi", *asked, "--estimator", row["estimator"], "--json"
        )
        alone = json.loads(printed)
        for key in ("holds", "questions", "calibration_tokens", "kl_unpatched", "kl_recovered", "top1", "same_answers"):
            assert row[key] == alone[key]
        assert [row["interval_low"], row["interval_high"]] == alone["interval"]
        assert row["controls_random_patch_kl_recovered"] == alone["controls"]["random_patch"]["kl_recovered"]
        assert row["controls_shuffled_context_top1"] == alone["controls"]["shuffled_context"]["top1"]
        assert row["strengths_0_5"] == alone["strengths"]["0.5"]
        assert row["elsewhere_general_questions_kl_ratio"] == alone["elsewhere"]["general questions"]["kl_ratio"]
        assert row["fingerprint"] == alone["receipt"]["fingerprint"]
    alone = json.loads(call("fold", model, "--context", "abc def ghi", "--query", " ijk", "--json")[1])
    assert rows[2]["holds"] is alone["proven"] is True
    for key in (
        "worst_logit_gap",
        "unpatched_logit_gap",
        "patch_bytes",
        "perturbed_worst_logit_gap",
        "scatter_logit_gap",
    ):
        assert rows[2][key] == alone[key]
    assert (
        rows[2]["controls_other_context_smallest_logit_gap"]
        == (alone["controls"]["other_context"]["smallest_logit_gap"])
    )
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 2**20 for row in rows)


def test_seeds_draw_other_answers(place):
    jobs = read_jobs(write(place, bake={**BAKE, "estimators": ["output"]}, seeds=[0, 1], fold=None))
    first, second = sweep(jobs, place / "work").rows
    assert first["kl_recovered"] != second["kl_recovered"]
    assert first["kl_unpatched"] == second["kl_unpatched"]  # judged by the same answers


def test_what_is_done_is_not_done_again(place, ran):
    path = write(place, fold={"queries": [" ijk", " lmn"]})
    told: list[int] = []
    first = sweep(read_jobs(path), place / "work", progress=told.append)
    assert (len(ran), told) == (2, [0, 1, 1])
    files = sorted((place / "work").iterdir())
    assert [re.fullmatch(r"job-[0-9a-f]{16}\.json", file.name) is not None for file in files] == [True, True]
    again = sweep(read_jobs(path), place / "work")
    assert (len(ran), again.ran, again.rows) == (2, 0, first.rows)
    files[0].write_text(files[0].read_text()[:-9])  # damaged: run anew
    assert sweep(read_jobs(path), place / "work").ran == 1
    assert len(ran) == 3


def test_a_changed_input_is_run_anew_and_only_it(place, ran):
    sweep(read_jobs(write(place, contexts={"one": "abc def", "two": "ghi jkl"})), place / "work")
    jobs = read_jobs(write(place, contexts={"one": "abc def", "two": "ghi jkm"}))
    outcome = sweep(jobs, place / "work")
    assert outcome.ran == 1
    assert ran[2:] == [jobs[1].digest]
    assert [row["job"] for row in outcome.rows] == [job.digest for job in jobs]
    assert len(list((place / "work").iterdir())) == 3  # what was asked before is kept, in case it is asked again


def test_a_job_that_fails_is_a_row_and_is_tried_again(place, call, ran, monkeypatch):
    out = place / "r.parquet"
    # One token of context, which is the sink and stays: there is nothing to fold.
    path = write(place, contexts={"none": "a", "one": "abc def"}, fold={"queries": [" ijk"], "keep": "0:1"})
    code, printed, _ = call("sweep", path, "--out", out, "--json")
    found = json.loads(printed)
    assert (code, found["failed"], found["ran"]) == (1, 1, 2)
    bad, good = parquet.read_table(out).to_pylist()
    assert (good["error"], bad["holds"], bad["context"]) == (None, None, "none")
    assert bad["error"]
    assert "\n" not in bad["error"]
    code, printed, _ = call("sweep", path, "--out", out)
    assert (code, len(ran), ran[0] == ran[2]) == (1, 3, True)
    assert "1 run, 1 kept, 0 missing, 1 failed" in printed

    def broken(self, job, bound):
        raise RuntimeError("out of memory\nsomewhere")

    monkeypatch.setattr(engine.Worker, "_fold", broken)
    assert sweep(read_jobs(path), place / "work").rows[0]["error"] == "RuntimeError: out of memory somewhere"


def test_a_model_that_cannot_be_loaded_fails_its_own_jobs(place):
    broken = place / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    rows = sweep(read_jobs(write(place, models=["broken", "model"])), place / "work").rows
    assert "broken" in rows[0]["error"]
    assert (rows[1]["error"], rows[1]["holds"]) == (None, True)


def test_the_json_stands_alone_on_stdout(place, call, monkeypatch):
    run = engine.Worker.run

    def chatty(self, job, digest):
        print("a word from elsewhere")  # noqa: T201
        return run(self, job, digest)

    monkeypatch.setattr(engine.Worker, "run", chatty)
    _, printed, errors = call("sweep", write(place), "--out", place / "r.parquet", "--json")
    assert json.loads(printed)["ran"] == 1
    assert "a word from elsewhere" in errors


def test_collecting_runs_nothing(place, call, ran):
    path, out = write(place, fold={"queries": [" ijk", " lmn"]}), place / "r.parquet"
    sweep(read_jobs(path)[:1], place / "r.parquet.work")
    code, printed, _ = call("sweep", path, "--out", out, "--collect", "--json")
    found = json.loads(printed)
    assert (code, found["missing"], found["kept"], found["ran"], len(ran)) == (0, 1, 1, 0, 1)
    assert parquet.read_table(out).num_rows == 1


def test_a_killed_sweep_goes_on(place, ran):
    path, out = write(place, fold={"queries": [f" q{i}" for i in range(40)]}), place / "r.parquet"
    work = place / "r.parquet.work"
    script = "import sys; from contextfold.cli import main; sys.argv[0] = 'contextfold'; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "sweep", path, "--out", out],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while len(list(work.glob("job-*.json"))) < 2 and time.monotonic() < until and process.poll() is None:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    done = len(list(work.glob("job-*.json")))
    assert 2 <= done < 40
    assert not out.exists()
    outcome = sweep(read_jobs(path), work)
    assert (outcome.ran, len(ran), len(outcome.rows)) == (40 - done, 40 - done, 40)
    assert len({row["job"] for row in outcome.rows}) == 40
    assert all(row["error"] is None for row in outcome.rows)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--workers", "2"), "--ray"),
        (("--ray", "local", "--workers", "0"), "at least 1"),
        (("--out", "/no/such/folder/r.parquet"), "--out"),
        (("--work", "jobs.yaml"), "choose another --work"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(place, call, monkeypatch, more, words):
    path = write(place)
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    code, printed, errors = call("sweep", path, "--out", place / "r.parquet", *more)
    assert (code, printed) == (2, "")
    assert len([line for line in errors.splitlines() if line.strip()]) == 1
    assert words in errors
    assert sorted(place.iterdir()) == before


def test_a_file_that_cannot_be_run_writes_nothing(place, call):
    path = write(place, models=["nowhere"])
    before = sorted(place.iterdir())
    code, printed, errors = call("sweep", path, "--out", place / "r.parquet")
    assert (code, printed, len(errors.strip().splitlines())) == (2, "", 1)
    assert sorted(place.iterdir()) == before


def test_every_column_has_its_type_where_nothing_was_measured(place):
    write_parquet(place / "empty.parquet", [])
    names = {str: "string", int: "int64", float: "double", bool: "bool"}
    schema = parquet.read_schema(place / "empty.parquet")
    assert {field.name: str(field.type) for field in schema} == {n: names[kind] for n, kind in COLUMNS.items()}
    assert len(schema.names) == len(set(schema.names))


def test_the_page_names_every_column():
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_]+)`", text))
    plain = [name for name in COLUMNS if not name.startswith("controls_")]
    assert [name for name in plain if name not in named] == []
