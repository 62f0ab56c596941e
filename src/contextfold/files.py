"""Files that are there whole or not at all, files that others wrote, and folders of finished work in JSON."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from safetensors import SafetensorError

from contextfold.errors import InputError, NotWritten
from contextfold.scratch import flush, hidden_file, sweep

__all__ = ["Kept", "expanded", "parsed_json", "plain", "read_regular", "read_whole", "replacing", "write_json"]

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""One by its number, or as it is; two that belong together are a character."""

CHUNK = 2**20
"""Bytes read at once."""


def read_whole(path: Path, limit: int) -> bytes:
    """All of a file of at most `limit` bytes; a device or a pipe that never ends is read no further than that.

    Raises `OSError` where it cannot be opened, also under a name that no file can have, and `InputError` for a longer
    one.
    """
    parts, size = [], 0
    try:
        with path.open("rb") as file:
            while size <= limit and (part := file.read(min(CHUNK, limit + 1 - size))):
                parts.append(part)
                size += len(part)
    except ValueError as error:  # NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file is called so") from error
    if size > limit:
        raise InputError(f"{path} has more than {limit} bytes, the most that is read here; give a smaller file")
    return b"".join(parts)


def read_regular(path: Path, limit: int) -> bytes:
    """As `read_whole`, of what is a file: a pipe in a folder would be waited for until somebody writes to it.

    Raises as `read_whole`, and `OSError` for what is no file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is no file")
    return read_whole(path, limit)


@overload
def plain(found: Mapping[str, object]) -> dict[str, Any]: ...
@overload
def plain(found: Any) -> Any: ...
def plain(found: Any) -> Any:
    """Plain data as JSON can hold it: null for a number that is infinite or none."""
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, Mapping):
        return {name: plain(value) for name, value in found.items()}
    return [plain(value) for value in found] if isinstance(found, list | tuple) else found


def expanded(name: str) -> Path:
    """`~` as the home folder; a name as it stands where nobody is called so."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def parsed_json(text: str) -> Any:
    """JSON as others wrote it. Raises `ValueError`, also for NaN and infinities, a key that stands twice in an object,
    lists in lists that are deeper than Python follows, and half of a surrogate pair, which no file can hold."""
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
        if SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half of a surrogate pair") from error
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


@contextmanager
def replacing(path: Path, advice: str) -> Iterator[Path]:
    """A file beside `path` to be written in the `with`; it takes the place of `path` when all went well.

    Also after a power cut the old content is there or the new one: the new one reaches the disk before its name does.
    Raises `NotWritten` with `advice` when it cannot be written.
    """
    try:
        sweep(path.parent, path.name)
        with hidden_file(path) as part:
            yield part
            flush(part)
            os.replace(part, path)
            flush(path.parent)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise NotWritten(f"cannot write {path}: {why}; {advice}") from error


COLUMN = re.compile(r'\[\n[^\[\]{}"]*\]')
"""A list in JSON that holds neither texts nor other lists; it begins a line, which nothing inside a text does."""


def write_json(path: Path, payload: Mapping[str, Any], advice: str = "choose another place") -> None:
    """JSON that a person can read: columns of numbers stay on one line each; null for what is no finite number.

    Raises as `replacing` does.
    """
    text = json.dumps(plain(payload), indent=1, ensure_ascii=False, allow_nan=False)
    with replacing(path, advice) as part:
        part.write_text(COLUMN.sub(lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Kept:
    """A folder with one JSON file per finished piece of work, under the key of all that the piece depends on.

    Raises `InputError` where nothing can be kept.
    """

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot keep work in {self.folder}: {error.strerror}; choose another --work") from error

    def get(self, name: str, key: str) -> dict[str, Any] | None:
        """What was kept under this key; a damaged file, or one of other work, is no help."""
        try:
            found = parsed_json(self._path(name, key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.pop("key", None) != key:
            return None
        return found if found.pop("digest", None) == _digest(found) else None

    def put(self, name: str, key: str, entry: Mapping[str, Any]) -> None:
        """The file is there whole, or not at all. Raises `NotWritten` when it cannot be written."""
        with suppress(OSError):  # said below, where it fails again
            self.folder.mkdir(parents=True, exist_ok=True)  # gone when another process cleared it
        found = plain(entry)
        write_json(self._path(name, key), {"key": key, "digest": _digest(found), **found}, "choose another --work")

    def _path(self, name: str, key: str) -> Path:
        return self.folder / f"{name}-{key[:16]}.json"


def _digest(entry: Mapping[str, Any]) -> str:
    """SHA-256 of the same entry in one form: a digit that a disk has changed would look like a result."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
