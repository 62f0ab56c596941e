"""What this process may still take of memory, as whoever loads a model under a ceiling says, and what it gives back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

__all__ = ["bytes_left", "give_back_freed_memory", "limit", "without_reserves"]

_asked: list[Callable[[], int]] = []


def limit(left: Callable[[], int] | None) -> None:
    """From now on `left` says how many bytes there are; None: nobody counts."""
    _asked[:] = [] if left is None else [left]


def bytes_left() -> int | None:
    """Bytes up to the ceiling of this process; None without one."""
    return _asked[0]() if _asked else None


def without_reserves() -> None:
    """Let the memory of every tensor above 128 KiB go back to the system when it is freed, where the C library can be
    told to (glibc).

    By itself it keeps what it was given for tensors of up to 32 MiB, and the sum of such rests passes any ceiling.
    """
    threshold, mmap_threshold = 2**17, -3  # M_MMAP_THRESHOLD of malloc.h
    _glibc("mallopt", mmap_threshold, threshold)


def give_back_freed_memory(*_: object) -> None:
    """Give what smaller tensors left free back to the system; a hook for the forwards of a model."""
    _glibc("malloc_trim", 0)


def _glibc(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        function = getattr(ctypes.CDLL(None), name, None)  # musl has none, and gives back by itself
        if function is not None:
            function(*arguments)
