"""Named parts of an experiment, each kept as a JSON file, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contextfold.anatomy import Bound, bind
from contextfold.files import Kept
from contextfold.reproduce.row import Missing, Row
from contextfold.verify.receipt import receipt_of
from contextfold.versions import versions

if TYPE_CHECKING:
    from contextfold.models import Loaded

__all__ = ["Bench", "Outcome", "Paper", "Part", "finished", "reproduce"]

Advance = Callable[[], None]
"""Told after each unit of work."""


@dataclass(eq=False)
class Bench:
    """Gives a part its model. One dtype is held at a time, since weights are large."""

    name: str
    """What was asked for, `""` where the paper trains its own models."""
    load: Callable[[torch.dtype], Loaded]
    _held: tuple[torch.dtype, Loaded, Bound] | None = None

    def bound(self, dtype: torch.dtype) -> Bound:
        return self._get(dtype)[2]

    def tokenizer(self, dtype: torch.dtype) -> Any:
        return self._get(dtype)[1].tokenizer

    def _get(self, dtype: torch.dtype) -> tuple[torch.dtype, Loaded, Bound]:
        if self._held is None or self._held[0] != dtype:
            self._held = None
            loaded = self.load(dtype)
            self._held = (dtype, loaded, bind(loaded.model))
        return self._held


@dataclass(frozen=True, eq=False)
class Part:
    """One piece of an experiment: `run(bench, advance, **options)` gives plain data."""

    name: str
    run: Callable[..., Mapping[str, Any]]
    options: Mapping[str, Any]
    """Plain data. All sizes stand here, so that they are part of the key under which a result is kept."""
    units: int
    """How often it calls `advance`."""
    dtype: torch.dtype | None = None
    """Of the model that it asks the bench for, and then the option `dtype`; None where it asks for none."""


@dataclass(frozen=True, eq=False)
class Paper:
    """A paper's experiments, and its published figures beside what came out here."""

    number: str
    """Of arXiv."""
    title: str
    model: str | None
    """Which model is taken when none is named; None where models are trained on the spot."""
    parts: Callable[[bool], Sequence[Part]]
    """The parts; True asks for the quick form, whose figures compare with nothing."""
    rows: Callable[[Mapping[str, Any]], Sequence[Row]]
    """From the results of the parts, by name."""
    missing: Sequence[Missing]
    """What could not be reproduced here, and why."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """All parts of a paper, done."""

    paper: Paper
    model: str
    quick: bool
    rows: Sequence[Row]
    results: Mapping[str, Any]
    parts: Sequence[Mapping[str, Any]]
    """Per part `name`, `seconds`, `processor_seconds`, `resumed`."""
    receipt: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Stable keys; documented in `docs/json.md`."""
        return {
            "paper": self.paper.number,
            "title": self.paper.title,
            "model": self.model or None,
            "quick": self.quick,
            "rows": [row.to_json() for row in self.rows],
            "not_reproduced": [{"what": m.what, "why": m.why} for m in self.paper.missing],
            "seconds": round(sum(part["seconds"] for part in self.parts), 1),
            "processor_seconds": round(sum(part["processor_seconds"] for part in self.parts), 1),
            "parts": list(self.parts),
            "receipt": dict(self.receipt),
            "details": dict(self.results),
        }


DIGITS = 6
"""Significant digits of the details that are written out; what is kept in the folder has all of them."""


def _rounded(found: Any) -> Any:
    if isinstance(found, float):
        return float(f"{found:.{DIGITS}g}")
    if isinstance(found, Mapping):
        return {name: _rounded(value) for name, value in found.items()}
    return [_rounded(value) for value in found] if isinstance(found, list | tuple) else found


def _silent(name: str, done: int, total: int) -> None:
    pass


def reproduce(
    paper: Paper,
    bench: Bench,
    folder: Path,
    *,
    quick: bool = False,
    beforehand: Callable[[Sequence[Part]], Collection[str]] = lambda _: (),
    progress: Callable[[str, int, int], None] = _silent,
) -> Outcome:
    """Run the parts of `paper` that `folder` does not hold yet, and put all of them beside the published figures.

    `beforehand` may put parts into the folder by other means, and names them. `progress` is told the part at work,
    units done and units in all. Raises `InputError`, and what the parts raise.
    """
    work = Kept(folder)
    parts = paper.parts(quick)
    made = beforehand(parts)
    if made:  # and told of; a bar that begins anew would say nothing
        progress = _silent
    total, done = sum(part.units for part in parts), 0
    results: dict[str, Any] = {}
    log: list[dict[str, Any]] = []
    receipt: dict[str, Any] = {"threads": torch.get_num_threads(), **versions()}
    for part in parts:
        progress(part.name, done, total)
        count = iter(range(done + 1, total + 1))
        if part.dtype is not None:
            receipt = receipt_of(bench.bound(part.dtype))
        entry, kept = finished(paper, part, bench, work, partial(_advance, progress, part.name, count, total))
        results[part.name] = entry["result"]
        times = {name: entry[name] for name in ("seconds", "processor_seconds")}
        log.append({"name": part.name, "resumed": kept and part.name not in made, **times})
        done += part.units
    progress("", total, total)
    # Rounded before they are read, so that rows follow from the details that stand beside them.
    results = {name: _rounded(found) for name, found in results.items()}
    return Outcome(paper, bench.name, quick, paper.rows(results), results, log, receipt)


def finished(paper: Paper, part: Part, bench: Bench, work: Kept, advance: Advance) -> tuple[dict[str, Any], bool]:
    """The entry of a part, and whether it was kept already; run and kept now if it was not."""
    key = _key(paper, part, bench)
    entry = work.get(part.name, key)
    if entry is not None:
        return entry, True
    entry = _timed(part, bench, advance)
    work.put(part.name, key, entry)
    return entry, False


def _advance(progress: Callable[[str, int, int], None], name: str, count: Iterator[int], total: int) -> None:
    progress(name, next(count, total), total)


def _timed(part: Part, bench: Bench, advance: Advance) -> dict[str, Any]:
    wall, processor = time.monotonic(), time.process_time()
    options = dict(part.options) if part.dtype is None else {**part.options, "dtype": part.dtype}
    result = part.run(bench, advance, **options)
    return {
        "seconds": round(time.monotonic() - wall, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
        # Through the text and back: a fresh result and one that was kept are the same data.
        "result": json.loads(json.dumps(result, allow_nan=False)),
    }


def _key(paper: Paper, part: Part, bench: Bench) -> str:
    model = () if part.dtype is None else (bench.bound(part.dtype).fingerprint, bench.bound(part.dtype).attention)
    options = sorted(part.options.items())
    asked = (code_digest(), sorted(versions().items()), paper.number, part.name, part.dtype, options, model)
    return hashlib.sha256(repr(asked).encode()).hexdigest()


SHOWN_ONLY = ("cli/*", "report/*", "show.py", "*view.py", "inspection.py", "reproduce/arxiv_*.py", "reproduce/row.py")
"""Files that say how results look, and what they are put beside: no result depends on them."""


@cache
def code_digest() -> str:
    """SHA-256 over the source files of this package that a result may depend on."""
    root = Path(__file__).parents[1]
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not any(fnmatch(name, pattern) for pattern in SHOWN_ONLY):
            whole.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()
