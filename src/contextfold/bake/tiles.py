"""The sums of a ridge in tiles: in memory, or in a file of which a few tiles at a time are in memory.

Of `S Sᵀ (in, in)` the lower half is kept. Factoring, substitution and what they leave take the place of the sums, so
that nothing of their size is needed besides, and go tile by tile: the same operations in memory and on disk.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor

from contextfold.errors import InputError
from contextfold.room import bytes_left
from contextfold.solving import solved

__all__ = ["TILE", "Tiles"]

TILE = 1024
"""Rows of a tile: large enough for products to run at full speed, 8 MiB each."""


class Tiles:
    """`S Sᵀ (inner, inner)` and `S Tᵀ (inner, outer)`, float64, for rows like `s` and `t`.

    They lie in a file where they, and the solution, do not fit into what the process may still take. Raises
    `InputError` where the disk has no room for it.
    """

    def __init__(self, inner: int, outer: int, like: Tensor) -> None:
        self.spans = [slice(start, min(start + TILE, inner)) for start in range(0, inner, TILE)]
        widths = [span.stop - span.start for span in self.spans]
        shapes = [(a, b) for i, a in enumerate(widths) for b in widths[: i + 1]] + [(a, outer) for a in widths]
        size = sum(a * b for a, b in shapes)
        left = bytes_left() if like.device.type == "cpu" else None
        self._file = None
        if left is not None and 8 * (size + outer * inner + 4 * outer * outer) > left:
            self._file = _scratch(8 * size)
            flat = torch.frombuffer(self._file, dtype=torch.float64)
        else:
            flat = like.new_zeros(size, dtype=torch.float64)
        sizes = [a * b for a, b in shapes]
        cut = (part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True))
        self.gram = [[next(cut) for _ in range(i + 1)] for i in range(len(widths))]
        """`gram[i][j]`, j ≤ i."""
        self.cross = list(cut)

    @property
    def on_disk(self) -> bool:
        return self._file is not None

    def _release(self) -> None:
        """Pages of the file leave the memory of this process; what is in them stays."""
        if self._file is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._file.madvise(mmap.MADV_DONTNEED)

    def add(self, s: Tensor, t: Tensor) -> None:
        """More rows `(n, inner)`, `(n, outer)`. Products are formed in their dtype and summed in float64."""
        for i, rows in enumerate(self.spans):
            part = s[:, rows].T
            for j, columns in enumerate(self.spans[: i + 1]):
                self.gram[i][j] += part @ s[:, columns]
                self._release()
            self.cross[i] += part @ t
            self._release()

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Every tile, with the name of the sum that it belongs to."""
        for i, row in enumerate(self.gram):
            for name, tile in [*(("s s", tile) for tile in row), ("t s", self.cross[i])]:
                yield name, tile
                self._release()

    def penalty(self, lam0: float) -> float:
        """As `moments.penalty` of the whole matrix."""
        trace = sum(float(row[-1].trace()) for row in self.gram)
        square = 0.0
        for i, row in enumerate(self.gram):
            for j, tile in enumerate(row):
                square += (1 if i == j else 2) * float((tile / trace).square().sum()) if trace else 0.0
                self._release()
        return lam0 * square * trace if trace else 1.0

    def eliminate(self, lam: float) -> Tensor:
        """`T Sᵀ K⁻¹ S Tᵀ (outer, outer)`, `K = S Sᵀ + lam I = L Lᵀ`. The sums become L and `Y = L⁻¹ S Tᵀ`."""
        gram, cross = self.gram, self.cross
        energy: Tensor = cross[0].new_zeros(cross[0].shape[1], cross[0].shape[1])
        for i, row in enumerate(gram):
            row[i].diagonal().add_(lam)
            for j, tile in enumerate(row):
                for m in range(j):
                    tile.addmm_(row[m], gram[j][m].T, alpha=-1)
                    self._release()
                if i == j:
                    tile.copy_(solved(torch.linalg.cholesky, tile))
                else:
                    tile.copy_(solved(torch.linalg.solve_triangular, gram[j][j].T, tile, upper=True, left=False))
                self._release()
            for m in range(i):
                cross[i].addmm_(row[m], cross[m], alpha=-1)
                self._release()
            cross[i].copy_(solved(torch.linalg.solve_triangular, row[i], cross[i], upper=False))
            energy += cross[i].T @ cross[i]
            self._release()
        return energy

    def substitute(self, U: Tensor) -> Tensor:
        """`Uᵀ D (r, inner)`, `D = T Sᵀ K⁻¹`, after `eliminate`, for `U (outer, r)`. Y is used up."""
        rank = U.shape[1]
        parts = [cross[:, :rank] for cross in self.cross]
        for part, cross in zip(parts, self.cross, strict=True):
            part.copy_(cross @ U)
            self._release()
        found: Tensor = U.new_empty(rank, self.spans[-1].stop)
        for i in reversed(range(len(parts))):
            parts[i].copy_(solved(torch.linalg.solve_triangular, self.gram[i][i].T, parts[i], upper=True))
            found[:, self.spans[i]] = parts[i].T
            for m in range(i):
                parts[m].addmm_(self.gram[i][m].T, parts[i], alpha=-1)
                self._release()
            self._release()
        return found


def _scratch(size: int) -> mmap.mmap:
    """So many bytes of zeros, in a file that has no name and is gone with the last who maps it."""
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):  # elsewhere a disk that is full is met when it is written
                os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise InputError(
            f"the sums of a bake take {math.ceil(size / 2**20)} MiB, more than the ceiling on memory leaves, and the "
            f"temporary folder cannot take them ({error.strerror}); let TMPDIR name a folder with room"
        ) from error
