"""Campaigns: thousands of spoilt files, hostile numbers, and a header parser under a fuzzer that follows its branches.

Each writes what it counted into `docs/measured/reliability-*.json`: trials, how they ended, failures by message. A
trial is repeated by its seed. `table` writes them into `docs/reliability.md`. `header` needs atheris, which no extra
brings.

    python scripts/attack.py files [--trials 2000] [--seed 0] [--only NAME]
    python scripts/attack.py folders [--trials 400] [--seed 0] [--only NAME]
    python scripts/attack.py numbers [--trials 2000] [--seed 0]
    python scripts/attack.py memory
    python scripts/attack.py header [--seconds 300]
    python scripts/attack.py table
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402 (the path and the environment come first)
from attacking import bombs, header  # noqa: E402

from contextfold.anatomy import bind  # noqa: E402
from contextfold.files import write_json  # noqa: E402
from contextfold.versions import versions  # noqa: E402
from doors import DOORS  # noqa: E402
from folders import FOLDERS  # noqa: E402
from folders import ended as read  # noqa: E402
from watched import Broken, kept  # noqa: E402
from wounds import DOORS as NUMBERS  # noqa: E402
from wounds import FAMILIES, TEXTS, WOUNDS, wounded  # noqa: E402

MEASURED = ROOT / "docs" / "measured"
PAGE = ROOT / "docs" / "reliability.md"
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

DRAWN = 5
"""A page is drawn in a quarter of a second, all else is read in milliseconds: so many times fewer trials."""

DATA = 12 * 2**30
"""Bytes that a process may take while it reads folders."""

PLACES = 50
"""Folders that the trials of a door take turns in: what one left there, the next one finds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=["files", "folders", "numbers", "memory", "header", "table"])
    parser.add_argument("--trials", type=int, default=2000, help="per door of files or folders, or in all of numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--only", default="", help="doors of files or folders whose name holds this")
    chosen = parser.parse_args()
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    if chosen.campaign == "table":
        table()
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        match chosen.campaign:
            case "files":
                found = files(Path(place), chosen.trials, chosen.seed, chosen.only)
            case "folders":
                found = folders(Path(place), chosen.trials, chosen.seed, chosen.only)
            case "numbers":
                found = numbers(Path(place), chosen.trials, chosen.seed)
            case "memory":
                found = bombs.measured(Path(place))
            case _:
                found = header.fuzzed(Path(place), chosen.seconds, chosen.seed)
    if chosen.only:
        print(json.dumps(found, indent=1))  # noqa: T201
        return
    told = {"seed": chosen.seed, "seconds": round(time.monotonic() - started), **versions(), "doors": found}
    write_json(MEASURED / f"reliability-{chosen.campaign}.json", told)
    for name, row in found.items():
        print(name, json.dumps(row))  # noqa: T201


def files(place: Path, trials: int, seed: int, only: str) -> dict[str, Any]:
    """Every door, `trials` times."""
    found = {}
    for door in DOORS:
        if only not in door.name:
            continue
        tally = Tally()
        count = trials if door.multiple else trials // DRAWN
        for trial in range(count):
            folder = place / door.name.replace(" ", "-") / str(trial % PLACES)
            folder.mkdir(parents=True, exist_ok=True)
            call, path = door.make(folder, Random(f"{seed} {trial}"))
            size = path.stat().st_size
            tally.add(trial, partial(kept, call, folder, size=size, multiple=door.multiple), Broken)
        found[door.name] = tally.row()
    return found


def folders(place: Path, trials: int, seed: int, only: str) -> dict[str, Any]:
    """Every door, `trials` times. What a folder makes its reader ask for and touch is bounded, so that a machine
    outlives a failure."""
    resource.setrlimit(resource.RLIMIT_DATA, (DATA, DATA))
    found = {}
    for door in FOLDERS:
        if only not in door.name:
            continue
        tally = Tally()
        here = place / door.name
        here.mkdir()
        for trial in range(trials):
            tally.add(trial, partial(read, door, here, Random(f"{seed} {trial}")), AssertionError)
        found[door.name] = tally.row()
    return found


def numbers(place: Path, trials: int, seed: int) -> dict[str, Any]:
    """Wounds in turn, on families and dtypes that are drawn; for each model one text through every door."""
    bind(wounded_plain())  # torch writes folders of its own when it is first used
    tallies = {name: Tally() for name in ("bind", *NUMBERS)}
    for trial, wound in zip(range(trials // (len(NUMBERS) + 1)), turns(list(WOUNDS)), strict=False):
        rng = Random(f"{seed} {trial}")
        kind, dtype, text = rng.choice(FAMILIES), rng.choice(DTYPES), rng.choice(list(TEXTS))
        folder, models = place / str(trial), []
        folder.mkdir()

        def step(name: str, call: Any, trial: int = trial, folder: Path = folder) -> None:
            tallies[name].add(trial, partial(kept, call, folder, deadline=60), Broken)

        step("bind", lambda: models.append(wounded(kind, wound, dtype, rng)))  # noqa: B023 (called at once)
        for name, door in NUMBERS.items():
            if models:
                laid = TEXTS[text](rng)
                step(name, lambda: door(models[0], laid, folder))  # noqa: B023 (called at once)
    return {name: tally.row() for name, tally in tallies.items()}


def wounded_plain() -> Any:
    import tiny

    return tiny.shared("llama", torch.float32)


def turns(values: list[str]) -> Iterator[str]:
    while True:
        yield from values


@dataclass
class Tally:
    """How the trials of a door ended, and which broke a promise."""

    ended: Counter[str] = field(default_factory=Counter)
    broken: dict[str, list[int]] = field(default_factory=dict)

    def add(self, trial: int, attempt: Callable[[], str], failure: type[AssertionError]) -> None:
        try:
            self.ended[attempt()] += 1
        except failure as error:
            self.broken.setdefault(str(error).splitlines()[0][:120], []).append(trial)

    def row(self) -> dict[str, Any]:
        """`failures` names by message the first trials that met it."""
        failed = sum(map(len, self.broken.values()))
        return {
            "trials": self.ended.total() + failed, "ended": dict(sorted(self.ended.items())), "failed": failed,
            "failures": {words: at[:3] for words, at in self.broken.items()},
        }  # fmt: skip


ROWS = {
    "files": ("A spoilt file of any kind ends in a right answer or in one line: nothing is run or written elsewhere, "
              "no hang, memory in proportion", "`tests/hostile/test_files.py`", "### Files from elsewhere"),
    "folders": ("A spoilt folder (an export, a model, what stands where an export goes) ends likewise, whatever its "
                "files, links, pipes, sizes, names and depth", "`tests/hostile/test_folders.py`",
                "### Folders from elsewhere"),
    "memory": ("A small file that wants much memory gets a bounded multiple of its size", "", None),
    "header": ("The parser of a patch's header raises typed errors alone, as a fuzzer follows its branches", "", None),
    "numbers": ("Hostile numbers end in a finite result or in an outcome with a name, through every door",
                "`tests/hostile/test_numbers.py`", "### Hostile numbers"),
}  # fmt: skip
"""By campaign: the promise, its short form in the tests, and where the page lists what was found."""


def table() -> None:
    """The rows of the page that these campaigns measured; those of others stay."""
    page = PAGE.read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if "`scripts/attack.py " not in line]
    rows = []
    for campaign, (promise, test, heading) in ROWS.items():
        path = MEASURED / f"reliability-{campaign}.json"
        if path.is_file():
            doors = json.loads(path.read_text(encoding="utf-8"))["doors"].values()
            trials, left = (sum(door[key] for door in doors) for key in ("trials", "failed"))
            tests = ", ".join(filter(None, (test, f"`scripts/attack.py {campaign}`")))
            rows.append(f"| {promise} | {tests} | {trials:,} | {listed(page, heading)} | {left} |")
    at = next(number for number, line in enumerate(lines) if line.startswith("|---")) + 1
    PAGE.write_text("\n".join([*lines[:at], *rows, *lines[at:]]) + "\n", encoding="utf-8")


def listed(page: str, heading: str | None) -> int:
    """Failures that the page lists below a heading."""
    if heading is None:
        return 0
    section = page.split(f"{heading}\n")[1].split("\n### ")[0].split("\n## ")[0]
    return section.count("\n- **")


if __name__ == "__main__":
    main()
