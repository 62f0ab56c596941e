"""Hidden siblings to write into before a rename: held by a lock while somebody writes, swept when nobody does.

A process that is killed leaves its sibling behind. That nobody writes there any more is told by its lock, which the
system lets go with the process, and not by the clock alone: a clock may be wrong.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system: age alone decides
    fcntl = None  # type: ignore[assignment]

__all__ = ["flush", "flush_all", "hidden_file", "hidden_folder", "sweep"]

FILE, FOLDER = ".part", ".tmp"
"""Endings of hidden siblings: `.NAME.….part` and `.NAME.….tmp`."""

STALE = 86_400.0
"""Seconds before a sibling that nobody holds is taken for the remains of a killed process: a system that shares the
folder may know nothing of locks that are held elsewhere."""


@contextlib.contextmanager
def hidden_file(target: Path) -> Iterator[Path]:
    """An empty file beside `target`, gone afterwards unless it was renamed.

    It may be opened and written by its name, not replaced. Raises `OSError`.
    """

    def make(path: Path) -> None:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except ValueError as error:  # NUL, or half of a surrogate pair
            raise OSError(errno.EINVAL, "no file is called so") from error

    with _hidden(target, FILE, make) as path:
        yield path


@contextlib.contextmanager
def hidden_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, gone afterwards unless it was renamed. Raises `OSError`."""
    with _hidden(target, FOLDER, Path.mkdir) as path:
        yield path


def sweep(folder: Path, name: str = "", age: float = STALE) -> None:
    """Remove siblings of `name`, or of any name, that nobody holds and that are older than `age` seconds."""
    for ending in (FILE, FOLDER):
        for path in folder.glob(f".{glob.escape(name) or '*'}.*{ending}"):
            with contextlib.suppress(OSError):  # others sweep too
                if age and time.time() - path.stat().st_mtime <= age:
                    continue
                handle = _hold(path)
                if handle is not None:
                    _remove(path)
                    os.close(handle)


def flush(path: Path) -> None:
    """A file or a folder as it is now outlasts a power cut. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems flush no folders
            raise
    finally:
        os.close(handle)


def flush_all(folder: Path) -> None:
    """`flush` for a folder and all that is in it."""
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


@contextlib.contextmanager
def _hidden(target: Path, ending: str, make: Callable[[Path], None]) -> Iterator[Path]:
    path, handle = _made(target, ending, make)
    try:
        yield path
    finally:
        _remove(path)
        os.close(handle)


def _made(target: Path, ending: str, make: Callable[[Path], None]) -> tuple[Path, int]:
    """A new sibling, held; a sweep whose clock is ahead may take one away in the instant before it is."""
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(8)}{ending}")
        make(path)
        with contextlib.suppress(FileNotFoundError):
            handle = _hold(path)
            if handle is not None:
                if path.exists():
                    return path, handle
                os.close(handle)


def _hold(path: Path) -> int | None:
    """A lock that lasts as long as the descriptor is open; None where another process has it."""
    handle = os.open(path, os.O_RDONLY)
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:  # this file system has no locks
            pass
    return handle


def _remove(path: Path) -> None:
    """As far as that goes: it is gone already after a rename, and cannot go from a disk that became read-only."""
    with contextlib.suppress(OSError):
        if not path.is_dir():
            path.unlink()
            return
        try:
            shutil.rmtree(path, ignore_errors=True)
        except RecursionError:
            _remove_deep(path)


def _remove_deep(path: Path) -> None:
    """A folder that is deeper than Python follows; links are removed and not followed."""
    folders = [str(path)]
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    os.unlink(entry.path)
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
