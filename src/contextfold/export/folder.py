"""A folder on disk is the old one or the new one, whole; never half of either.

Everything is written into a hidden sibling, flushed, and exchanged with the target in one system call. Two writers at
the same time each bring their own sibling, so the one that comes second replaces the first as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from contextfold.errors import InputError, NotWritten, one_line
from contextfold.files import parsed_json, read_regular
from contextfold.scratch import flush, flush_all, hidden_folder, sweep

__all__ = ["FORMAT", "RECEIPT", "Stage", "check_files", "check_target", "receipt_of", "staged"]

RECEIPT = "receipt.json"
"""The file by which a folder of ours is known, and says what it holds."""

FORMAT = "contextfold-export"

LARGEST = 64 * 2**20
"""Bytes of a receipt, at most; it has a line per edited parameter and per file."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux's renameat2(2)."""


class Stage:
    """A folder that is not there yet: write into `path`, then `publish`."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self._target = target

    def publish(self) -> None:
        """Put the folder in its place; what stood there goes.

        Raises `OSError` when it cannot be moved there.
        """
        flush_all(self.path)
        _put(self.path, self._target)
        flush(self._target.parent)


def check_target(target: Path) -> None:
    """Before minutes of work, not after. Raises `InputError` where a folder may not be put."""
    if not target.name or target.name in (".", ".."):
        raise InputError(f"{target} is not the name of a new folder; choose another --out")
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: {target.parent} does not exist; choose another --out")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"cannot write to {target.parent}: permission denied; choose another --out")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(f"{target} is not a folder; choose another --out")
    if target.is_dir() and any(target.iterdir()) and not _is_ours(target):
        raise InputError(
            f"{target} holds other things; only a folder that an export wrote before is replaced: choose another --out"
        )


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Stage]:
    """A hidden sibling of `target` to write into; gone again unless it is published.

    Raises `InputError` for a target that may not be replaced, `NotWritten` for one that cannot be written.
    """
    check_target(target)
    try:
        sweep(target.parent, target.name)
        with hidden_folder(target) as path:
            yield Stage(path, target)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise NotWritten(f"cannot write {target}: {why}; nothing was changed there") from error


def receipt_of(folder: Path) -> dict[str, Any]:
    """What the folder says of itself. Raises `InputError` when no export wrote it."""
    try:
        found = parsed_json(read_regular(folder / RECEIPT, LARGEST).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} holds no readable {RECEIPT}, so no export wrote it") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(f"{folder / RECEIPT} is not that of an export")
    return found


def check_files(folder: Path, receipt: Mapping[str, Any], most: int) -> None:
    """Refuse a folder that is not what was written, before another program reads it.

    A file that the receipt does not name may be one that a loader prefers: pickled weights, code, a configuration. Nor
    is a link followed out of the folder, a pipe waited for, or a file read that is larger than `most` bytes. Raises
    `InputError`.
    """
    wanted = receipt.get("files")
    if not isinstance(wanted, dict):
        raise InputError(f"{folder / RECEIPT} names no files: export the patch again")
    try:
        found = dict(_sizes(folder))
        found.pop(RECEIPT, None)
        other = min(set(found) ^ set(wanted), default=None)
        if other is not None:
            what = "is not one of the files that were" if other in found else "is not there, but was"
            raise _other(other, folder, what)
        for name, size in found.items():
            if size > most:
                raise _other(name, folder, f"has {size} bytes, more than can have been")
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted[name]:
                    raise _other(name, folder, "is not the file that was")
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({one_line(error)}): export the patch again") from error


def _other(name: str, folder: Path, what: str) -> InputError:
    return InputError(f"{one_line(repr(name))} in {folder} {what} written: export the patch again")


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Name below `folder` and bytes of every file, however deep. Raises `InputError` for links and what is no file."""
    waiting = [""]
    while waiting:
        where = waiting.pop()
        with os.scandir(folder / where) as entries:
            for entry in entries:
                name = where + entry.name
                if entry.is_symlink():
                    raise _other(name, folder, "is a link, and none was")
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name + "/")
                elif entry.is_file(follow_symlinks=False):
                    yield name, entry.stat(follow_symlinks=False).st_size
                else:
                    raise _other(name, folder, "is no file, and nothing else was")


def _is_ours(folder: Path) -> bool:
    with contextlib.suppress(InputError):
        receipt_of(folder)
        return True
    return False


def _put(path: Path, target: Path) -> None:
    """Rename to a free name, exchange with a taken one; another writer may change which of the two it is."""
    while True:
        try:
            os.rename(path, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            _exchange(path, target)
            return
        except FileNotFoundError:
            continue


def _exchange(path: Path, target: Path) -> None:
    """Both names change places at once where the system can do that.

    Elsewhere the old folder is renamed first, so a crash in between leaves it, whole, under the name `.NAME.….old.tmp`.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(path), os.fsencode(target)
        if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), str(target))
    aside = path.with_name(path.name.removesuffix(".tmp") + ".old.tmp")
    os.rename(target, aside)
    os.rename(path, target)
    shutil.rmtree(aside, ignore_errors=True)
