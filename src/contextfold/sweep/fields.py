"""The fields of a YAML file, each checked when it is read; a message says where it stands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contextfold.errors import InputError

__all__ = ["Fields", "Names"]

Names = str | list[str] | None
"""A text with a question per line, a list of questions, or nothing."""


@dataclass(frozen=True)
class Fields:
    """One mapping of the file."""

    where: str
    """The file, and the section in it."""
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Fields:
        """The whole file. Raises `InputError` when it is no YAML mapping, or no file."""
        try:
            import yaml
        except ImportError:
            raise InputError("reading jobs needs PyYAML; run: pip install 'contextfold[sweep]'") from None
        try:
            found = yaml.safe_load(path.read_bytes().decode("utf-8-sig"))
        except OSError as error:
            raise InputError(f"cannot read the jobs in {path} ({error.strerror}); give an existing file") from error
        except UnicodeDecodeError as error:
            raise InputError(f"the file {path} is not UTF-8 (byte {error.start}); convert it") from error
        except yaml.YAMLError as error:
            raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
        return cls(str(path), _mapping(str(path), found))

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def refused(self, why: str) -> InputError:
        """The error that says where."""
        return InputError(f"{self.where}: {why}")

    def only(self, *known: str) -> None:
        """Refuse other keys: a misspelt one would be left out in silence."""
        for key in self.values:
            if key not in known:
                raise self.refused(f"key {key!r} is unknown; supported are {', '.join(known)}")

    def section(self, key: str) -> Fields:
        """A mapping in this one."""
        if key not in self.values:
            raise self.refused(f"{key} is missing")
        return Fields(f"{self.where}, {key}", _mapping(f"{self.where}, {key}", self.values[key]))

    def words(self, key: str) -> str:
        """A text that is not empty."""
        if key not in self.values:
            raise self.refused(f"{key} is missing")
        return self._words(key, self.values[key])

    def names(self, key: str, default: Sequence[str] | None = None) -> list[str]:
        """Texts, none empty, none twice."""
        if key not in self.values and default is None:
            raise self.refused(f"{key} is missing; give a list")
        return [self._words(key, each) for each in self._list(key, default)]

    def lines(self, key: str) -> Names:
        """A text, a list of texts, or None where there is nothing."""
        if key not in self.values:
            return None
        return self._words(key, self[key]) if isinstance(self[key], str) else self.names(key)

    def one_of(self, key: str, known: Sequence[str], default: str) -> str:
        value = self.get(key, default)
        if value not in known:
            raise self.refused(f"{key} {value!r} is not supported; choose one of {', '.join(known)}")
        return str(value)

    def yes(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(f"{key} {value!r} is neither true nor false")
        return value

    def whole_number(self, key: str, default: int, least: int, most: int | None = None) -> int:
        return self._whole(key, self.get(key, default), least, most)

    def whole_numbers(self, key: str, default: Sequence[int]) -> list[int]:
        """From 0 on, none twice."""
        return [self._whole(key, each, 0, None) for each in self._list(key, default)]

    def number(self, key: str, default: float) -> float:
        """A positive one; `1e-2`, which YAML takes for a text, is read as one."""
        value = self.get(key, default)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise self.refused(f"{key} {value!r} is not a positive number")
        return number

    def _list(self, key: str, default: Sequence[Any] | None) -> Sequence[Any]:
        values = self.values.get(key, default)
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise self.refused(f"{key} {values!r} is not a list with something in it")
        twice = [each for i, each in enumerate(values) if each in values[:i]]
        if twice:
            raise self.refused(f"{key} names {twice[0]!r} twice")
        return values

    def _words(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refused(f"{key} {value!r} is not a text; put it in quotes if it is meant to be one")
        if not value:
            raise self.refused(f"{key} has an empty text")
        return value

    def _whole(self, key: str, value: Any, least: int, most: int | None) -> int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < least or (most is not None and value > most):
            limits = f"from {least} on" if most is None else f"between {least} and {most}"
            raise self.refused(f"{key} {value!r} is not a whole number {limits}")
        return int(value)


def _mapping(where: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping) or not found:
        raise InputError(f"{where} is not a list of `key: value` with something in it")
    for key in found:
        if not isinstance(key, str):
            raise InputError(f"{where}: the key {key!r} is not a text; put it in quotes")
    return found
