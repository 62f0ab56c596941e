"""What a door does besides what it is asked for: files it writes, code it runs, memory and time it takes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contextfold.ceiling import peak_memory, reset_peak, used_memory
from contextfold.errors import ContextfoldError

__all__ = ["Broken", "Watch", "kept"]

RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class", "socket.connect")
"""Events of the interpreter that run code or reach for the network."""

CHANGES = ("os.rename", "os.mkdir", "os.link", "os.symlink", "os.remove", "os.rmdir")
"""Events that change a folder; the last argument is the open folder that a name is relative to, or -1."""

DEADLINE = 20
"""Seconds; every door here takes milliseconds on what is well-formed."""

LONGEST = 2000
"""Characters of a message: a whole file must not stand in it."""

EVIL = "evil"
"""What hostile files call a module that they want imported."""

CONSTANT, RESIDENT = 2**22, 2**26
"""Bytes that any door may take: of Python's own, and of the process, which keeps what it once had."""


class Broken(AssertionError):
    """A promise that was not kept."""


@dataclass
class Watch:
    """Listens to the interpreter while `on`, on one thread: those of earlier tests may still be at work."""

    on: bool = False
    thread: int = 0
    ran: list[str] = field(default_factory=list)
    wrote: list[str] = field(default_factory=list)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on or threading.get_ident() != self.thread:
            return
        if event in RUNS:
            self.ran.append(f"{event} {args!r:.200}")
        elif event == "import" and str(args[0]).partition(".")[0] == EVIL:
            self.ran.append(f"{event} {args[0]}")
        elif event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.wrote.append(str(args[0]))
        elif event in CHANGES and args[-1] == -1:
            # Relative to an open folder otherwise, which was a path when it was opened.
            self.wrote += [os.fsdecode(arg) for arg in args[:2] if isinstance(arg, (str, bytes, Path))]


_watch = Watch()
sys.addaudithook(_watch)  # there is no way to take one away again; it does nothing unless it is on


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    def late(*_args: object) -> None:
        raise Broken(f"not done after {seconds} s")

    before, (left, again) = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, again)  # of pytest-timeout, a little later than it asked for


def kept(
    door: Callable[[], object], folder: Path, *, size: int = 0, multiple: int = 0, resident: int = 0,
    deadline: int = DEADLINE,
) -> str:  # fmt: skip
    """How `door` ended: `taken`, or the name of the error that refused.

    Raises `Broken` for any error but our own, one of more than a line, a write outside of `folder`, code that was run,
    more than `deadline` seconds, and, with `multiple`, more memory than that times `size` bytes and a constant; with
    `resident` the same of all that the process has in memory, whoever asked for it.
    """
    _watch.ran.clear()
    _watch.wrote.clear()
    started = time.monotonic()
    if resident:
        reset_peak()
        before = used_memory()
    if multiple:
        tracemalloc.start()
    try:
        with _deadline(deadline):
            _watch.on, _watch.thread = True, threading.get_ident()
            try:
                door()
                ended = "taken"
            except ContextfoldError as error:
                ended = type(error).__name__
                text = str(error)
                if len(text.splitlines()) != 1 or len(text) > LONGEST:
                    raise Broken(f"{ended} in {len(text.splitlines())} lines, {len(text)} characters") from error
            except Broken:
                raise
            except Exception as error:
                raise Broken(f"{type(error).__name__}: {error!s:.200}") from error
            finally:
                _watch.on = False
        if multiple:
            peak = tracemalloc.get_traced_memory()[1]
            if peak > multiple * size + CONSTANT:
                raise Broken(f"{peak} bytes of memory for a file of {size}")
        if resident and (taken := (peak_memory() or 0) - before) > resident * size + RESIDENT:
            raise Broken(f"{taken} bytes in memory for {size}")
    finally:
        if multiple:
            tracemalloc.stop()
    if _watch.ran:
        raise Broken(f"ran {_watch.ran[0]}")
    outside = [name for name in _watch.wrote if not Path(name).resolve().is_relative_to(folder.resolve())]
    if outside:
        raise Broken(f"wrote {outside[0]}")
    if time.monotonic() - started > deadline:
        raise Broken(f"took more than {deadline} s")
    return ended
