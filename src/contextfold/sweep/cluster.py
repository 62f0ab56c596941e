"""Jobs on a Ray cluster. Workers hold a model each; this process holds the jobs, and alone writes what is done.

A worker gets its next job while it is at work, so that it need not wait, and no third one: what is waiting stays here.
A worker that dies takes no result with it: what it had not given back is waiting again, before all else.
"""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from contextfold.errors import InputError
from contextfold.sweep.jobs import Job
from contextfold.sweep.results import failed_row
from contextfold.sweep.work import Worker

__all__ = ["ATTEMPTS", "Crew", "on_ray"]

QUEUE = 2
"""Jobs that a worker has: the one that it runs, and the next."""

ATTEMPTS = 3
"""Workers that a job may be running on when they die, before it is taken for the cause and fails."""

STORE_BYTES = 100 * 2**20
"""Of memory that a local cluster sets aside for what processes share; a row has a few kilobytes."""

Task = tuple[str, Job]
"""A digest and its job."""


@dataclass
class Crew:
    """Who ran the jobs; written while they run."""

    size: int = 1
    lost: list[str] = field(default_factory=list)
    """Per worker that died, why."""


def on_ray(todo: Sequence[Task], address: str, workers: int | None, crew: Crew) -> Iterator[tuple[str, dict[str, Any]]]:
    """Digests and rows as they are done. Raises `InputError` when Ray is missing or no such cluster answers."""
    try:
        import ray
    except ImportError:
        raise InputError("a Ray cluster needs Ray; run: pip install 'contextfold[ray]'") from None
    with _connected(ray, address, workers):
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if not 0 < (workers or cpus) <= cpus:
            raise InputError(f"{workers or 'no'} workers on {cpus} processors of the Ray cluster; give it 1 to {cpus}")
        crew.size = min(workers or cpus, len(todo))
        yield from _Fleet(ray, cpus // (workers or cpus), crew).run(todo)


@contextmanager
def _connected(ray: Any, address: str, workers: int | None) -> Iterator[None]:
    """To a cluster that is there already, if this process is; else until the work is done."""
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=workers, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
    else:
        try:
            _knock(address)
            ray.init(address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise InputError(
                f"no Ray cluster answers at {address!r} ({why}); give the host:port of a running one, or local"
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray tries for minutes to reach what is not there. Raises `OSError` where nobody listens."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=5).close()


@dataclass(eq=False)
class _Member:
    """One worker, the model of the last job that it was given, and what it has not given back yet, in order."""

    handle: Any
    source: str = ""
    flight: dict[Any, Task] = field(default_factory=dict)


class _Fleet:
    """The workers, and the jobs that are waiting for one, by model."""

    def __init__(self, ray: Any, cpus: int, crew: Crew) -> None:
        self._ray, self._crew = ray, crew
        # No restarts and no retries by Ray itself: what is run again is decided here, where results are written.
        self._remote = ray.remote(num_cpus=cpus, max_restarts=0, max_task_retries=0)(Worker)
        self._members = [self._hired() for _ in range(crew.size)]
        self._waiting: dict[str, deque[Task]] = {}
        self._deaths: Counter[str] = Counter()

    def _hired(self) -> _Member:
        return _Member(self._remote.remote())

    def run(self, todo: Sequence[Task]) -> Iterator[tuple[str, dict[str, Any]]]:
        for task in todo:
            self._waiting.setdefault(task[1].source, deque()).append(task)
        self._fill()
        while flight := {ref: member for member in self._members for ref in member.flight}:
            ready, _ = self._ray.wait(list(flight), num_returns=1)
            member = flight[ready[0]]
            try:
                row = self._ray.get(ready[0])
            except self._ray.exceptions.RayActorError as error:
                yield from self._replaced(member, error)
            else:
                yield member.flight.pop(ready[0])[0], row
            self._fill()

    def _fill(self) -> None:
        """Give every worker what it may have; the second job only while there is one for everybody."""
        for depth in range(1, QUEUE + 1):
            for member in self._members:
                left = sum(map(len, self._waiting.values()))
                if left > (depth - 1) * len(self._members) and len(member.flight) < depth:
                    self._give(member)

    def _give(self, member: _Member) -> None:
        if not self._waiting.get(member.source):
            member.source = self._busiest()
        digest, job = self._waiting[member.source].popleft()
        member.flight[member.handle.run.remote(job, digest)] = (digest, job)

    def _busiest(self) -> str:
        """The model with most jobs waiting for each worker that holds it, and one more."""
        held = Counter(member.source for member in self._members)
        return max(self._waiting, key=lambda source: len(self._waiting[source]) / (1 + held[source]))

    def _replaced(self, member: _Member, error: Exception) -> Iterator[tuple[str, dict[str, Any]]]:
        """Another worker in the place of one that died. What it had finished is taken; the rest waits again."""
        self._crew.lost.append(str(error))
        self._ray.kill(member.handle)
        self._members[self._members.index(member)] = self._hired()
        running = True
        again: list[Task] = []
        for ref, (digest, job) in member.flight.items():
            try:
                row = self._ray.get(ref)
            except self._ray.exceptions.RayActorError:
                self._deaths[digest] += running  # only the first was being run
                running = False
                if self._deaths[digest] < ATTEMPTS:
                    again.append((digest, job))
                else:
                    why = f"{ATTEMPTS} workers died while they ran it, for want of memory perhaps"
                    yield digest, failed_row(job, digest, why)
            else:
                yield digest, row
        for task in reversed(again):
            self._waiting.setdefault(task[1].source, deque()).appendleft(task)
