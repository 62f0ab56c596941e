"""The doors that read files from elsewhere, each with a well-formed file and a way to spoil it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml

import runs
from contextfold import patchfile
from contextfold.files import Kept
from contextfold.fold import fold_token
from contextfold.inspection import patch_json
from contextfold.patch import Patch
from contextfold.prompts import encode, read_argument
from contextfold.questions import read_questions
from contextfold.runtime import check_match, materialised, run
from contextfold.spectra import spectra
from contextfold.store import Store
from contextfold.sweep import read_jobs
from spoil import spoiled_bytes, spoiled_json, spoiled_tensors, spoiled_value
from tiny import letters, shared, tokens

__all__ = ["DOORS", "Door"]


@dataclass(frozen=True)
class Door:
    """`make(folder, rng)` leaves a spoilt file there and gives the call that reads it, and the file."""

    name: str
    make: Callable[[Path, Random], tuple[Callable[[], object], Path]]
    multiple: int
    """Bytes of memory for one of the file, at most; a constant besides."""


def strict(found: object) -> None:
    """Raises unless it is what other programs read as JSON, in UTF-8."""
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()


_made: dict[str, Any] = {}


def _once(name: str, make: Callable[[], Any]) -> Any:
    if name not in _made:
        _made[name] = make()
    return _made[name]


def _patch() -> Patch:
    return fold_token(shared("gemma3_text", torch.float32), tokens(11), tokens(3, seed=2)).patch


def _patch_file(folder: Path, rng: Random) -> tuple[Callable[[], object], Path]:
    path = folder / "patch.safetensors"

    def good() -> bytes:
        return patchfile.save(_once("patch", _patch), path).read_bytes()

    path.write_bytes(spoiled_tensors(_once("patch file", good), rng, ("header", "sites", "version", "format")))

    def read() -> None:
        patch = patchfile.load(path)
        strict([patch_json(patch), spectra(patch)])
        repr(patch)
        bound = _once("bound", lambda: _bound("gemma3_text"))
        check_match(bound.model, bound.fingerprint, patch)
        with materialised(bound, patch) as model:
            run(model, _probe())

    return read, path


def _bound(model_type: str) -> Any:
    from contextfold.anatomy import bind

    return bind(shared(model_type, torch.float32))


def _probe() -> Any:
    from contextfold.runtime import Run

    return Run(tokens(4), torch.arange(4))


JOBS = {
    "models": ["owner/model"], "dtype": "float32", "seeds": [0, 1],
    "contexts": {"one": "abc", "two": {"text": "@text.txt", "queries": ["p", "q"], "held_out": "@text.txt"}},
    "bake": {"estimators": ["output"], "queries": ["a", "b", "c", "d"], "tokens": 2, "answers": 2, "anchors": 1,
             "penalty": "auto", "tol": 0.01, "controls": True},
    "fold": {"queries": [" x"], "rules": ["balanced"], "fallback": "flat", "keep": "0:1,2:3"},
}  # fmt: skip

YAML = (
    "!!python/object/apply:os.system ['touch pwned']", "!!binary x", "!!int ''", "!!bool x", "!!timestamp x",
    "2001-99-99", "&a [*a]", "{<<: *a}", "*nowhere", "!!set [x]", "1" * 5000, "@/dev/zero", '"@fifo"', '"@../../etc"',
    '"@/proc/self/mem"', '"\\ud800"', '"@a\\0b"', "0:1:2", "[" * 3000, "? [a] : b", "@" + "a" * 300, "~", ".nan",
    '"@~nobody/x"', "[&a [x,x,x,x,x,x,x,x,x], &b [*a,*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b], [*c,*c,*c,*c,*c]]",
)  # fmt: skip
"""Values that act on whoever reads YAML."""


def _jobs(folder: Path, rng: Random) -> tuple[Callable[[], object], Path]:
    (folder / "text.txt").write_text("r\ns\n")
    if not (folder / "fifo").exists():
        os.mkfifo(folder / "fifo")
    path, value = folder / "jobs.yaml", JOBS
    for _ in range(rng.randint(0, 2)):
        value = spoiled_value(value, rng)
    try:
        text = yaml.safe_dump(value, sort_keys=False)
    except ValueError:  # a number that Python does not write out
        text = "models: [" + "9" * 5000 + "]"
    if rng.random() < 0.5:
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = f"{lines[at].split(':')[0]}: {rng.choice(YAML)}"
        text = "\n".join(lines)
    data = text.encode(errors="surrogatepass")
    path.write_bytes(spoiled_bytes(data, rng) if rng.random() < 0.3 else data)

    def read() -> None:
        for job in read_jobs(path):
            strict([job.label, job.digest, dict(job.options)])

    return read, path


def _questions(folder: Path, rng: Random) -> tuple[Callable[[], object], Path]:
    path = folder / "questions.txt"
    path.write_bytes(spoiled_bytes("Who?\nWhat is é?\\n\nWhy:\n\n".encode(), rng))
    return lambda: strict(read_questions(read_argument(f"@{path}"))), path


CONTEXT = "Answer in é and ẞ.\r\n\tTwo  spaces, \u202e, \0 and 𝔘.\n"


def _context(folder: Path, rng: Random) -> tuple[Callable[[], object], Path]:
    """As `--context @file` and `--query @file` read it, down to token ids."""
    path = folder / "context.txt"
    path.write_bytes(spoiled_bytes(CONTEXT.encode(rng.choice(("utf-8", "utf-8-sig", "utf-16"))), rng))
    tokenizer = _once("letters", letters)

    def read() -> None:
        text = read_argument(f"@{path}")
        if text.encode() != path.read_bytes().removeprefix(b"\xef\xbb\xbf"):
            raise AssertionError("another text than the file holds")
        spans = encode(tokenizer, text, "q")
        if len(spans.query) != 1 or len(spans.context) > len(text) + 1:
            raise AssertionError("other tokens than the text has characters")

    return read, path


def _kept(folder: Path, rng: Random) -> tuple[Callable[[], object], Path]:
    entry = {"rows": [{"a": 1.5, "b": None}], "seconds": 0.25, "error": None}
    work = Kept(folder)
    work.put("job", "k" * 64, entry)
    (path,) = folder.glob("job-*.json")
    good = json.loads(path.read_text())
    text = spoiled_json(good, rng).encode(errors="surrogatepass")
    path.write_bytes(spoiled_bytes(path.read_bytes(), rng) if rng.random() < 0.4 else text)

    def read() -> None:
        found = work.get("job", "k" * 64)
        if found is not None and found != entry:
            raise AssertionError(f"a damaged file was taken: {found!r}")

    return read, path


def _store(folder: Path, rng: Random) -> tuple[Callable[[], object], Path]:
    store = Store(folder, "k" * 64)
    wanted = {"B": torch.arange(6.0).reshape(2, 3), "s": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    store.put("0001", wanted, {"rank": 2, "error": 0.5})
    path = folder / "0001.solved"
    path.write_bytes(spoiled_tensors(path.read_bytes(), rng, ("key", "report", "digest")))

    def read() -> None:
        found = store.get("0001", torch.device("cpu"))
        if found is None:
            return
        parts, report = found
        if report != {"rank": 2, "error": 0.5} or set(parts) != set(wanted):
            raise AssertionError("a damaged file was taken")
        if any(not torch.equal(parts[name], each) for name, each in wanted.items()):
            raise AssertionError("a damaged file was taken")

    return read, path


def _report(folder: Path, rng: Random) -> tuple[Callable[[], object], Path]:
    from contextfold import report

    path, page = folder / "run.json", folder / "page.html"
    # Whatever draws makes a folder of its own when it is first used.
    _once("page", lambda: report.page([report.chapter(report.run_of(runs.fold()), 1)]))
    value = runs.ALL[rng.choice(sorted(runs.ALL))]()
    path.write_bytes(spoiled_json(value, rng).encode(errors="surrogatepass"))

    def read() -> None:
        report.save(report.page([report.chapter(report.read(path), 1)]), page)

    return read, path


DOORS = (
    Door("patch file", _patch_file, 32),
    Door("jobs file", _jobs, 1000),
    Door("question file", _questions, 32),
    Door("context file", _context, 64),
    Door("report", _report, 0),
    Door("kept work", _kept, 32),
    Door("solved place", _store, 32),
)
