"""The engine of `reproduce`: parts are kept, a run that was stopped goes on, and nothing is done twice."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import scipy.stats
import torch

import tiny
from contextfold.errors import InputError
from contextfold.files import write_json
from contextfold.models import Loaded
from contextfold.reproduce import PAPERS, Bench, Missing, Paper, Part, Row, engine, paper_named, reproduce
from contextfold.reproduce.row import spread

DOCS = Path(__file__).parents[2] / "docs" / "json.md"


class Counted:
    """A paper of two parts that remembers which of them ran."""

    def __init__(self, size: int = 2, stop: str = "", dtype: torch.dtype | None = None) -> None:
        self.ran: list[str] = []
        self.stop = stop
        parts = [Part(name, self.work, {"name": name, "size": size}, size, dtype) for name in ("first", "second")]
        self.paper = Paper(
            "0000.00001", "A title", "some model", lambda quick: parts,
            lambda found: [Row("sums", name, 3.0, part["sum"]) for name, part in found.items()],
            (Missing("the moon", "too far"),),
        )  # fmt: skip

    def work(self, bench, advance, *, name, size, dtype=None):
        self.ran.append(name)
        for _ in range(size):
            advance()
        if name == self.stop:
            raise KeyboardInterrupt
        return {"sum": sum(range(size)), "pair": (1, 2)}


def bench() -> Bench:
    return Bench("some model", lambda dtype: pytest.fail("no part asks for a model"))


def test_a_finished_run_is_not_done_again(tmp_path):
    first = Counted()
    told: list[tuple[str, int, int]] = []
    outcome = reproduce(first.paper, bench(), tmp_path, progress=lambda *at: told.append(at))
    assert first.ran == ["first", "second"]
    assert told[-1] == ("", 4, 4)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    again = Counted()
    kept = reproduce(again.paper, bench(), tmp_path)
    assert again.ran == []
    assert [part["resumed"] for part in kept.to_json()["parts"]] == [True, True]
    assert [part["resumed"] for part in outcome.to_json()["parts"]] == [False, False]
    # A fresh result and a kept one are the same data, tuples and all.
    assert kept.to_json()["details"] == outcome.to_json()["details"] == {
        "first": {"sum": 1, "pair": [1, 2]}, "second": {"sum": 1, "pair": [1, 2]},
    }  # fmt: skip
    assert [row["difference"] for row in kept.to_json()["rows"]] == [-2.0, -2.0]


def test_a_run_that_was_stopped_goes_on(tmp_path):
    stopped = Counted(stop="second")
    with pytest.raises(KeyboardInterrupt):
        reproduce(stopped.paper, bench(), tmp_path)
    going_on = Counted()
    reproduce(going_on.paper, bench(), tmp_path)
    assert going_on.ran == ["second"]
    assert len(list(tmp_path.iterdir())) == 2


def test_other_options_other_code_and_damaged_files_are_no_help(tmp_path, monkeypatch):
    reproduce(Counted().paper, bench(), tmp_path)
    larger = Counted(size=3)
    assert reproduce(larger.paper, bench(), tmp_path).results["first"]["sum"] == 3
    assert larger.ran == ["first", "second"]
    for file in tmp_path.iterdir():
        file.write_text(file.read_text()[:-20])
    again = Counted()
    reproduce(again.paper, bench(), tmp_path)
    assert again.ran == ["first", "second"]
    monkeypatch.setattr(engine, "code_digest", lambda: "other code")
    newer = Counted()
    reproduce(newer.paper, bench(), tmp_path)
    assert newer.ran == ["first", "second"]


def test_other_weights_are_no_help(tmp_path):
    def of(seed: int) -> Bench:
        model = tiny.build("llama", torch.float32, seed=seed)
        return Bench("tiny", lambda dtype: Loaded(model, None, "tiny"))

    for seed, ran in ((0, ["first", "second"]), (0, []), (1, ["first", "second"])):
        asked = Counted(dtype=torch.float32)
        outcome = reproduce(asked.paper, of(seed), tmp_path)
        assert asked.ran == ran
        assert outcome.to_json()["receipt"]["fingerprint"]


def test_the_code_digest_covers_measuring_and_leaves_out_showing(monkeypatch, tmp_path):
    """On a copy of the tree: a changed solver changes it, a changed table does not."""
    package = tmp_path / "contextfold"
    for name in ("lowrank.py", "reproduce/engine.py", "reproduce/curves.py", "reproduce/view.py", "cli/verify.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("x = 1\n")
    monkeypatch.setattr(engine, "__file__", str(package / "reproduce" / "engine.py"))
    digest = engine.code_digest.__wrapped__
    before = digest()
    for name in ("reproduce/view.py", "cli/verify.py"):
        (package / name).write_text("x = 2\n")
    assert digest() == before
    (package / "reproduce" / "curves.py").write_text("x = 2\n")
    assert digest() != before


def test_columns_take_one_line_and_texts_stay_as_they_are(tmp_path):
    payload = {"column": [1, 2.5, 3], "text": "see [a  b] and [1,\n 2]", "texts": ["x  y"], "nested": [[1, 2], [3]]}
    write_json(tmp_path / "found.json", payload)
    written = (tmp_path / "found.json").read_text()
    assert json.loads(written) == payload
    assert re.search(r'"column": \[ ?1, 2.5, 3 ?\],\n', written)


def test_files_are_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    write_json(path, {"old": 1})

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(InputError, match="No space left"):
        write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_differences_and_intervals():
    assert Row("s", "f", 87.5, 100.0).difference == 12.5
    assert Row("s", "f", None, 100.0).difference is None
    assert Row("s", "f", "decays", "decays").difference is None
    for hits, n in ((99, 100), (0, 6), (35, 40), (6, 6)):
        wilson = scipy.stats.binomtest(hits, n).proportion_ci(method="wilson")
        assert spread([True] * hits + [False] * (n - hits)) == (
            f"{hits} of {n}, 95 % interval {100 * wilson.low:.1f} to {100 * wilson.high:.1f}"
        )


def test_papers_are_named_by_their_number():
    for paper in PAPERS:
        assert paper_named(f"arXiv:{paper.number}v3") is paper
        names = [part.name for part in paper.parts(False)]
        assert len(set(names)) == len(names)
        assert {part.name for part in paper.parts(True)} <= set(names)
        assert sum(part.units for part in paper.parts(True)) < sum(part.units for part in paper.parts(False))
    with pytest.raises(InputError, match=r"2511\.17864"):
        paper_named("1706.03762")


def test_every_key_is_documented(tmp_path):
    section = DOCS.read_text().split("## `reproduce`")[1].split("\n## ")[0]
    documented = set(re.findall(r"`([a-z_]+)`", section))
    found = reproduce(Counted().paper, bench(), tmp_path).to_json()
    keys = {*found, *found["rows"][0], *found["parts"][0], *found["not_reproduced"][0]}
    assert keys <= documented, keys - documented


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1706.03762",), "unknown; choose one of 2511.17864"),
        (("2511.17864", "--model", "nowhere"), "no model 'nowhere'"),
        (("2511.17864", "--out", "missing/out.json"), "cannot write"),
        (("2511.17864", "--work", "file/work"), "cannot keep work"),
        (("2511.17864", "--report", "page.txt"), "--report page.txt would hold HTML"),
        (("2511.17864", "--report", "missing/page.html"), "choose another --report"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(call, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    if "--work" not in arguments:
        arguments = (*arguments, "--work", str(tmp_path / "work"))
    code, printed, complaint = call("reproduce", *arguments)
    assert code == 2
    assert printed == ""
    assert said in complaint
    assert "Traceback" not in complaint
    assert not [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.html")]


def test_two_processes_find_what_one_finds(call, tmp_path):
    asked = ("reproduce", "2512.11255", "--quick", "--json", "--work")
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # as in the processes: sums of other threads round otherwise, and training makes much of it
    found = [json.loads(call(*asked, tmp_path / str(jobs), "--jobs", jobs)[1]) for jobs in (1, 2)]
    torch.set_num_threads(threads)
    assert found[0]["details"] == found[1]["details"]
    assert [part["resumed"] for part in found[1]["parts"]] == [False, False, False]
    again = json.loads(call(*asked, tmp_path / "2", "--jobs", 2)[1])
    assert [part["resumed"] for part in again["parts"]] == [True, True, True]
    assert call(*asked, tmp_path / "3", "--jobs", 0)[0] == 2


def test_what_a_process_meets_is_said_in_one_line(call, folder, tmp_path):
    """The first prompt does not fit into a model of 95 positions."""
    config = json.loads((Path(folder) / "config.json").read_text())
    small = tmp_path / "small"
    shutil.copytree(folder, small)
    (small / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 95}))
    asked = ("reproduce", "2511.17864", "--model", small, "--quick", "--jobs", 2, "--work", tmp_path / "w")
    code, printed, said = call(*asked)
    assert (code, printed) == (2, "")
    assert "positions" in said
    assert "Traceback" not in said
