"""What the numbers depend on besides the inputs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from types import MappingProxyType

__all__ = ["versions"]


@cache
def versions() -> Mapping[str, str]:
    """Of Python, this package, torch and transformers; they do not change while a process runs."""
    packages = ("contextfold", "torch", "transformers")
    return MappingProxyType({"python": platform.python_version(), **{name: version(name) for name in packages}})
