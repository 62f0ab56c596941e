"""What the numbers depend on besides the inputs."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """Of Python, this package, torch and transformers."""
    return dict(_found())


@cache
def _found() -> tuple[tuple[str, str], ...]:
    """They do not change while a process runs, and looking them up takes longer than one would think."""
    packages = ("contextfold", "torch", "transformers")
    return (("python", platform.python_version()), *((name, version(name)) for name in packages))
