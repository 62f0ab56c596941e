"""The tables of docs/scale.md, from docs/measured/scale.json and the formulas."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaling.costs import WORD, Cost, Shape, bake, sequence, token
from scaling.fit import OPERATIONS, Rates, cost_of, fitted, shape_of

__all__ = ["LLAMA_70B", "page", "write_page"]

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "measured" / "scale.json"
DOCUMENT = ROOT / "docs" / "scale.md"
MARKERS = re.compile(r"(<!-- scale ([a-z]+): [^>]*-->\n).*?(<!-- /scale -->)", re.DOTALL)

LLAMA_70B = Shape(L=80, d=8192, f=28672, q=8192, kv=1024, V=128256)
"""Llama 3 70B, as its configuration was published: 64 heads and 8 of keys and values, 128 wide."""

CONTEXT, QUERY, ROWS, QUESTIONS, TAIL = 1000, 32, 256, 30, 48
"""What is asked of the large model: tokens of context, of a query, of a sequence; questions, and tokens of each with
its answer."""

MANY = 300
"""Questions of a larger bake."""

LOW = 16
"""A rank to which a baked patch may be cut."""

LENGTHS = (1000, 10_000, 100_000, 1_000_000)
"""Tokens of context."""

MILLION = 10**6

ROUND = 1e14
"""Operations a second: a round number to divide by, no machine's."""

WRITTEN = 1e9
"""Bytes a second to a disk: the same."""

Row = Mapping[str, Any]


def page() -> str:
    """docs/scale.md with its tables as they should be."""
    found = json.loads(RESULT.read_text())
    rows = found["points"]
    rates = fitted([row for row in rows if row["fitted"]])
    tables: dict[str, Callable[[], str]] = {
        "rates": lambda: _rates(found["machine"], rates),
        "errors": lambda: _errors(rows, rates),
        "points": lambda: _points([row for row in rows if not row["fitted"]], rates),
        "memory": lambda: _memory(rows),
        "large": lambda: _large(rates),
        "long": lambda: _long(),
        "million": lambda: _million(),
    }
    return MARKERS.sub(lambda match: f"{match[1]}{tables[match[2]]()}{match[3]}", DOCUMENT.read_text())


def write_page() -> None:
    DOCUMENT.write_text(page())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def amount(value: float, unit: str) -> str:
    """Two or three digits, in thousands: `3.02 GB`."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def power(value: float) -> str:
    """`1.5e14`, as it is written by hand."""
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def span(seconds: float) -> str:
    """Seconds in the unit that a reader would use."""
    for size, unit in ((365.25 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _rates(machine: Mapping[str, Any], rates: Rates) -> str:
    single, double = machine["float32_flops_per_second"], machine["float64_flops_per_second"]
    rows = [
        ("operations of forwards, float32", amount(rates.run, "op/s"),
         f"{amount(single, 'op/s')}, a square product of 1024"),
        ("operations of solves, most in float64", amount(rates.solve, "op/s"), f"{amount(double, 'op/s')}, the same"),
        ("– of eigenvectors alone, 9 d³", "–", f"{amount(machine['eigenvectors_flops_per_second'], 'op/s')}, d = 2048"),
        ("bytes of weights, read for few rows or written", amount(rates.stream, "B/s"),
         f"{amount(machine['copied_bytes_per_second'], 'B/s')}, a copy that no cache holds"),
        ("a pass through a layer, whatever its size", f"{1000 * rates.layer:.2g} ms", "–"),
    ]  # fmt: skip
    about = f"{machine['processor']}, {machine['threads']} thread, torch {machine['torch']}.\n\n"
    return about + table(("what takes time", "fitted", "measured alone"), rows)


def _errors(rows: Sequence[Row], rates: Rates) -> str:
    cells = []
    for fit, words in ((True, "fitted"), (False, "left out")):
        for operation in OPERATIONS:
            off = [
                rates.seconds(cost_of(row), shape_of(row)) / row["seconds"]
                for row in rows if row["fitted"] is fit and row["operation"] == operation
            ]  # fmt: skip
            far = [max(ratio, 1 / ratio) for ratio in off]
            cells.append((words, operation, str(len(off)), f"{100 * (statistics.median(far) - 1):.0f} %",
                          f"{min(off):.2f} to {max(off):.2f}"))  # fmt: skip
    return table(("points", "operation", "number", "off by, median", "predicted / measured, from and to"), cells)


def _points(rows: Sequence[Row], rates: Rates) -> str:
    cells = []
    for row in rows:
        told = rates.seconds(cost_of(row), shape_of(row))
        asked = row.get("query") or f"{row['questions']} × {row['tail']}"
        cells.append((row["model"], row["operation"], str(row["context"]), str(asked), f"{row['seconds']:.2f}",
                      f"{told:.2f}", f"{told / row['seconds']:.2f}"))  # fmt: skip
    head = ("model", "operation", "context", "query, or questions × tokens", "seconds", "predicted", "ratio")
    return table(head, cells)


def peak(row: Row) -> float:
    """Bytes above the model at the peak, by the formulas of docs/scale.md."""
    shape, patch = shape_of(row), cost_of(row).patch
    match row["operation"]:
        case "token":
            return token_peak(shape, row["context"] + row["query"], patch)
        case "sequence":
            return sequence_peak(shape, row["context"], row["query"], patch)
    return bake_peak(shape, row["questions"] * row["tail"], patch)


def token_peak(shape: Shape, tokens: int, patch: float) -> float:
    """A forward inside one MLP, and one map as it was before it was written."""
    return patch + 16 * tokens * shape.f + WORD * shape.d * shape.f


def sequence_peak(shape: Shape, c: int, n: int, patch: float) -> float:
    """The run with the context inside one MLP, one written map, and one solve."""
    d, f = shape.d, shape.f
    return patch + 16 * (c + n) * f + WORD * d * f + 32 * n * f + 80 * n * d + 16 * n * n


def bake_peak(shape: Shape, N: int, patch: float) -> float:
    """All examples wait at one place: what its map reads, in both runs and widened; Gram matrices, maps."""
    return patch + 56 * N * shape.f + 8 * shape.d * shape.f + 16 * min(N, shape.f) ** 2


def _memory(rows: Sequence[Row]) -> str:
    cells = []
    for operation in OPERATIONS:
        seen = [row for row in rows if row["operation"] == operation and row["peak_bytes"] is not None]
        ratios = [row["peak_bytes"] / peak(row) for row in seen]
        largest = max(row["peak_bytes"] for row in seen)
        cells.append((operation, str(len(seen)), f"{statistics.median(ratios):.2f}",
                      f"{min(ratios):.2f} to {max(ratios):.2f}", amount(largest, "B")))  # fmt: skip
    return table(("call", "points", "measured / formula, median", "from and to", "largest measured"), cells)


def asked() -> dict[str, Cost]:
    """What the large model is asked for, by name."""
    cut = [(LOW, LOW)] * LLAMA_70B.L
    return {
        f"token: c = {CONTEXT}, n = {QUERY}": token(LLAMA_70B, CONTEXT, QUERY),
        f"sequence: c = {CONTEXT}, n = {ROWS}": sequence(LLAMA_70B, CONTEXT, ROWS),
        f"bake: c = {CONTEXT}, {QUESTIONS} × {TAIL} tokens, full rank": bake(LLAMA_70B, CONTEXT, QUESTIONS, TAIL),
        f"the same, cut to rank {LOW}": bake(LLAMA_70B, CONTEXT, QUESTIONS, TAIL, cut),
        f"bake: {MANY} × {TAIL} tokens, full rank": bake(LLAMA_70B, CONTEXT, MANY, TAIL),
    }


def _large(rates: Rates) -> str:
    costs = asked()
    peaks = [
        token_peak(LLAMA_70B, CONTEXT + QUERY, 0), sequence_peak(LLAMA_70B, CONTEXT, ROWS, 0),
        *(bake_peak(LLAMA_70B, questions * TAIL, 0) for questions in (QUESTIONS, QUESTIONS, MANY)),
    ]  # fmt: skip
    cells = []
    for (name, cost), room in zip(costs.items(), peaks, strict=True):
        solving = (cost.solves + cost.factorings) / cost.operations
        cells.append((name, power(cost.operations), f"{100 * solving:.0f} %", span(rates.seconds(cost, LLAMA_70B)),
                      span(cost.operations / ROUND), amount(cost.patch, "B"), amount(room, "B")))  # fmt: skip
    head = ("call", "operations", "of them in solves", "one thread, by the fit", f"at {power(ROUND)} op/s", "patch",
            "besides weights and patch")  # fmt: skip
    return table(head, cells)


def _long() -> str:
    """A token patch behind ever longer contexts."""
    shape, cells = LLAMA_70B, []
    for c in LENGTHS:
        cost = token(shape, c, QUERY)
        looking = 4 * (c + QUERY) ** 2 * shape.q * shape.L
        cells.append((f"{c:,}", power(cost.operations), f"{100 * looking / cost.operations:.0f} %",
                      span(cost.operations / ROUND), amount(token_peak(shape, c + QUERY, 0), "B"),
                      amount(2 * c * shape.cache, "B"), amount(cost.patch, "B")))  # fmt: skip
    head = ("context", "operations", "of them attention", f"at {power(ROUND)} op/s", "besides weights and patch",
            "its keys and values, bfloat16", "patch")  # fmt: skip
    return table(head, cells)


def _million() -> str:
    """Bytes, operations, and what is full first, for so many contexts."""
    shape = LLAMA_70B
    kept: dict[str, tuple[float, float]] = {
        "keep the token ids, fold when asked": (WORD * CONTEXT, 0.0),
        "keep keys and values, bfloat16": (2 * CONTEXT * shape.cache, shape.forward(CONTEXT)),
    }
    kept |= {name: (cost.patch, cost.operations) for name, cost in list(asked().items())[:-1]}
    cells = []
    for name, (size, operations) in kept.items():
        computing, writing = MILLION * operations / ROUND, MILLION * size / WRITTEN
        first = "–" if not operations else "operations" if computing > writing else "disk"
        cells.append((name, amount(size, "B"), amount(MILLION * size, "B"), power(MILLION * operations) if operations
                      else "0", span(computing), span(writing), power(operations / size) if operations else "0",
                      first))  # fmt: skip
    head = ("what is kept", "a context", "a million", "operations", f"at {power(ROUND)} op/s",
            f"written at {amount(WRITTEN, 'B/s')}", "operations a byte", "takes longer")  # fmt: skip
    return table(head, cells)
