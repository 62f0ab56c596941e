"""Sums in tiles, in memory and on disk, against dense float64 linear algebra."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest
import torch

from contextfold import room
from contextfold.bake import tiles
from contextfold.bake.moments import Moments, Ridge, penalty
from contextfold.bake.tiles import Tiles
from contextfold.errors import InputError

INNER, OUTER, ROWS = 23, 6, 50


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Five tiles a side, the last of three rows."""
    monkeypatch.setattr(tiles, "TILE", 5)
    yield
    room.limit(None)


def rows(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    s = torch.randn(ROWS, INNER, generator=g, dtype=torch.float64) * torch.logspace(0, -2, INNER, dtype=torch.float64)
    return s.to(dtype), torch.randn(ROWS, OUTER, generator=g, dtype=torch.float64).to(dtype)


def summed(s, t, left=None) -> Tiles:
    """With so many bytes left for the process."""
    room.limit(None if left is None else lambda: left)
    found = Tiles(INNER, OUTER, s)
    for start in range(0, ROWS, 7):
        found.add(s[start : start + 7], t[start : start + 7])
    return found


def solved(s, t, left=None, tol=0.0) -> Ridge:
    room.limit(None if left is None else lambda: left)
    moments = Moments(INNER, OUTER, torch.empty(0, INNER, dtype=torch.float64), ROWS)
    moments.add(s, t)
    return moments.solve(1e-2, tol)


@pytest.mark.parametrize("left", [None, 0], ids=["in memory", "on disk"])
def test_every_step_is_that_of_the_dense_matrix(left):
    s, t = rows()
    found = summed(s, t, left)
    assert found.on_disk is (left == 0)
    K = s.T @ s
    lam = found.penalty(1e-2)
    assert lam == pytest.approx(penalty(K, 1e-2), rel=1e-12)
    K = K + lam * torch.eye(INNER, dtype=torch.float64)
    D = torch.linalg.solve(K, s.T @ t).T
    energy = D @ K @ D.T
    assert (found.eliminate(lam) - energy).norm() < 1e-12 * energy.norm()
    U = torch.linalg.qr(torch.randn(OUTER, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    assert (found.substitute(U) - U.T @ D).norm() < 1e-11 * D.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_ridge_from_disk_is_that_from_memory_bit_for_bit(dtype):
    s, t = rows(dtype)
    for tol in (0.0, 0.1):
        memory, disk = solved(s, t, tol=tol), solved(s, t, left=0, tol=tol)
        assert (memory.lam, memory.explained, memory.delta.rank) == (disk.lam, disk.explained, disk.delta.rank)
        assert torch.equal(memory.delta.B, disk.delta.B)
        assert torch.equal(memory.delta.A, disk.delta.A)


def test_what_fits_stays_in_memory():
    """Half of the Gram matrix in tiles, the cross product, the solution and what its rank is decided on."""
    s, t = rows()
    needed = 8 * (5 * 5 * 10 + 3 * 5 * 4 + 3 * 3 + INNER * OUTER * 2 + 4 * OUTER * OUTER)
    assert not summed(s, t, needed).on_disk
    assert summed(s, t, needed - 1).on_disk
    assert not summed(s, t, None).on_disk


def test_tiles_on_disk_leave_the_memory_of_the_process(monkeypatch):
    """Of 128 MiB on disk a tile or two are in memory afterwards."""
    from contextfold.ceiling import peak_memory, reset_peak, used_memory
    from contextfold.room import without_reserves

    if peak_memory() is None or not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("this system does not say what was in memory")
    without_reserves()
    monkeypatch.setattr(tiles, "TILE", 256)
    size = 4096 + 1024
    s = torch.ones(2, size, dtype=torch.float64)
    room.limit(lambda: 0)
    sums = Tiles(size, 8, s)
    reset_peak()
    before = used_memory()
    sums.add(s, s[:, :8])
    assert float(sums.gram[-1][0].sum()) == 2 * 256 * 256
    assert (peak_memory() or 0) - before < 2**23
    room.limit(None)
    sums = Tiles(size, 8, s)
    sums.add(s, s[:, :8])
    assert (peak_memory() or 0) - before > 8 * size * size / 2


@pytest.mark.parametrize(("place", "name"), [(os, "posix_fallocate"), (tempfile, "TemporaryFile")])
def test_a_disk_without_room_is_told_in_one_line(monkeypatch, place, name):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(place, name, full, raising=False)
    with pytest.raises(InputError, match=r"sums of a bake.*No space left.*let TMPDIR name a folder with room") as told:
        summed(*rows(), left=0)
    assert "\n" not in str(told.value)
