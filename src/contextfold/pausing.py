"""A call that can be left in the middle, however deep, and gone on with: greenlets make a stop out of a function call.

A forward stops inside one of its hooks, something else runs, and it goes on. Only one of them ever runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import greenlet

__all__ = ["Pausable"]

T = TypeVar("T")


class Pausable(Generic[T]):
    """`call`, not yet begun. What it raises comes out of `go_on`."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._thread = greenlet.greenlet(self._run)
        self._call = call
        self._result: list[T] = []

    def _run(self) -> None:
        self._result.append(self._call())

    def go_on(self) -> bool:
        """Run to the next pause; False when the call has ended instead, or had ended before."""
        if self._thread.dead:
            return False
        self._thread.parent = greenlet.getcurrent()
        self._thread.switch()
        return not self._thread.dead

    def pause(self) -> None:
        """Called from inside: wait here until `go_on` is called again."""
        self._thread.parent.switch()

    def result(self) -> T:
        """Run to the end, through every pause that is left, and give away what the call returned."""
        while self.go_on():
            pass
        return self._result.pop()

    def close(self) -> None:
        """End the call, wherever it is; its `finally` clauses run."""
        if self._thread and not self._thread.dead:
            self._thread.parent = greenlet.getcurrent()
            self._thread.throw(greenlet.GreenletExit)
