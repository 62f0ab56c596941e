"""Whatever a file holds: a typed error in one line or a right answer; nothing run, nothing written, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doors import DOORS
from watched import Broken, kept

EXAMPLES = 120


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name.replace(" ", "-"))
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
@given(rng=st.randoms(use_true_random=True))
def test_spoilt_files_are_refused_or_read_right(door, rng, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / door.name.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    call, path = door.make(folder, rng)
    assert kept(call, folder, size=path.stat().st_size, multiple=door.multiple)


def _fail(folder: Path, what: str):
    import os
    import pickle
    import time

    def door():
        match what:
            case "untyped":
                raise KeyError("x")
            case "hang":
                time.sleep(5)
            case "writes":
                (folder.parent / "evil").write_text("x")
            case "runs":
                os.system("true")
            case "unpickles":
                pickle.loads(b"cposix\nsystem\n.")
            case "hungry":
                return len(bytearray(2**24))
        return None

    return door


@pytest.mark.parametrize("what", ["untyped", "hang", "writes", "runs", "unpickles", "hungry"])
def test_the_watch_sees_each_broken_promise(what, tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(Broken):
        kept(_fail(tmp_path / "in", what), tmp_path / "in", size=10, multiple=10, deadline=1)
