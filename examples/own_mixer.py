"""Contextual layers that are not attention: a linear-attention recurrence and a recurrent network.

    python examples/own_mixer.py

The theory asks only for *some* layer that gives another value at x when a context stands before it. What mixes the
tokens is never looked into: the description starts from what the mixer gives.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contextfold.blocks import Parts, UserBlock, fold_blocks, patched
from contextfold.calculus import Pointwise, Skip, formula

D, F = 16, 32


class LinearAttention(nn.Module):
    """A decaying state `S ← 0.9 S + v kᵀ`, read by q: a linear attention, or a simple state-space model."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        S = torch.zeros(x.shape[0], D, D, dtype=x.dtype)
        out = []
        for t in range(x.shape[1]):
            S = 0.9 * S + v[:, t, :, None] * k[:, t, None, :]
            out.append(torch.einsum("bij,bj->bi", S, q[:, t]))
        return torch.stack(out, 1)


class MixerBlock(nn.Module):
    """`v = x + mixer(x)`, then a gated branch through a norm with a scale (as Gemma has it)."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.pre, self.post = LinearAttention(), nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.gate, self.up, self.down = nn.Linear(D, F), nn.Linear(D, F), nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        v = x + self.mixer(x)
        z = self.pre(v)
        return v + self.post(self.down(torch.sigmoid(self.gate(z)) * self.up(z)))


class RecurrentBlock(nn.Module):
    """The contextual block of the first paper: a layer W applied to what a GRU gives, with nothing beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.first, self.second = nn.GRU(D, D, batch_first=True), nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.gru(x)[0])))


def describe_mixer(block: MixerBlock) -> UserBlock:
    parts = Parts(block)
    gated = (parts.linear("gate") >> Pointwise("sigmoid", torch.sigmoid)) * parts.linear("up")
    branch = parts.norm("pre") >> gated >> parts.linear("down") >> parts.norm("post")
    return UserBlock(block, parts.read_by("pre", "v") >> (Skip() + branch))


def describe_recurrent(block: RecurrentBlock) -> UserBlock:
    parts = Parts(block)
    expression = parts.given_by("gru", "a") >> parts.linear("first") >> Pointwise("tanh", torch.tanh)
    return UserBlock(block, expression >> parts.linear("second"))


def main(dtype: torch.dtype = torch.float64) -> dict[str, float]:
    figures = {}
    for name, block, describe in (
        ("linear attention", MixerBlock(), describe_mixer),
        ("GRU", RecurrentBlock(), describe_recurrent),
    ):
        torch.manual_seed(1)
        for p in block.parameters():
            p.data = 0.4 * torch.randn(p.shape) + float(p.dim() == 1)
        block.to(dtype).eval()
        context, query = torch.randn(1, 7, D, dtype=dtype), torch.randn(1, 3, D, dtype=dtype)
        figures[name] = fold(name, block, describe(block), context, query)  # type: ignore[operator]
    return figures


def fold(name: str, block: nn.Module, described: UserBlock, context: Tensor, query: Tensor) -> float:
    """Fold, apply, and say how far the block without the context is from the one with it."""
    whole = torch.cat([context, query], 1)
    folded = fold_blocks(block, [described], lambda: block(whole), lambda: block(query))
    with torch.no_grad():
        wanted, before = block(whole)[0, -1], block(query)[0, -1]
        with patched(block, folded.patch):
            after = block(query)[0, -1]
    gap, met = (float((y - wanted).norm() / wanted.norm()) for y in (before, after))
    print(f"{name}: {formula(described.expression)}")  # noqa: T201
    print(f"  {' then '.join(folded.blocks[0].rules)}: relative error {gap:.2f} unpatched, {met:.1e} patched")  # noqa: T201
    return met


if __name__ == "__main__":
    main()
