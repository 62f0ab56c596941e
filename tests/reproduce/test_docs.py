"""The tables of docs/papers.md are those of the files that the commands wrote."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from contextfold.reproduce import PAPERS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("papers_script", ROOT / "scripts" / "papers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_files(script):
    page = (ROOT / "docs" / "papers.md").read_text()
    assert script.page() == page
    assert {match[1] for match in script.MARKERS.findall(page)} == {paper.number for paper in PAPERS}


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.number)
def test_the_rows_of_a_file_follow_from_its_details(script, paper):
    """What was measured, read again by the code of today."""
    found = json.loads(script.path_of(paper.number).read_text())
    assert found["quick"] is False
    assert found["paper"] == paper.number
    assert {part["name"] for part in found["parts"]} == {part.name for part in paper.parts(False)}
    assert [row.to_json() for row in paper.rows(found["details"])] == found["rows"]
    assert found["not_reproduced"] == [{"what": m.what, "why": m.why} for m in paper.missing]


def test_a_changed_figure_is_seen(script, tmp_path, monkeypatch):
    number = PAPERS[0].number
    found = json.loads(script.path_of(number).read_text())
    found["rows"][0]["ours"] = 12.25
    files = {paper.number: script.path_of(paper.number).read_text() for paper in PAPERS}
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    for each, text in {**files, number: json.dumps(found)}.items():
        script.path_of(each).write_text(text)
    changed = script.page()
    assert changed != (ROOT / "docs" / "papers.md").read_text()
    assert "12.25" in changed
