"""The page, read by an HTML parser of the standard library: what stands on it is what stands in the JSON."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import runs
from contextfold.anatomy import bind
from contextfold.errors import InputError
from contextfold.fold import fold_token
from contextfold.patchfile import save as save_patch
from contextfold.report import chapter, chapter_of_patch, page, read, run_of, save
from contextfold.report.parts import readable, visible
from tiny import shared, tokens

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Reader(HTMLParser):
    """Elements with their attributes, texts, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.figures: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "data":
            self.figures.append((dict(attrs), ""))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)
            if self.open[-1] == "data":
                self.figures[-1] = (self.figures[-1][0], data)


def at(found: Any, pointer: str) -> Any:
    """RFC 6901, without the first slash."""
    for step in pointer.split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found[int(name)] if isinstance(found, list) else found[name]
    return found


@pytest.mark.parametrize("name", runs.ALL)
def test_numbers_on_the_page_are_those_of_the_json(made, name):
    found, text = made[name]
    figures = Reader(text).figures
    assert len(figures) > 8
    for attributes, shown in figures:
        value = at(found, attributes["data-key"])
        assert attributes["value"] == str(value)
        if value is not None:
            if shown.endswith("%"):
                assert float(shown[:-1]) / 100 == pytest.approx(value, abs=0.00051)
            else:
                assert float(shown) == pytest.approx(value, rel=0.05)


MEASURED = Path(__file__).parents[2] / "docs" / "measured"


@pytest.mark.parametrize("path", sorted(MEASURED.glob("reproduce-*.json")), ids=lambda path: path.stem)
def test_every_row_of_a_reproduction_stands_on_its_page(path):
    """The files of the repository, read by another reader than ours: numbers, words, notes, and what is missing."""
    found = json.loads(path.read_text())
    reader = Reader(page([chapter(read(path), 1)]))
    shown = {attributes["data-key"]: (attributes["value"], text) for attributes, text in reader.figures}
    cells = {text.strip() for text in reader.texts}
    for k, row in enumerate(found["rows"]):
        for key in ("published", "ours", "difference"):
            at = f"rows/{k}/{key}"
            if isinstance(row[key], float | int):
                assert shown[at][0] == str(row[key])
                assert float(shown[at][1]) == pytest.approx(row[key], rel=5e-3)
            else:
                assert at not in shown
                assert row[key] is None or row[key] in cells
        assert row["figure"] in cells
        assert {row["note"]} - {""} <= cells
    assert all({each["what"], each["why"]} <= cells for each in found["not_reproduced"])
    assert sum(key.startswith("rows/") for key in shown) == sum(
        isinstance(row[key], float | int) for row in found["rows"] for key in ("published", "ours", "difference")
    )


def test_a_paper_without_figures_of_its_own_shows_its_rows():
    found = {**runs.reproduce(), "paper": "1706.03762", "details": {"part": {"anything": [1, "two"]}}}
    everything = "".join(Reader(page([chapter(run_of(found), 1)])).texts)
    assert "words beside words" in everything
    assert "Measured besides" not in everything
    assert "Measured besides" in "".join(Reader(page([chapter(run_of(runs.reproduce()), 1)])).texts)


@pytest.mark.parametrize("name", runs.ALL)
def test_hostile_texts_are_shown_and_do_nothing(made, name):
    found, text = made[name]
    reader = Reader(text)
    everything = "".join(reader.texts)
    assert runs.HOSTILE[0] in everything
    assert "{{7*7}}" in everything or "{{7*7}}" not in json.dumps(found)
    # One script of ours; the others are data.
    kinds = [attributes.get("type") for tag, attributes in reader.elements if tag == "script"]
    assert kinds.count(None) == 1
    assert set(kinds) <= {None, "application/json"}
    assert not any(tag in ("iframe", "object", "embed", "link", "base") for tag, _ in reader.elements)
    for tag, attributes in reader.elements:
        assert not any(key.startswith("on") for key in attributes), (tag, attributes)
        for key in ("src", "href", "xlink:href"):
            assert (attributes.get(key) or "#").startswith(("#", "data:image/png;base64,")), (tag, attributes)
    for script in reader.scripts[:-1]:
        if script.strip():
            json.loads(script)


def test_names_on_a_page_of_several_runs_are_unique(chapters):
    reader = Reader(page([drawn for _, drawn in chapters.values()]))
    names = [attributes["id"] for _, attributes in reader.elements if attributes.get("id")]
    assert len(names) == len(set(names))
    known = set(names)
    for _, attributes in reader.elements:
        for value in attributes.values():
            for reference in re.findall(r"url\(#([^)]+)\)|^#(.+)$", value or ""):
                assert "".join(reference) in known
    everything = "".join(reader.texts)
    for name in runs.ALL:
        assert runs.ALL[name]().get("verdict", runs.SENTENCES.get(name)) in everything


def test_the_policy_allows_one_script_and_no_request(made):
    import base64
    import hashlib

    reader = Reader(made["fold"][1])
    policy = next(a["content"] for t, a in reader.elements if t == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(reader.scripts[-1].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}';" in policy
    assert "http" not in policy


def test_figures_take_their_colours_from_the_page(made):
    text = made["fold"][1]
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert drawn
    for svg in drawn:
        assert "var(--" in svg
        assert re.search(r"(fill|stroke): #(?!ffffff|000000)[0-9a-f]{6}", svg) is None
        assert "<metadata" not in svg


def test_what_a_stored_patch_holds_is_drawn(tmp_path):
    patch = fold_token(bind(shared("gemma3_text")), tokens(9), tokens(4, seed=2)).patch
    text = page([chapter_of_patch(patch, "p.safetensors", 1)])
    everything = "".join(Reader(text).texts)
    assert patch.header.fingerprint in everything
    for words in ("mlp.down_proj", "Every edit of a matrix has one singular value", "Norm of every edit"):
        assert words in everything


def test_a_run_without_rows_says_so():
    old = runs.fold()
    for key in ("steps", "spectra", "u_edges"):
        old.pop(key)
    for layer in old["layers"]:
        layer.pop("u_counts")
    everything = "".join(Reader(page([chapter(run_of(old), 1)])).texts)
    assert "an older contextfold wrote it" in everything
    assert "Size of the patch by layer" in everything


def test_what_has_no_shape_gets_one():
    assert visible("\n\n") == "⏎⏎"
    assert visible("  ") == "␣␣"
    assert visible("") == "∅"
    assert visible("a\u202eb") == "a\\u{202e}b"
    assert len(visible("x" * 500)) == 40
    assert readable("a\nb\x00\u2066") == "a\nb\\u{0}\\u{2066}"
    assert visible(None) == "–"


def test_the_command_writes_one_page(call, tmp_path):
    found, out, stored = tmp_path / "run.json", tmp_path / "report.html", tmp_path / "p.safetensors"
    found.write_text(json.dumps(runs.sequence()))
    save_patch(fold_token(bind(shared("llama")), tokens(9), tokens(4, seed=2)).patch, stored)
    code, printed, _ = call("report", found, found, "--patch", stored, "--out", out, "--json")
    said = json.loads(printed)
    assert (code, said["bytes"]) == (0, out.stat().st_size)
    assert [run["kind"] for run in said["runs"]] == ["sequence", "sequence"]
    assert said["patches"] == [str(stored)]
    assert len([t for t, _ in Reader(out.read_text("utf-8")).elements if t == "article"]) == 3
    assert sorted(tmp_path.iterdir()) == sorted([found, out, stored])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "r.html"], "nothing to report"),
        (["none.json", "--out", "r.html"], "cannot read none.json"),
        (["{run}", "--out", "r.txt"], "ends in .html"),
        (["{run}", "--out", "no/such/folder/r.html"], "choose another --out"),
        (["{bad}", "--out", "r.html"], "is not JSON"),
        (["{run}", "--patch", "{run}", "--out", "r.html"], "safetensors"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(call, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    good, bad = tmp_path / "run.json", tmp_path / "bad.json"
    good.write_text(json.dumps(runs.bake()))
    bad.write_text("{")
    before = sorted(tmp_path.iterdir())
    code, printed, errors = call("report", *(a.format(run=good, bad=bad) for a in arguments))
    assert (code, printed) == (2, "")
    assert words in errors
    assert len([line for line in errors.splitlines() if line.strip()]) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_without_the_extra_the_command_says_what_to_install(call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = tmp_path / "run.json"
    run.write_text(json.dumps(runs.bake()))
    code, _, errors = call("report", run, "--out", tmp_path / "r.html")
    assert code == 2
    assert "pip install 'contextfold[report]'" in " ".join(errors.split())
    assert list(tmp_path.iterdir()) == [run]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        save("text", tmp_path / "folder.html")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder.html"]


def test_reading_and_writing_again_gives_the_same_page(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(runs.bake()))
    assert page([chapter(read(path), 1)]) == page([chapter(read(path), 1)])


def test_a_control_stands_beside_what_its_context_does_in_the_window(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(runs.bake()))
    told = " ".join(Reader(page([chapter(read(path), 1)])).texts)
    assert re.search(r"patch of the shuffled context\s+18\.8%", told)
    assert re.search(r"the shuffled context itself, in the window\s+27\.3%", told)
    assert "random patch of equal norm itself" not in told
