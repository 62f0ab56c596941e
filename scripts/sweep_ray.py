"""200 small jobs in one process, on one Ray worker, and on two of which five are killed at random.

python scripts/sweep_ray.py run     # writes docs/measured/sweep.json
python scripts/sweep_ray.py table   # puts the table between the markers of docs/sweep.md

Overhead per job: from the first finished job to the last, less the seconds that the jobs counted themselves; what a
cluster and its workers take to start is told apart. Keys: docs/json.md. Needs Ray: `make sweep-ray`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "docs" / "measured" / "sweep.json"
PAGE = ROOT / "docs" / "sweep.md"
PLACE = ROOT / "build" / "sweep"
KILLS = 5
CLOCK = ("seconds", "solve_seconds", "peak_bytes")

JOBS = """
models: [llama, qwen3]
contexts: {one: abc def ghi, two: jkl mno pqr, three: stu vwx yza, four: bcd efg hij, five: klm nop qrs}
seeds: [0, 1, 2, 3, 4]
bake:
  estimators: [two-sites, output]
  queries: [what is p, what is q, what is r, what is s, what is t]
  tokens: 2
fold:
  queries: [" a", " b", " c", " d", " e", " f", " g", " h", " i", " j"]
"""


def prepared() -> Path:
    """A folder with two tiny random models and the jobs file."""
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    import tiny

    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    for name in ("llama", "qwen3"):
        tiny.letters().save_pretrained(PLACE / name)
        tiny.build(name, torch.float32).save_pretrained(PLACE / name)
    path = PLACE / "jobs.yaml"
    path.write_text(JOBS)
    return path


def measured(jobs: Any, name: str, workers: int | None = None, kills: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """One sweep: what it took, and its rows."""
    from contextfold.sweep import sweep

    work, times = PLACE / f"work-{name}", [time.monotonic()]
    over = threading.Event()
    killed: list[int] = []
    thread = threading.Thread(target=killer, args=(work, len(jobs), kills, over, killed))
    thread.start()
    try:
        address = None if workers is None else "local"
        outcome = sweep(jobs, work, address=address, workers=workers, progress=lambda n: times.append(time.monotonic()))
    finally:
        over.set()
        thread.join()
    rows = list(outcome.rows)
    done = sorted(work.glob("job-*.json"), key=lambda file: file.stat().st_mtime_ns)
    first = json.loads(done[0].read_text())["seconds"]
    window = times[-1] - times[2]
    return {
        "workers": outcome.workers, "results": len(rows), "distinct": len({row["job"] for row in rows}),
        "failed": len(outcome.failed), "killed": len(killed), "workers_lost": outcome.lost,
        "seconds": round(outcome.seconds, 1), "job_seconds": round(outcome.job_seconds, 1),
        "seconds_to_first": round(times[2] - times[0], 1),
        "overhead_ms_per_job": round(
            1000 * (outcome.workers * window - (outcome.job_seconds - first)) / (len(rows) - 1), 1
        ),
    }, rows  # fmt: skip


def killer(work: Path, jobs: int, kills: int, over: threading.Event, killed: list[int]) -> None:
    """Kills a worker, whichever, when a number of jobs, whichever, are done."""
    import psutil

    chance = random.Random()
    moments = sorted(chance.sample(range(jobs // 20, jobs - jobs // 10), kills))
    while moments and not over.wait(0.02):
        if len(list(work.glob("job-*.json"))) < moments[0]:
            continue
        mine = [child for child in psutil.Process().children(recursive=True) if is_worker(child)]
        fresh = [child for child in mine if child.pid not in killed]
        if fresh:
            chosen = chance.choice(fresh)
            chosen.kill()
            killed.append(chosen.pid)
            moments.pop(0)


def is_worker(process: Any) -> bool:
    import psutil

    try:
        return bool(process.cmdline()) and process.cmdline()[0].startswith("ray::Worker")
    except psutil.Error:
        return False


def run() -> None:
    import torch

    from contextfold.sweep import read_jobs

    torch.set_num_threads(1)
    jobs = read_jobs(prepared())
    found: dict[str, Any] = {
        "jobs": len(jobs), "cores": os.cpu_count(), "ray": importlib.metadata.version("ray"),
        "torch": torch.__version__,
    }  # fmt: skip
    runs = {"process": {}, "one_worker": {"workers": 1}, "two_workers_killed": {"workers": 2, "kills": KILLS}}
    figures = []
    for name, how in runs.items():
        found[name], rows = measured(jobs, name, **how)
        figures.append([{key: value for key, value in row.items() if key not in CLOCK} for row in rows])
        print(name, found[name], flush=True)  # noqa: T201
    found["same_rows"] = all(each == figures[0] for each in figures)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    killed = found["two_workers_killed"]
    if not (found["same_rows"] and killed["results"] == killed["distinct"] == len(jobs) and killed["killed"] == KILLS):
        raise SystemExit("jobs were lost, doubled, or gave other figures")


def table() -> None:
    found = json.loads(RESULT.read_text())
    names = {"process": "in one process", "one_worker": "Ray, one worker",
             "two_workers_killed": "Ray, two workers, killed at random"}  # fmt: skip
    heads = ("run", "results", "each once", "workers killed", "seconds", "of them in jobs", "to the first result",
             "overhead per job")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, title in names.items():
        row = found[name]
        cells = (
            title, row["results"], "yes" if row["results"] == row["distinct"] else "no", row["killed"],
            f"{row['seconds']:.0f}", f"{row['job_seconds']:.0f}", f"{row['seconds_to_first']:.1f} s",
            f"{row['overhead_ms_per_job']:.1f} ms",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    same = "The three runs gave the same figures." if found["same_rows"] else "The runs did not give the same figures."
    lines += [
        "",
        f"{same} Ray {found['ray']}, torch {found['torch']}, {found['cores']} processors that others used too.",
    ]
    text = PAGE.read_text(encoding="utf-8")
    start, end = "<!-- sweep: generated by scripts/sweep_ray.py -->\n", "<!-- /sweep -->"
    head, rest = text.split(start)
    PAGE.write_text(head + start + "\n".join(lines) + "\n" + rest[rest.index(end) :], encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    {"run": run, "table": table}[parser.parse_args().what]()
