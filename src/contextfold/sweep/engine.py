"""Jobs that are not done yet are run, each is kept when it is, and all that are kept become rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contextfold.files import Kept
from contextfold.sweep.cluster import Crew, on_ray
from contextfold.sweep.jobs import Job
from contextfold.sweep.results import fits
from contextfold.sweep.work import Worker

__all__ = ["Outcome", "sweep"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a sweep has, and what this run of it did."""

    jobs: Sequence[Job]
    rows: Sequence[dict[str, Any]]
    """One per job that has been run, failed ones included, in the order of the jobs."""
    ran: int
    """Jobs that this run did; the others were kept, or are missing."""
    seconds: float
    """Of the wall, this run."""
    job_seconds: float
    """Sum over the jobs that this run did, as each of them counted."""
    workers: int
    """Processes that ran jobs at once."""
    lost: int
    """Workers that died in this run."""

    @property
    def failed(self) -> Sequence[dict[str, Any]]:
        return [row for row in self.rows if row["error"] is not None]

    def to_json(self) -> dict[str, Any]:
        """Stable keys; documented in `docs/json.md`."""
        return {
            "jobs": len(self.jobs),
            "ran": self.ran,
            "kept": len(self.rows) - self.ran,
            "missing": len(self.jobs) - len(self.rows),
            "failed": len(self.failed),
            "seconds": round(self.seconds, 3),
            "job_seconds": round(self.job_seconds, 3),
            "workers": self.workers,
            "workers_lost": self.lost,
            "rows": list(self.rows),
        }


def sweep(
    jobs: Sequence[Job],
    folder: Path,
    *,
    address: str | None = None,
    workers: int | None = None,
    collect: bool = False,
    progress: Callable[[int], None] = lambda more: None,
) -> Outcome:
    """Run what `folder` does not hold yet, and give a row for every job that it holds then.

    A finished job is one small file there, under the digest of all that it depends on, so a sweep that was stopped
    goes on and a job whose inputs changed is run anew. Failed jobs are run again.

    Arguments:
        jobs: as `read_jobs` gives them.
        folder: where finished jobs are kept; made if it is not there.
        address: of a Ray cluster, or `local` for one on this machine; None runs all jobs in this process.
        workers: processes on Ray; None takes one per processor of the cluster.
        collect: run nothing.
        progress: told how many more jobs are done, first of all those that were kept.

    Raises `InputError` where nothing can be kept, and where Ray is missing or does not answer.
    """
    kept = Kept(folder)
    digests = {job.digest: job for job in jobs}
    rows = {d: row for d in digests if (row := kept.get("job", d)) is not None and fits(row, d)}
    todo = [] if collect else [(d, job) for d, job in digests.items() if d not in rows or rows[d]["error"] is not None]
    crew = Crew()
    started, spent = time.monotonic(), 0.0
    progress(len(jobs) - len(todo))
    done = on_ray(todo, address, workers, crew) if address is not None and todo else _here(todo)
    for digest, row in done:
        kept.put("job", digest, row)
        rows[digest] = row
        spent += row["seconds"] or 0.0
        progress(1)
    found = [rows[digest] for digest in digests if digest in rows]
    return Outcome(jobs, found, len(todo), time.monotonic() - started, spent, crew.size, len(crew.lost))


def _here(todo: Sequence[tuple[str, Job]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One after the other, in this process; those of a model come together."""
    worker = Worker()
    return ((digest, worker.run(job, digest)) for digest, job in todo)
