"""A discovered family as source, ready to paste into `anatomy/families`."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from contextfold.anatomy.record import Family

__all__ = ["source"]


def source(family: Family) -> str:
    """Python that makes `family`; what has its default is left out."""
    return _written(family, 0)


def _written(value: Any, depth: int) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        return _call(value, depth)
    if isinstance(value, tuple) and any(is_dataclass(part) for part in value):
        inner = "".join(f"{_indent(depth + 1)}{_written(part, depth + 1)},\n" for part in value)
        return f"(\n{inner}{_indent(depth)})"
    return repr(value).replace("'", '"')


def _call(value: Any, depth: int) -> str:
    lines = []
    for item in fields(value):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        met = getattr(value, item.name)
        if met != default:
            lines.append(f"{_indent(depth + 1)}{item.name}={_written(met, depth + 1)},\n")
    return f"{type(value).__name__}(\n{''.join(lines)}{_indent(depth)})"


def _indent(depth: int) -> str:
    return "    " * depth
