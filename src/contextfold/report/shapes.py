"""What a JSON value must look like, said by an example, and the first place where it does not."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contextfold.errors import one_line

__all__ = ["NUMBER_OR_NULL", "Each", "Either", "Maybe", "Shape", "completed", "misfit"]

LARGEST = 1e300
"""No number of a run is as large; sums and squares of larger ones leave what a figure can show."""

WORDS = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    object: "anything",
    type(None): "null",
}


@dataclass(frozen=True)
class Maybe:
    """May be null, or not there at all."""

    shape: Shape


@dataclass(frozen=True)
class Each:
    """An object whose values, whatever their names, all look alike."""

    shape: Shape


@dataclass(frozen=True)
class Either:
    """One of several types of `WORDS`."""

    kinds: tuple[type, ...]


NUMBER_OR_NULL = Either((float, type(None)))
"""A number that need not be finite, and is null then."""

Shape = type | Maybe | Each | Either | list[Any] | dict[str, Any]
"""A type of `WORDS`; `[shape]`, a list of such; `{key: shape}`, an object with at least these keys; or the above."""


def misfit(value: object, shape: Shape, where: str = "") -> str | None:
    """What was expected and what was met at the first place where `value` does not look like `shape`; None if it does.

    Keys that the shape does not name are not looked at.
    """
    if isinstance(shape, Maybe):
        return None if value is None else misfit(value, shape.shape, where)
    if isinstance(shape, Either):
        fits = any(_is(value, kind) for kind in shape.kinds)
        return None if fits else _said(where, " or ".join(WORDS[kind] for kind in shape.kinds), value)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _said(where, "a list", value)
        return _first((misfit(item, shape[0], f"{where}[{k}]") for k, item in enumerate(value)))
    if isinstance(shape, (Each, dict)):
        if not isinstance(value, Mapping):
            return _said(where, "an object", value)
        if isinstance(shape, Each):
            return _first(misfit(item, shape.shape, _at(where, key)) for key, item in value.items())
        return _first(_entry(value, key, inside, where) for key, inside in shape.items())
    return None if _is(value, shape) else _said(where, WORDS[shape], value)


def completed(value: Any, shape: Shape) -> Any:
    """`value`, which has this shape, with null under the keys that it left out."""
    if isinstance(shape, Maybe):
        return None if value is None else completed(value, shape.shape)
    if isinstance(shape, list):
        return [completed(item, shape[0]) for item in value]
    if isinstance(shape, Each):
        return {key: completed(item, shape.shape) for key, item in value.items()}
    if isinstance(shape, dict):
        return {**value, **{key: completed(value.get(key), inside) for key, inside in shape.items()}}
    return value


def _entry(value: Mapping[str, object], key: str, shape: Shape, where: str) -> str | None:
    if key in value:
        return misfit(value[key], shape, _at(where, key))
    return None if isinstance(shape, Maybe) else f"key {_at(where, key)} is missing"


def _is(value: object, kind: type) -> bool:
    if isinstance(value, (int, float)) and not abs(value) < LARGEST:  # NaN too
        return False
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is object:
        return True
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _first(found: Any) -> str | None:
    return next((one for one in found if one is not None), None)


def _at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _said(where: str, expected: str, value: object) -> str:
    place = one_line(where) if where else "the whole"
    return f"{place} should be {expected}, but is {one_line(reprlib.repr(value), 40)}"
