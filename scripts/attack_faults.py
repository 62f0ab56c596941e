"""Disturb commands at random moments, and see what is left: old or new, never half, and the same bits when run again.

Writes `docs/measured/reliability-faults.json`. Every work meets every fault; a part of the commands are processes as a
user starts them, the others forks of this one, which spares the seconds that the imports take.

    python scripts/attack_faults.py [--out FILE] [--each N] [--processes N] [--seed S] [--works W ...] [--faults F ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import faults  # noqa: E402 (the path and the environment come first)
from contextfold.files import write_json  # noqa: E402
from faults import CONTEXT, FAULTS, MOUNTED, OTHER, WORKS, Running, Stage, Work  # noqa: E402

OUT = ROOT / "docs" / "measured" / "reliability-faults.json"

ALLOWED = {"kill -9": (-9, 0), "SIGINT": (130, -2, 0)}
"""Exit codes of a disturbed command: 0 when the disturbance came too late, −2 when Python was ending, which is 130 to a
shell. For all others:"""
FAILED = (0, 2)

AS_PROCESSES = ("kill -9", "SIGINT", "full disk", "memory limit")
"""Faults that also meet a process as a user starts it."""


def warm() -> None:
    """All imports, and nothing that starts a thread."""
    import accelerate  # noqa: F401
    import gguf  # noqa: F401
    import peft  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import transformers  # noqa: F401
    import yaml  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import contextfold.bake
    import contextfold.cli
    import contextfold.export
    import contextfold.models
    import contextfold.stepwise
    import contextfold.sweep
    import contextfold.verify  # noqa: F401


@dataclass(frozen=True)
class Usual:
    """What an undisturbed run of a work is like."""

    seconds: float
    process_seconds: float | None
    """As a process of its own, imports included."""
    growth: int
    """Bytes of address space besides what a fork has at once; most of them are reserved and never used."""
    peak: int
    """Bytes of address space of a process of its own."""
    old: str | None
    new: str


class Campaign:
    """Trials in one folder, which is theirs."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.place, self.log = home, home / "place", home / "log"
        self.random = random.Random(seed)
        self.usual: dict[str, Usual] = {}
        self.model = ""
        self.mounts = 0
        """Trials that had a file system of their own."""

    def run(self, work: Work, context: str = CONTEXT, process: bool = False, **options: Any) -> Running:
        """Start the command of `work`; options as of `faults.started` or `faults.forked`."""
        arguments = work.arguments(self.home, self.place, context)
        values = faults.environment(self.place)
        log = options.pop("log", self.log)
        if process:
            return faults.started(arguments, log, values, **options)
        return faults.forked(arguments, log, values, options.pop("first", lambda: None))

    def prepare(self, works: list[Work], process: bool) -> None:
        """Inputs, artefacts of undisturbed runs, and how long these take."""
        pid = os.fork()
        if not pid:
            faults.prepare(self.home)
            os._exit(0)
        os.waitpid(pid, 0)
        exported = any(work.name.startswith("export") for work in works)
        for name, context in (("patch", CONTEXT), ("other", OTHER)) if exported else ():
            with faults.laid(self.place, False):
                self._done(self.run(faults.WORKS[1], context))
                shutil.move(self.place / "patch", self.home / name)
        self.model = faults.digest(self.home / "model") or ""
        for work in works:
            self.usual[work.name] = self._undisturbed(work, process)

    def _done(self, running: Running) -> None:
        if running.wait() != 0:
            raise SystemExit(f"undisturbed, {running.code}: {self.log.read_text()}")

    def _undisturbed(self, work: Work, process: bool) -> Usual:
        old, seconds, growth = None, [], 0
        if work.old:
            with faults.laid(self.place, False):
                self._done(self.run(work, OTHER))
                old = faults.digest(self.place / work.artefact)
                shutil.rmtree(self.home / "old" / work.name, ignore_errors=True)
                shutil.copytree(self.place, self.home / "old" / work.name)
        new = set()
        for _ in range(2):
            with faults.laid(self.place, False):
                running = self.run(work)
                sizes = _sizes(running)
                self._done(running)
                seconds.append(time.monotonic() - running.started)
                growth = max(sizes) - min(sizes)
                new.add(faults.digest(self.place / work.artefact))
        if len(new) != 1 or old in new:
            raise SystemExit(f"{work.name}: two undisturbed runs differ, or the old artefact is the new one")
        apart, peak = None, 0
        if process:
            with faults.laid(self.place, False):
                running = self.run(work, process=True)
                peak = max(_sizes(running))
                self._done(running)
                apart = time.monotonic() - running.started
        return Usual(max(seconds), apart, growth, peak, old, str(new.pop()))

    def trial(self, work: Work, fault: str, process: bool = False) -> dict[str, Any]:
        """Disturb the work once, and look."""
        usual, moment, chance = self.usual[work.name], self.random.random(), self.random.random()
        whole = usual.process_seconds if process else usual.seconds
        assert whole is not None
        with faults.laid(self.place, fault in MOUNTED) as own:
            self.mounts += own
            if work.old:
                shutil.copytree(self.home / "old" / work.name, self.place, dirs_exist_ok=True)
            stage = Stage(work, self.place, self.log, lambda jump: self._again(work, jump))
            running = self.run(work, process=process, **self._limits(fault, usual, moment, process))
            if fault != "memory limit":
                running.wait_until(running.started + moment * whole)
            landed = not running.over()
            if landed:
                FAULTS[fault](stage, running, chance)
            code = running.wait()
            second = [other.wait() for other in stage.others]
            found = faults.digest(self.place / work.artefact)
            said = faults.said(self.log)
            wrong = self._judge(fault, usual, code, found, said)
            if any(second):
                wrong.append(f"the second command ended with {second[0]}: {_last(self.log.with_suffix('.second'))}")
            for step in reversed(stage.undo):
                step()
            wrong += self._resume(work, usual)
            left = faults.leftovers(self.place, work.artefact)
        if faults.digest(self.home / "model") != self.model:
            wrong.append("the user's model was changed")
        state = {usual.old: "old", usual.new: "new"}.get(found, "half")
        return {
            "work": work.name, "fault": fault, "process": process, "moment": round(moment, 4), "landed": landed,
            "code": code, "said": said[-1] if said and code else None, "found": state, "left": left, "wrong": wrong,
        }  # fmt: skip

    def _again(self, work: Work, jump: float) -> Running:
        first = faults.ahead(jump, 0.0) if jump else lambda: None
        return self.run(work, log=self.log.with_suffix(".second"), first=first)

    def _limits(self, fault: str, usual: Usual, moment: float, process: bool) -> dict[str, Any]:
        if process:
            return {"limit": int(usual.peak * (0.1 + 0.9 * moment))} if fault == "memory limit" else {}
        if fault == "memory limit":
            return {"first": faults.limited(moment / 8, usual.growth)}
        if fault == "wrong clock":
            return {"first": faults.ahead((moment - 0.5) * 60 * faults.DAY, self.random.random() * usual.seconds)}
        return {}

    def _judge(self, fault: str, usual: Usual, code: int | None, found: str | None, said: list[str]) -> list[str]:
        wrong = []
        if code is None:
            wrong.append("it hung")
        elif code not in ALLOWED.get(fault, FAILED):
            wrong.append(f"exit code {code}: {said[-1] if said else ''}")
        if code == 2 and not (said and said[-1].startswith("error: ") and not any("Traceback" in s for s in said)):
            wrong.append(f"not one clear line: {said[-3:]}")
        if code in (130, -2) and any("Traceback" in line for line in said):
            wrong.append(f"a traceback: {said[-3:]}")
        if found not in (usual.old, usual.new):
            wrong.append("the artefact is neither the old nor the new one")
        if code == 0 and found != usual.new and not (fault == "vanished" and found is None):  # which may take it, too
            wrong.append("it said it was done, and the artefact is not the new one")
        return wrong

    def _resume(self, work: Work, usual: Usual) -> list[str]:
        running = self.run(work)
        code = running.wait()
        if code != 0:
            return [f"run again, it ended with {code}: {_last(self.log)}"]
        found = faults.digest(self.place / work.artefact)
        return [] if found == usual.new else ["run again, it gave other bits than an undisturbed run"]


def _last(log: Path) -> str:
    return (faults.said(log) or [""])[-1]


def _sizes(running: Running) -> list[int]:
    """Bytes of address space, every hundredth of a second until it ends."""
    found = []
    while not running.over():
        with contextlib.suppress(OSError, IndexError):
            found.append(int(Path(f"/proc/{running.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
        time.sleep(0.01)
    return found


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts per fault and per work."""

    def table(key: str) -> dict[str, dict[str, int]]:
        rows: dict[str, Counter[str]] = {}
        for trial in trials:
            row = rows.setdefault(trial[key], Counter())
            row.update(["trials", f"found {trial['found']}", *(["landed"] if trial["landed"] else [])])
            row.update({"wrong": 1} if trial["wrong"] else {"wrong": 0})
        return {name: dict(row) for name, row in rows.items()}

    return {"faults": table("fault"), "works": table("work")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--each", type=int, default=5, help="trials of every work with every fault")
    parser.add_argument("--processes", type=int, default=1, help="the same in processes of their own, four faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--works", nargs="*", default=[work.name for work in WORKS])
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    options = parser.parse_args()
    works = [work for work in WORKS if work.name in options.works]
    warm()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="contextfold-faults-") as folder:
        campaign = Campaign(Path(folder), options.seed)
        campaign.prepare(works, options.processes > 0)
        asked = [(w, f, False) for _ in range(options.each) for f in options.faults for w in works]
        as_processes = [f for f in options.faults if f in AS_PROCESSES]
        asked += [(w, f, True) for _ in range(options.processes) for f in as_processes for w in works]
        trials = []
        for work, fault, process in asked:
            trials.append(campaign.trial(work, fault, process))
            row = trials[-1]
            mark = "; ".join(row["wrong"]) or "as it should"
            sys.stderr.write(
                f"{len(trials)}/{len(asked)} {work.name}, {fault}, {row['code']}, {row['found']}: {mark}\n"
            )
    wrong = [trial for trial in trials if trial["wrong"]]
    payload = {
        "command": "scripts/attack_faults.py " + " ".join(sys.argv[1:]),
        "mounted": campaign.mounts,
        "seconds": round(time.monotonic() - begun),
        "trials": len(trials),
        "landed": sum(trial["landed"] for trial in trials),
        "wrong": len(wrong),
        **summary(trials),
        "rows": trials,
    }  # fmt: skip
    write_json(options.out, payload)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
