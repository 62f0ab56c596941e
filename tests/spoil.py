"""Files as an enemy, a bad disk or a hurried editor would leave them: mutations of texts, of JSON and of safetensors.

Every function takes its choices from `rng`, so that hypothesis can shrink what it found, and a campaign can repeat it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

__all__ = [
    "EVIL",
    "bytes_of",
    "flipped",
    "parts_of",
    "spoiled_bytes",
    "spoiled_json",
    "spoiled_tensors",
    "spoiled_value",
]

NAN, INFINITY = float("nan"), float("inf")

DEEP = 3000
"""Levels of nesting: more than Python follows."""

NAMES = (
    "", ".", "..", "../../evil", "/tmp/evil", "~", "~nobody/x", "a\0b", "\ud800", "\u202e", "\x1b[31m", "a\nb", "é",
    "x" * 300, "lm_head", "model.layers.0", "model.layers.0..mlp", "__class__", "{0.__class__}", "$\\frac$", "<b>",
)  # fmt: skip
NUMBERS = (
    -1, 0, 1, 2, 99, 2**31, 2**63, -(2**63), 2**64, 10**300, 10**400, 0.5, -0.0, 1e300, float("nan"), float("inf"),
    float("-inf"),
)  # fmt: skip
EVIL: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, *NAMES, *NUMBERS)
"""Values that a field is not meant to have."""


def flipped(data: bytes, rng: Random) -> bytes:
    """With a few bits changed."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if found:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def spoiled_bytes(data: bytes, rng: Random) -> bytes:
    """Truncated, with flipped bits, a stretch repeated, taken out or overwritten, or of something else entirely."""
    at = rng.randrange(len(data) + 1)
    size = rng.choice((1, 2, 8, 64, 1024))
    junk = bytes(rng.randrange(256) for _ in range(min(size, 64)))
    return rng.choice(
        (
            lambda: data[:at],
            lambda: flipped(data, rng),
            lambda: data[:at] + data[at : at + size] + data[at:],
            lambda: data[:at] + data[at + size :],
            lambda: data[:at] + junk + data[at + size :],
            lambda: data + junk,
            lambda: rng.choice((b"", b"\0", b"\xff\xfe", b"\x80\x04K\x01.", b"PK\x03\x04", b"{}", b"null", junk)),
        )
    )()


def spoiled_value(value: Any, rng: Random) -> Any:
    """A copy with one place changed: another value there, nothing, one more, or the whole in a list."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        rest = {name: each for name, each in value.items() if name != key}
        what = rng.random()
        if what < 0.1:
            return rest
        if what < 0.2:
            return {**value, rng.choice(NAMES): rng.choice(EVIL)}
        if what < 0.25:
            return {**rest, rng.choice(NAMES): value[key]}
        return {**value, key: spoiled_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        what = rng.random()
        if what < 0.1:
            return value[:at] + value[at + 1 :]
        if what < 0.2:
            return [*value, value[at]]
        return [*value[:at], spoiled_value(value[at], rng), *value[at + 1 :]]
    return rng.choice((rng.choice(EVIL), rng.choice(EVIL), [value], {"x": value}, str(value)))


def spoiled_json(value: Any, rng: Random) -> str:
    """JSON of a value with a place or two changed, or a text that is nearly JSON."""
    for _ in range(rng.randint(1, 2)):
        value = spoiled_value(value, rng)
    text = json.dumps(value)
    what = rng.random()
    if what < 0.7 or len(text) < 2:
        return text
    at = rng.randrange(len(text))
    keys = [i for i, c in enumerate(text) if c == "{"]
    inside = (rng.choice(keys) + 1) if keys else at
    return rng.choice(
        (
            text[:at], text[:inside] + '"layer": 1, "layer": 2, ' + text[inside:], "[" * DEEP, '{"a":' * DEEP,
            text[:at] + "[" * DEEP + "]" * DEEP + text[at:], text.replace("0", "9" * 5000, 1),
            text.replace("1", "1e999", 1), text[:at] + "\0" + text[at:], text.replace('"', "'"), "",
        )
    )  # fmt: skip


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its tensors."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def bytes_of(header: Any, tensors: bytes, size: int | None = None) -> bytes:
    """A safetensors file; `size` is the length of the header that it claims."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", (len(text) if size is None else size) % 2**64) + text + tensors


def spoiled_tensors(data: bytes, rng: Random, texts: tuple[str, ...] = ()) -> bytes:
    """A safetensors file that lies: about its header's length, about shapes, dtypes and offsets, or in the metadata
    `texts`, which hold JSON."""
    header, tensors = parts_of(data)
    names = [name for name in header if name != "__metadata__"]
    if not names or rng.random() < 0.2:
        return spoiled_bytes(data, rng)
    name = rng.choice(names)
    lies: list[Callable[[], bytes]] = [
        lambda: bytes_of(header, tensors, rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(data), len(data) - 8))),
        lambda: bytes_of({**header, name: _lying(header[name], len(tensors), rng)}, tensors),
        lambda: bytes_of({**header, rng.choice(NAMES): header[name]}, tensors),
        lambda: bytes_of({k: v for k, v in header.items() if k != name}, tensors),
        lambda: bytes_of(spoiled_json(header, rng).encode(errors="surrogatepass"), tensors),
        lambda: bytes_of(header, tensors[: rng.randrange(len(tensors) + 1)]),
        lambda: bytes_of(header, _hostile_numbers(tensors, rng)),
    ]
    if texts and rng.random() < 0.5:
        key = rng.choice(texts)
        told = header["__metadata__"]
        text = spoiled_json(json.loads(told[key]), rng) if told[key][:1] in ("{", "[") else rng.choice(NAMES)
        return bytes_of({**header, "__metadata__": {**told, key: text}}, tensors)
    return rng.choice(lies)()


def _lying(entry: dict[str, Any], whole: int, rng: Random) -> dict[str, Any]:
    start, stop = entry["data_offsets"]
    dtype = rng.choice(("F64", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F4", "I8", "U64", "BOOL", "C64", "X", ""))
    shape = rng.choice(([], [0], [2**40, 0], [0, 2**62], [2**63], [-1], [2**32, 2**32], [1] * 64, entry["shape"][::-1]))
    offsets = rng.choice(([0, 0], [0, stop], [start, whole + 8], [stop, start], [2**63, 2**63 + 8], [start, 2**64 - 1]))
    changes = rng.choice(({"dtype": dtype}, {"shape": shape}, {"data_offsets": offsets},
                          {"shape": shape, "data_offsets": [0, 0]}, {"dtype": dtype, "shape": shape}))  # fmt: skip
    return {**entry, **changes}


def _hostile_numbers(tensors: bytes, rng: Random) -> bytes:
    """Some entries overwritten: NaN, infinity, the largest and the smallest of float64 and float32."""
    found = bytearray(tensors)
    for _ in range(rng.randint(1, 3)):
        form, value = rng.choice(
            (*(("<d", x) for x in (NAN, INFINITY, 1e308, -1e308, 5e-324)), *(("<f", x) for x in (NAN, INFINITY, 3e38)))
        )
        part = struct.pack(form, value)
        at = rng.randrange(max(len(found) // 8, 1)) * 8
        found[at : at + len(part)] = part[: max(len(found) - at, 0)]
    return bytes(found)
