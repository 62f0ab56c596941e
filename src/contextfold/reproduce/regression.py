"""In-context linear regression on small models that are trained on the spot, for the papers that study updates there.

A task is `y = w · x` with `w, x ~ N(0, I)`. A model reads tokens `(x_i, y_i)`, then `(x, 0)`, and says y at the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = [
    "Batch",
    "Mixing",
    "Recipe",
    "RegressionBlock",
    "Regressor",
    "Shape",
    "draw",
    "smoothed",
    "trained",
    "untrained",
]

Mixing = Literal["attention", "gru"]


@dataclass(frozen=True)
class Batch:
    """`tokens (B, n + 1, k + 1)`, the query last with 0 for y; `y (B,)` what it asks for; `weights (B, k)`."""

    tokens: Tensor
    y: Tensor
    weights: Tensor


def draw(tasks: int, points: int, inputs: int, generator: torch.Generator) -> Batch:
    """`tasks` tasks with `points` examples each, in `inputs` dimensions."""
    w = torch.randn(tasks, inputs, generator=generator)
    x = torch.randn(tasks, points + 1, inputs, generator=generator)
    y = torch.einsum("bnk,bk->bn", x, w)
    tokens = torch.cat([x, y[..., None]], -1)
    tokens[:, -1, -1] = 0
    return Batch(tokens, y[:, -1], w)


class Attention(nn.Module):
    """Causal softmax attention without positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        given: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return given


class Recurrence(nn.Module):
    """A gated recurrent unit: a mixer that knows of no attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.gru(x)[0]
        return given


MIXERS: dict[str, Callable[[int, int], nn.Module]] = {"attention": Attention, "gru": Recurrence}


@dataclass(frozen=True)
class Shape:
    """Of a model."""

    mixing: Mixing
    layers: int
    width: int
    heads: int
    hidden: int
    """Width of the MLP."""
    inner: int = 1
    """Linear maps of the MLP before its last one."""
    norms: bool = False
    """LayerNorm before mixer and MLP."""
    skip: bool = True
    """Whether the MLP is added to what it reads."""
    embed: bool = True
    """Whether tokens are mapped to the width first, and read out by a map; else the width is that of a token, and the
    answer is the last coordinate."""


class RegressionBlock(nn.Module):
    """`v = x + mixer(norm1(x))`, then `v + mlp(norm2(v))`, or `mlp(norm2(v))` without the skip."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.skip = shape.width, shape.skip
        self.norm1, self.norm2 = (nn.LayerNorm(width) if shape.norms else nn.Identity() for _ in range(2))
        self.mixer = MIXERS[shape.mixing](width, shape.heads)
        self.up = nn.Linear(width, shape.hidden)
        self.middle = nn.ModuleList(nn.Linear(shape.hidden, shape.hidden) for _ in range(shape.inner - 1))
        self.down = nn.Linear(shape.hidden, width)

    def stream(self, x: Tensor) -> Tensor:
        """v, what the MLP's norm reads and what the skip adds."""
        given: Tensor = x + self.mixer(self.norm1(x))
        return given

    def mlp(self, v: Tensor) -> Tensor:
        h = nn.functional.gelu(self.up(self.norm2(v)))
        for linear in self.middle:
            h = nn.functional.gelu(linear(h))
        given: Tensor = self.down(h)
        return given

    def forward(self, x: Tensor) -> Tensor:
        v = self.stream(x)
        return v + self.mlp(v) if self.skip else self.mlp(v)


class Regressor(nn.Module):
    """Tokens `(B, n + 1, k + 1)` to the last block's output `(B, n + 1, width)`; `answer` reads y off it."""

    def __init__(self, shape: Shape, inputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs + 1, shape.width) if shape.embed else nn.Identity()
        self.blocks = nn.ModuleList(RegressionBlock(shape) for _ in range(shape.layers))
        self.read = nn.Linear(shape.width, 1) if shape.embed else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        given: Tensor = x
        return given

    def answer(self, output: Tensor) -> Tensor:
        """`(..., width) -> (...)`."""
        read: Tensor = output[..., -1] if self.read is None else self.read(output)[..., 0]
        return read


@dataclass(frozen=True)
class Recipe:
    """How a model is trained."""

    steps: int
    tasks: int
    rate: float
    points: int
    inputs: int
    fresh: bool = True
    """Whether tasks are drawn anew for every step, or once."""


def untrained(shape: Shape, inputs: int, seed: int) -> Regressor:
    """A model as it is before training."""
    torch.manual_seed(seed)
    return Regressor(shape, inputs).requires_grad_(False).eval()


def trained(
    shape: Shape, recipe: Recipe, seed: int, advance: Callable[[], None] = lambda: None
) -> tuple[Regressor, list[float]]:
    """A model after `recipe.steps` of Adam on the squared error at the query, and its losses. Deterministic.

    The rate rises over the first tenth and falls along a cosine. Gradients are clipped to length 1.
    """
    model = untrained(shape, recipe.inputs, seed).requires_grad_(True).train()
    generator = torch.Generator().manual_seed(seed + 1)
    batch = draw(recipe.tasks, recipe.points, recipe.inputs, generator)
    optimiser = torch.optim.Adam(model.parameters(), lr=recipe.rate)
    warm = max(recipe.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda k: min((k + 1) / warm, 1.0) * 0.5 * (1 + math.cos(math.pi * min(k / recipe.steps, 1.0))),
    )
    losses: list[float] = []
    with torch.enable_grad():
        for _ in range(recipe.steps):
            if recipe.fresh and losses:
                batch = draw(recipe.tasks, recipe.points, recipe.inputs, generator)
            loss = (model.answer(model(batch.tokens)[:, -1]) - batch.y).square().mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            losses.append(float(loss.detach()))
            advance()
    return model.requires_grad_(False).eval(), losses


def smoothed(values: Sequence[float], over: int) -> float:
    """Mean of the last `over`."""
    last = values[-over:]
    return sum(last) / len(last)
