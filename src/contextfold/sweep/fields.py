"""The fields of a YAML file, each checked when it is read; a message says where it stands."""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from contextfold.errors import InputError, one_line
from contextfold.files import read_whole

__all__ = ["Fields", "Names"]

T = TypeVar("T", str, int)

Names = str | list[str] | None
"""A text with a question per line, a list of questions, or nothing."""

LARGEST_FILE = 256 * 2**10
"""Bytes of a jobs file. YAML takes hundreds of bytes of memory for one of text; long texts have files of their own."""

LEVELS = 20
"""Of lists and sections in each other; a jobs file has four. PyYAML takes quadratic time for very many."""

VALUES = 100_000
"""Values in a jobs file, those behind an alias counted wherever it stands: ten lines of aliases can stand for 10^10."""

LARGEST_NUMBER = 2**31 - 1
"""Of a count or a seed."""


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
            text = read_whole(path, LARGEST_FILE).decode("utf-8-sig")
            _check_depth(yaml.parse(text, Loader=yaml.SafeLoader))
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
            if root is not None:
                _count(root, {})
            found = None if root is None else loader.construct_document(root)
        except OSError as error:
            raise InputError(f"cannot read the jobs in {path} ({error.strerror}); give an existing file") from error
        except UnicodeDecodeError as error:
            raise InputError(f"the file {path} is not UTF-8 (byte {error.start}); convert it") from error
        except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            # The last three are what PyYAML raises for a scalar that is not what its tag or its look says.
            raise InputError(f"{path} is not YAML: {one_line(error)}") from error
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
                raise self.refused(f"key {_shown(key)} is unknown; supported are {', '.join(known)}")

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
        return self._once(key, [self._words(key, each) for each in self._list(key, default)])

    def lines(self, key: str) -> Names:
        """A text, a list of texts, or None where there is nothing."""
        if key not in self.values:
            return None
        return self._words(key, self[key]) if isinstance(self[key], str) else self.names(key)

    def one_of(self, key: str, known: Sequence[str], default: str) -> str:
        value = self.get(key, default)
        if value not in known:
            raise self.refused(f"{key} {_shown(value)} is not supported; choose one of {', '.join(known)}")
        return str(value)

    def yes(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(f"{key} {_shown(value)} is neither true nor false")
        return value

    def whole_number(self, key: str, default: int, least: int, most: int = LARGEST_NUMBER) -> int:
        return self._whole(key, self.get(key, default), least, most)

    def whole_numbers(self, key: str, default: Sequence[int]) -> list[int]:
        """From 0 on, none twice."""
        found = [self._whole(key, each, 0, LARGEST_NUMBER) for each in self._list(key, default)]
        return self._once(key, found)

    def number(self, key: str, default: float) -> float:
        """A positive one; `1e-2`, which YAML takes for a text, is read as one."""
        value = self.get(key, default)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not 0 < number < math.inf:
            raise self.refused(f"{key} {_shown(value)} is not a positive number")
        return number

    def _list(self, key: str, default: Sequence[Any] | None) -> Sequence[Any]:
        values = self.values.get(key, default)
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise self.refused(f"{key} {_shown(values)} is not a list with something in it")
        return values

    def _once(self, key: str, values: list[T]) -> list[T]:
        if len(set(values)) < len(values):
            twice = next(each for each, count in Counter(values).items() if count > 1)
            raise self.refused(f"{key} names {_shown(twice)} twice")
        return values

    def _words(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refused(f"{key} {_shown(value)} is not a text; put it in quotes if it is meant to be one")
        if not value:
            raise self.refused(f"{key} has an empty text")
        if not _writable(value):
            raise self.refused(f"{key} holds half of a surrogate pair, which no file can; take the \\u escape out")
        return value

    def _whole(self, key: str, value: Any, least: int, most: int) -> int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= most:
            limits = f"from {least} on" if most == LARGEST_NUMBER else f"between {least} and {most}"
            raise self.refused(f"{key} {_shown(value)} is not a whole number {limits}")
        return int(value)


def _mapping(where: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping) or not found:
        raise InputError(f"{where} is not a list of `key: value` with something in it")
    for key in found:
        if not isinstance(key, str) or not key.isprintable():
            raise InputError(f"{where}: the key {_shown(key)} is not a text in one line; put it in quotes")
    return found


def _shown(value: object) -> str:
    """In a message: short, whatever it holds."""
    return one_line(reprlib.repr(value))


def _writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_depth(events: Iterable[Any]) -> None:
    """Raises `ValueError` while the events of a file still come."""
    depth = 0
    for event in events:
        name = type(event).__name__
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        if depth > LEVELS:
            raise ValueError(f"it is nested more than {LEVELS} levels deep")


def _count(node: Any, known: dict[int, int]) -> int:
    """Values in a node of YAML, as many as they are once aliases are followed.

    Raises `ValueError` for more than `VALUES`, an alias inside what it names, a merge (`<<`), which PyYAML writes out
    in full, and a key that stands twice.
    """
    if id(node) in known:
        if known[id(node)] == 0:
            raise ValueError("an alias stands inside what it names")
        return known[id(node)]
    known[id(node)] = 0  # until it is counted
    if node.id == "mapping":
        keys = [key.value for key, _ in node.value if key.id == "scalar"]
        twice = [key for key, count in Counter(keys).items() if count > 1]
        if twice:
            raise ValueError(f"the key {_shown(twice[0])} stands twice in a section")
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise ValueError("a merge (<<) is not supported; write the keys out")
        below = [part for pair in node.value for part in pair]
    else:
        below = [] if node.id == "scalar" else node.value
    total = 1 + sum(_count(each, known) for each in below)
    if total > VALUES:
        raise ValueError(f"it holds more than {VALUES} values")
    known[id(node)] = total
    return total
