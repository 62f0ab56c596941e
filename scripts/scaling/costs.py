"""Floating point operations and bytes of a fold, a sequence and a bake, from sizes alone.

Letters as in docs/equations.md: L layers, d width, f width of the MLP, V vocabulary; besides q and kv, the widths of
the queries and of the keys (or values), c tokens of context, n of the query, N rows that are solved for. For decoder
blocks with gated MLPs and without a norm after them, in float32, the first token kept. A multiplication and an addition
are two operations, as `torch.utils.flop_counter` counts; `tests/test_scale.py` holds what `counted` says against it.
Where sums fill several tiles the counter also sees products that factor them, which stand under `factorings` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contextfold.bake.tiles import TILE

__all__ = ["Cost", "Shape", "bake", "sequence", "token"]

WORD = 4
"""Bytes of a float32."""

KEPT = 1
"""Tokens that stay in front: the sink."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    L: int
    d: int
    f: int
    q: int
    kv: int
    V: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a configuration of transformers."""
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.num_hidden_layers, config.hidden_size, config.intermediate_size, head * config.num_attention_heads,
            head * config.num_key_value_heads, config.vocab_size,
        )  # fmt: skip

    @property
    def layer(self) -> int:
        """Entries of the maps of one layer: queries, keys, values, attention output; gate, up and down."""
        return self.d * (self.q + 2 * self.kv) + self.q * self.d + 3 * self.d * self.f

    @property
    def maps(self) -> int:
        """Of all layers."""
        return self.L * self.layer

    @property
    def cache(self) -> int:
        """Keys and values of a token, entries in all layers."""
        return 2 * self.L * self.kv

    def forward(self, tokens: int, before: int = 0, logits: int = 1) -> int:
        """Operations of a forward over `tokens` that also look at `before` cached ones; attention counted in full."""
        seen = before + tokens
        return 2 * tokens * self.maps + 4 * tokens * seen * self.q * self.L + 2 * logits * self.V * self.d


@dataclass(frozen=True)
class Cost:
    """Of one call."""

    runs: int
    """Operations of the forwards."""
    solves: int
    """Those of the solves that the counter sees: products, in float64 or float32."""
    factorings: int
    """Of QR, singular values, eigenvectors and Cholesky, which it does not see: leading terms, from textbooks."""
    patch: int
    """Bytes of the factors in float32."""
    layers: int
    """Layers that are passed through, all forwards together: what costs time whatever the sizes are."""

    @property
    def counted(self) -> int:
        return self.runs + self.solves

    @property
    def operations(self) -> int:
        return self.counted + self.factorings


def token(shape: Shape, c: int, n: int) -> Cost:
    """`fold_token`: a run with the context, one without in which every block is solved for one row.

    Per layer the solve multiplies both input maps and the output map by a vector, and handles vectors of length d and f
    a few times.
    """
    d, f, L = shape.d, shape.f, shape.L
    runs = shape.forward(c + n) + shape.forward(KEPT + n, logits=0)
    solves = L * (6 * d * f + 30 * d + 22 * f)
    return Cost(runs, solves, 0, WORD * L * 3 * (d + f), 2 * L)


def sequence(shape: Shape, c: int, n: int) -> Cost:
    """`fold_sequence` at its default sites: N = n + 1 rows, the output map of every layer alone.

    Per layer a product of the map with all rows and one of the factors (4 N d f), and four products of N rows with
    factors of rank N (8 N² (d + f)). A QR of f × N takes 4 N² f operations with its Q, the singular values of what is
    left 20 N³.
    """
    d, f, L, N = shape.d, shape.f, shape.L, n + KEPT
    runs = shape.forward(c + n, logits=n) + shape.forward(KEPT + n, logits=0)
    solves = L * (4 * N * d * f + 8 * N * N * (d + f))
    # For more rows than the map is wide, an edit is kept in as many factors as it is.
    return Cost(runs, solves, L * (4 * N * N * f + 20 * N**3), WORD * L * min(N, d, f) * (d + f), 2 * L)


def bake(
    shape: Shape, c: int, questions: int, tail: int, ranks: Sequence[tuple[int, int]] | None = None, batch: int = 16
) -> Cost:
    """`bake` at two sites: `questions` with their answers of `tail` tokens each, all of them rows of the ridge.

    `ranks`: per layer the ranks of the two edits, of the attention output map and of the MLP output map; None for the
    largest that there can be, N or d. The forwards stop at the last place: no logits of the examples are computed.
    """
    d, L, N = shape.d, shape.L, questions * tail
    ranks = ranks or [(min(N, d, shape.q), min(N, d))] * L
    runs = (
        shape.forward(KEPT + c)
        + questions * shape.forward(tail, KEPT + c, logits=0)
        + questions * shape.forward(KEPT + tail, logits=0)
    )
    solves, factorings, patch = 0, 0, 0
    acting = questions * (tail + KEPT)
    for k, pair in enumerate(ranks):
        for inner, rank, last in ((shape.q, pair[0], False), (shape.f, pair[1], k == L - 1)):
            solves += _ridge(N, inner, d, rank) + (0 if last else 2 * acting * rank * (inner + d))
            factorings += _factorings(N, inner, d)
            patch += WORD * rank * (inner + d)
    forwards = 1 + 2 * -(-questions // batch)
    return Cost(runs, solves, factorings, patch, forwards * L)


def _ridge(N: int, inner: int, d: int, rank: int) -> int:
    """One place: rows without the sink's part, the Gram matrix of the shorter side, the edit and what it explains."""
    found = 4 * N * inner + 2 * rank * rank * (inner + d)
    if inner > N:  # in the span of what is wanted, of dimension k
        k = min(N, d)
        found += 2 * N * N * inner + 4 * N * d * k + 2 * N * N * k + 2 * N * k * k
        return found + 2 * rank * (d * k + k * N + N * inner)
    return found + _gram(N, inner) + 2 * N * inner * d + 2 * inner * d * d + 2 * rank * d * inner


def _gram(N: int, inner: int) -> int:
    """The lower half in tiles; those on the diagonal whole."""
    widths = [min(TILE, inner - start) for start in range(0, inner, TILE)]
    return N * (sum(widths) ** 2 + sum(width * width for width in widths))


def _factorings(N: int, inner: int, d: int) -> int:
    """Cholesky and two triangular solves of d columns; eigenvectors of a symmetric matrix, and the QR of its span."""
    m = min(N, inner)
    k = min(N, d) if inner > N else d
    span = 4 * max(N, d) * k * k if inner > N else 0
    return m**3 // 3 + 2 * m * m * d + 9 * k**3 + span
