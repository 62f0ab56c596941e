"""What the campaigns on files found, one by one: each of these ended in a traceback, a hang, or a wrong answer once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import runs
from contextfold import models, patchfile
from contextfold.errors import InputError, PatchFileDamaged, PatchFileForeign, one_line
from contextfold.files import Kept, read_whole
from contextfold.fold import fold_token
from contextfold.inspection import patch_json
from contextfold.patch import BiasEdit, Patch, Site
from contextfold.prompts import parse_spans, read_argument
from contextfold.report import chapter, page, run_of
from contextfold.report import read as read_run
from contextfold.spectra import spectra
from contextfold.store import Store
from contextfold.sweep import jobs as jobs_module
from contextfold.sweep import read_jobs, sweep
from spoil import bytes_of, parts_of
from tiny import shared, tokens
from watched import kept


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    patch = fold_token(shared("gemma3_text"), tokens(11), tokens(3, seed=2)).patch
    return patchfile.save(patch, tmp_path_factory.mktemp("good") / "patch.safetensors")


def rewritten(good, path, change=lambda tensors: tensors, **texts):
    with safe_open(good, framework="pt") as file:
        metadata = file.metadata()
    save_file(change(load_file(good)), path, metadata={**metadata, **texts})
    return path


def metadata_of(good):
    return parts_of(good.read_bytes())[0]["__metadata__"]


# --- patch files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64", "int8"])
def test_tensors_of_another_dtype(good, tmp_path, dtype):
    """`isfinite` knows no float8_e4m3fn: a NotImplementedError."""
    path = rewritten(good, tmp_path / "p", lambda found: {k: v.to(getattr(torch, dtype)) for k, v in found.items()})
    with pytest.raises(PatchFileDamaged, match="dtype"):
        patchfile.load(path)


@pytest.mark.parametrize("largest", [1e39, 1e300, float("inf"), float("nan")])
def test_numbers_whose_norms_are_not_finite(good, tmp_path, largest):
    """1e300 was taken, and `inspect --json` printed Infinity, which is no JSON."""

    def change(found):
        name = next(name for name in found if name.endswith(".B"))
        return {**found, name: found[name].double().fill_(largest)}

    with pytest.raises(PatchFileDamaged, match="finite"):
        patchfile.load(rewritten(good, tmp_path / "p", change))


@pytest.mark.parametrize("shape", [(2**40, 0), (2**62, 0), (5, 0)])
def test_a_matrix_of_rank_0_and_any_shape(good, tmp_path, shape):
    """LAPACK complained on standard output, and the logarithm of 0 ended in a traceback."""
    told = metadata_of(good)
    row = next(row for row in json.loads(told["sites"]) if row["edit"] == "matrix")
    empty = {"dtype": "F32", "data_offsets": [0, 0]}
    header = {
        "__metadata__": {**told, "sites": json.dumps([row])},
        "0.A": {**empty, "shape": shape[::-1]}, "0.B": {**empty, "shape": shape},
    }  # fmt: skip
    (tmp_path / "p").write_bytes(bytes_of(header, b""))
    patch = patchfile.load(tmp_path / "p")
    assert [edit["size"] for edit in patch_json(patch)["edits"]] == [0.0]
    assert spectra(patch)[0]["singular_values"] == []


def test_a_matrix_without_rows(good, tmp_path):
    """(0, 2^40) @ (2^40, 0) asked for a Gram matrix of 2^80 entries."""
    told = metadata_of(good)
    row = next(row for row in json.loads(told["sites"]) if row["edit"] == "matrix")
    empty = {"dtype": "F32", "data_offsets": [0, 0]}
    header = {
        "__metadata__": {**told, "sites": json.dumps([row])},
        "0.A": {**empty, "shape": [2**40, 0]}, "0.B": {**empty, "shape": [0, 2**40]},
    }  # fmt: skip
    (tmp_path / "p").write_bytes(bytes_of(header, b""))
    with pytest.raises(PatchFileDamaged, match="shape"):
        patchfile.load(tmp_path / "p")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("mlp", "\\ud800", "surrogate"),  # UnicodeEncodeError when it was shown
        ("mlp", "\\u001b[2J", "printed"),  # cleared the terminal that showed it
        ("mlp", "a\\nb", "printed"),
        ('"layer": 0', '"layer": -1', "no number"),
        ('"layer": 0', f'"layer": {2**70}', "no number"),
        ('"layer": 0', '"layer": 0, "layer": 1', "twice"),  # the second was taken
        ('"offset": 1', '"offset": 1.0', "expected int"),
        ('"edit": "matrix"', f'"edit": "{"x" * 10**6}"', "xxx"),  # a message of a million characters
    ],
)
def test_sites_that_say_nonsense(good, tmp_path, old, new, words):
    text = metadata_of(good)["sites"]
    assert old in text
    with pytest.raises(PatchFileDamaged, match=words) as met:
        patchfile.load(rewritten(good, tmp_path / "p", sites=text.replace(old, new, 1)))
    assert len(str(met.value)) < 500


def test_a_long_format_is_not_repeated(good, tmp_path):
    with pytest.raises(PatchFileForeign) as met:
        patchfile.load(rewritten(good, tmp_path / "p", format="x" * 10**6))
    assert len(str(met.value)) < 500


def test_a_header_of_many_megabytes_is_not_parsed(good, tmp_path):
    with pytest.raises(PatchFileDamaged, match="header of more than"):
        patchfile.load(rewritten(good, tmp_path / "p", sites="[" + "[]," * (patchfile.HEADER // 3)))


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "a\ud800"])
def test_names_that_no_file_has(good, tmp_path, name):
    with pytest.raises(InputError, match="no patch file"):
        patchfile.load(tmp_path / name)
    with pytest.raises(InputError, match="cannot write"):
        patchfile.save(patchfile.load(good), tmp_path / name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_what_could_not_be_read_is_not_written(good, tmp_path, value):
    """A patch with a NaN was written, and refused by everything that read it."""
    patch = patchfile.load(good)
    bad = Patch(patch.header, {Site(0, "m", "bias"): BiasEdit(torch.tensor([1.0, value], dtype=torch.float64))})
    with pytest.raises(InputError, match="nothing was written"):
        patchfile.save(bad, tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


# --- jobs files ----------------------------------------------------------------------------------------------------

BASE = {"models": ["owner/model"], "contexts": {"one": "abc"}, "fold": {"queries": ["x"]}}
LAUGHS = "[&a [x,x,x,x,x,x,x,x,x,x], " + ", ".join(
    f"&{b} [{','.join(['*' + a] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: [&a [*a], &b [*b]]", "alias"),  # RecursionError
        (f"models: {LAUGHS}]", "more than 100000 values"),  # 10^9 values out of half a kilobyte
        ("a: &a {x: 1}\nb: {<<: *a}", "merge"),
        ("a: " + "[" * 20000, "levels deep"),
        ("a: " + "{a: " * 20000, "levels deep"),
        ("seeds: [" + "1" * 5000 + "]", "not YAML"),
        ("seeds: 2001-99-99", "not YAML"),
        ("a: !!int ''", "not YAML"),  # IndexError
        ("a: !!bool x", "not YAML"),  # KeyError
        ("a: !!timestamp x", "not YAML"),  # AttributeError
        ("a: 1\na: 2", "twice"),  # the second was taken
        ("a: !!python/object/apply:os.system [true]", "not YAML"),
        ("#" * 300_000, "more than 262144 bytes"),
    ],
)
def test_yaml_that_acts_on_its_reader(tmp_path, text, words):
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as met:
        read_jobs(path)
    assert kept(lambda: read_jobs(path), tmp_path) == "InputError"
    assert len(str(met.value)) < 600


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fold": {"queries": [str(i) for i in range(12000)], "rules": ["floored"]}}, None),  # took minutes, n²
        ({"fold": {"queries": list(map(str, range(400)))}, "contexts": dict.fromkeys(map(str, range(400)), "a")},
         "160000 jobs"),
        ({"fold": {"queries": ["x"], "keep": "0:" + "1" * 5000}}, "no span"),  # ValueError
        ({"bake": {"queries": list("abcd"), "tol": 10**400}}, "positive number"),  # OverflowError
        ({"bake": {"queries": list("abcd"), "answers": 10**9}}, "between 1 and 1000"),  # a list of 10^9 draws
        ({"bake": {"queries": list("abcd")}, "seeds": [10**30]}, "whole number"),  # no Parquet holds it
        ({"contexts": {"one": "@a\0b"}}, "no file"),  # ValueError
        ({"contexts": {"one": "@~nobody/x"}}, "no file"),  # RuntimeError
        ({"contexts": {"one": "@/dev/zero"}}, "no file"),  # all of the memory
        ({"contexts": {"one": "@fifo"}}, "no file"),  # waited for ever
        ({"models": ["~nobody/x"]}, "no model"),
        ({"models": ["a" * 400]}, "no model"),
    ],
)  # fmt: skip
def test_jobs_that_cannot_be_run(tmp_path, changed, words):
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changed}, allow_unicode=False))
    met: list[str] = []

    def read():
        try:
            read_jobs(path)
        except InputError as error:
            met.append(str(error))
            raise

    assert kept(read, tmp_path, deadline=30) == ("taken" if words is None else "InputError")
    assert words is None or words in met[0]


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    (tmp_path / "jobs.yaml").write_text('models: [a/b]\ncontexts: {one: "\\ud800"}\nfold: {queries: [x]}\n')
    with pytest.raises(InputError, match="surrogate"):
        read_jobs(tmp_path / "jobs.yaml")


# --- texts, names, kept work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["@a\0b", "@~nobody/x", "@" + "a" * 300, "@/dev/zero"])
def test_texts_in_files_that_are_none(name, monkeypatch):
    monkeypatch.setattr("contextfold.prompts.LARGEST", 2**20)
    with pytest.raises(InputError):
        read_argument(name)


def test_no_more_is_read_than_a_file_may_have(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    assert read_whole(tmp_path / "a", 100) == b"x" * 100
    with pytest.raises(InputError, match="more than 99 bytes"):
        read_whole(tmp_path / "a", 99)


def test_a_span_of_5000_digits():
    with pytest.raises(InputError, match="no span"):
        parse_spans("0:" + "1" * 5000, 3)


@pytest.mark.parametrize("name", ["a" * 400, "~nobody/x", "b" * 400 + ".gguf", "b\0.gguf"])
def test_names_of_models_that_no_file_has(name):
    with pytest.raises(InputError, match="there is no"):
        models.load(name)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"key": NaN}', "9" * 5000, "\0"])
def test_kept_work_that_is_no_json(tmp_path, text):
    """Nesting ended in a RecursionError."""
    (tmp_path / "job-key.json").write_text(text)
    assert Kept(tmp_path).get("job", "key") is None


def test_kept_work_with_another_digit(tmp_path):
    """One digit more, and it was taken for a result."""
    Kept(tmp_path).put("job", "key", {"gap": 0.125})
    (path,) = tmp_path.iterdir()
    assert Kept(tmp_path).get("job", "key") == {"gap": 0.125}
    path.write_text(path.read_text().replace("0.125", "0.1250001"))
    assert Kept(tmp_path).get("job", "key") is None


def test_a_solved_place_with_another_bit(tmp_path):
    """A bit of a factor, and the patch was another one without a word."""
    store = Store(tmp_path, "key")
    store.put("a", {"x": torch.ones(3)}, {})
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert store.get("a", torch.device("cpu")) is None


def test_a_solved_place_that_cannot_be_read(tmp_path):
    (tmp_path / "a.solved").mkdir()
    assert Store(tmp_path, "key").get("a", torch.device("cpu")) is None


def test_a_row_of_another_form_is_no_finished_job(tmp_path, monkeypatch):
    """A row without `error` was a KeyError, one with a text for a number stopped the table."""
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(BASE))
    monkeypatch.setattr(jobs_module, "code_digest", lambda: "same")
    asked = read_jobs(tmp_path / "jobs.yaml")
    for row in ({}, {"seconds": "long"}, {"error": 3}):
        Kept(tmp_path / "work").put("job", asked[0].digest, row)
        assert sweep(asked, tmp_path / "work", collect=True).rows == []


def test_a_message_is_one_line_that_a_terminal_only_shows():
    assert one_line("a\n\tb") == "a b"
    assert one_line("\x1b[2J\ud800") == "\\x1b[2J\\ud800"
    assert len(one_line("x" * 10**6)) == 200
    assert one_line(ValueError()) == "ValueError"


# --- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"kl_nats": ', f'"kl_nats": {10**400}, "was": ', "a number"),  # OverflowError
        ('"kl_nats": ', '"kl_nats": 1e999, "was": ', "a number"),
        ('"kl_nats": ', '"kl_nats": NaN, "was": ', "NaN is no number"),
        ('"model": "', '"model": "\\ud800', "surrogate"),  # UnicodeEncodeError when the page was written
        ('"model": ', '"model": "x", "model": ', "twice"),
    ],
)
def test_reports_of_what_no_command_prints(tmp_path, old, new, words):
    text = json.dumps(runs.fold())
    assert old in text
    (tmp_path / "run.json").write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=words):
        read_run(tmp_path / "run.json")


def test_a_report_of_a_file_that_never_ends(monkeypatch):
    monkeypatch.setattr("contextfold.report.reading.LARGEST", 2**20)
    with pytest.raises(InputError, match="more than"):
        read_run(Path("/dev/zero"))


def test_numbers_that_may_be_null_may_be_left_out():
    """KeyError while the page was made."""
    found = runs.fold()
    for layer in found["layers"]:
        del layer["relative_error"], layer["condition"]
    assert page([chapter(run_of(found), 1)])


def test_a_ratio_to_nothing_is_drawn_as_nothing():
    """What a command prints for a map of zeros, a report takes."""
    found = runs.fold()
    for step in found["steps"]:
        step["weight_ratio"] = [None] * len(step["weight_ratio"])
    assert page([chapter(run_of(found), 1)])
