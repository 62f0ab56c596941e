"""A local Ray cluster of two workers: the rows of one process, and workers that are killed while they work."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
from contextlib import suppress

import psutil
import pytest
from tests.sweep.conftest import QUESTIONS, write

from contextfold.errors import InputError
from contextfold.sweep import cluster, read_jobs, sweep

CLOCK = {"seconds", "solve_seconds", "peak_bytes"}
HERE = importlib.util.find_spec("ray") is not None


@pytest.fixture(scope="module")
def workers():
    """Two of them."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": cluster.STORE_BYTES}
    ray.init("local", num_cpus=2, **quiet)
    yield 2
    ray.shutdown()


def figures(rows):
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in rows]


def processes():
    """Process ids of the workers that hold models, below this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found += [child.pid] if child.cmdline()[0].startswith("ray::Worker") else []
    return found


@pytest.mark.ray
@pytest.mark.skipif(not HERE, reason="Ray is not installed; `make sweep-ray` has it")
def test_ray_gives_the_rows_of_one_process(place, model, workers, monkeypatch):
    (place / "again").symlink_to(model)
    path = write(
        place, models=["model", "again"], contexts={"one": "abc def", "none": "a"}, seeds=[0, 1],
        bake={"estimators": ["output"], "queries": QUESTIONS, "tokens": 2},
        fold={"queries": [" ijk", " lmn"], "keep": "0:1"},
    )  # fmt: skip
    jobs = read_jobs(path)
    apart = sweep(jobs, place / "ray", address="local", workers=workers)
    alone = sweep(jobs, place / "here")
    assert figures(apart.rows) == figures(alone.rows)
    assert (len(apart.rows), apart.workers, apart.lost) == (len(jobs), 2, 0)
    assert len(apart.failed) == len(alone.failed) > 0
    assert sweep(jobs, place / "ray", address="local").ran == len(apart.failed)


@pytest.mark.ray
@pytest.mark.skipif(not HERE, reason="Ray is not installed; `make sweep-ray` has it")
def test_a_worker_killed_half_way_loses_no_job_and_doubles_none(place, workers, call):
    path = write(place, fold={"queries": [f" q{i}" for i in range(24)]})
    work = place / "r.parquet.work"
    killed: list[int] = []
    done = threading.Event()

    def kill():
        while len(killed) < 2 and not done.wait(0.05):
            fresh = [pid for pid in processes() if pid not in killed]
            # Only once it is at work, and never two at a time.
            if fresh and len(list(work.glob("job-*.json"))) >= 4 * (len(killed) + 1):
                os.kill(fresh[0], signal.SIGKILL)
                killed.append(fresh[0])

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        code, printed, _ = call(
            "sweep", path, "--out", place / "r.parquet", "--ray", "local", "--workers", workers, "--json"
        )
    finally:
        done.set()
        thread.join()
    found = json.loads(printed)  # Ray's own words about the dead are not in it
    assert (code, len(killed), found["workers"], found["failed"]) == (0, 2, 2, 0)
    assert found["workers_lost"] >= 1
    assert figures(found["rows"]) == figures(sweep(read_jobs(path), place / "here").rows)
    assert len(list(work.glob("job-*.json"))) == 24


@pytest.mark.skipif(HERE, reason="Ray is installed")
def test_without_ray_the_message_says_how_to_get_it(place):
    with pytest.raises(InputError, match=r"contextfold\[ray\]"):
        sweep(read_jobs(write(place)), place / "work", address="local")


def test_a_cluster_that_is_not_there_is_refused_at_once():
    started = time.monotonic()
    with pytest.raises(OSError, match="refused"):
        cluster._knock("127.0.0.1:1")
    assert time.monotonic() - started < 5
