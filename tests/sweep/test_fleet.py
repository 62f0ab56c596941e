"""Who gets which job, and what becomes of it when workers die, with a Ray that does what the test decides."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest

from contextfold.sweep.cluster import ATTEMPTS, QUEUE, Crew, _Fleet
from contextfold.sweep.jobs import Job


class Died(Exception):
    """A worker died."""


class Handle:
    """A worker that runs what it was given, in order, when somebody looks."""

    def __init__(self, ray):
        self.ray, self.given, self.results, self.alive = ray, [], {}, True
        self.run = SimpleNamespace(remote=self.take)
        ray.handles.append(self)

    def take(self, job, digest):
        ref = (id(self), len(self.given))
        self.given.append((ref, job, digest))
        self.ray.owner[ref] = self
        self.ray.deepest = max(self.ray.deepest, len(self.given) - len(self.results))
        return ref

    def work(self, ref):
        for each, job, digest in self.given[len(self.results) :]:
            if not self.alive:
                return
            self.ray.started[digest] += 1
            if self.ray.deadly[digest] > 0:
                self.ray.deadly[digest] -= 1
                self.alive = False
                return
            self.results[each] = {"job": digest, "error": None}
            self.ray.models[id(self)].append(job.source)
            if each == ref:
                return


class FakeRay:
    """`deadly` says how many workers a job takes with it; `last` looks at the newest job first."""

    exceptions = SimpleNamespace(RayActorError=Died)

    def __init__(self, deadly=(), last=False):
        self.handles, self.owner, self.deepest, self.last = [], {}, 0, last
        self.deadly, self.started = Counter(dict(deadly)), Counter()
        self.models = {}

    def remote(self, **how):
        assert (how["max_restarts"], how["max_task_retries"]) == (0, 0)

        def hire():
            handle = Handle(self)
            self.models[id(handle)] = []
            return handle

        return lambda worker: SimpleNamespace(remote=hire)

    def wait(self, refs, num_returns):
        chosen = refs[-1] if self.last else refs[0]
        return [chosen], [ref for ref in refs if ref != chosen]

    def get(self, ref):
        handle = self.owner[ref]
        if ref not in handle.results:
            handle.work(ref)
        if ref not in handle.results:
            raise Died("the worker died")
        return handle.results[ref]

    def kill(self, handle):
        handle.alive = False


def jobs(count, models=1):
    return [
        (f"{i}", Job("fold", f"m{i % models}", f"m{i % models}", "", "float32", "c", "text", "balanced", None, {}))
        for i in range(count)
    ]


def run(ray, todo, workers):
    crew = Crew(size=workers)
    return list(_Fleet(ray, 1, crew).run(todo)), crew


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_job_is_given_once_and_no_worker_has_more_than_two(workers, last):
    ray = FakeRay(last=last)
    rows, crew = run(ray, jobs(23), workers)
    assert sorted(rows, key=lambda row: int(row[0])) == [(f"{i}", {"job": f"{i}", "error": None}) for i in range(23)]
    assert set(ray.started.values()) == {1}
    assert (ray.deepest, len(ray.handles), crew.lost) == (QUEUE, workers, [])


@pytest.mark.parametrize("last", [False, True])
def test_workers_that_die_lose_no_job_and_double_none(last):
    ray = FakeRay({"3": 1, "4": 1, "11": 2, "19": 1}, last)
    rows, crew = run(ray, jobs(20), 2)
    assert sorted(int(digest) for digest, _ in rows) == list(range(20))
    assert all(row["error"] is None for _, row in rows)
    assert (len(crew.lost), len(ray.handles)) == (5, 7)


def test_a_job_that_takes_its_workers_with_it_fails_and_no_other():
    ray = FakeRay({"5": 99})
    rows, crew = run(ray, jobs(12), 2)
    assert sorted(int(digest) for digest, _ in rows) == list(range(12))
    failed = {digest: row["error"] for digest, row in rows if row["error"] is not None}
    assert list(failed) == ["5"]
    assert f"{ATTEMPTS} workers died" in failed["5"]
    assert (ray.started["5"], len(crew.lost)) == (ATTEMPTS, ATTEMPTS)


def test_a_worker_stays_with_its_model():
    ray = FakeRay()
    run(ray, jobs(40, models=4), 2)
    changes = [sum(a != b for a, b in pairwise(seen)) for seen in ray.models.values()]
    assert sum(changes) <= 4  # four models over two workers need two changes, and the last jobs go to whoever is free
