"""A block of your own: LayerNorms, a squared-ReLU MLP without a gate, biases everywhere, two blocks deep.

    python examples/own_block.py

The context is folded into both blocks, layer by layer, for the last two positions of the query at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contextfold.blocks import Parts, UserBlock, fold_blocks, patched
from contextfold.calculus import Expression, Pointwise, Skip, formula

D, F = 24, 40


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


class HomeBlock(nn.Module):
    """x plus one-head causal attention, plus a squared-ReLU MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def forward(self, x: Tensor) -> Tensor:
        v = x + self.attention(self.norm1(x))
        return v + self.down(squared_relu(self.up(self.norm2(v))))


def describe(block: HomeBlock) -> UserBlock:
    """The block's output as stages, from v = what `norm2` is called on."""
    parts = Parts(block)
    mlp: Expression = (
        parts.norm("norm2") >> parts.linear("up") >> Pointwise("relu²", squared_relu) >> parts.linear("down")
    )
    return UserBlock(block, parts.read_by("norm2", "v") >> (Skip() + mlp))


def main(dtype: torch.dtype = torch.float64) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(HomeBlock(), HomeBlock()).to(dtype).eval()
    context, query = torch.randn(1, 9, D, dtype=dtype), torch.randn(1, 5, D, dtype=dtype)
    blocks = [describe(block) for block in model if isinstance(block, HomeBlock)]
    whole = torch.cat([context, query], 1)

    folded = fold_blocks(model, blocks, lambda: model(whole), lambda: model(query), last=2)

    with torch.no_grad():
        wanted, unpatched = model(whole)[0, -2:], model(query)[0, -2:]
        with patched(model, folded.patch):
            met = model(query)[0, -2:]
    silent = float((torch.relu(blocks[0].block.up(torch.randn(99, D, dtype=dtype))) == 0).double().mean())
    print(formula(blocks[0].expression))  # noqa: T201
    for report in folded.blocks:
        print(f"block {report.name}: {' then '.join(report.rules)}; relative error {report.relative_error:.1e}")  # noqa: T201
    figures = {
        "unpatched": float((unpatched - wanted).norm() / wanted.norm()),
        "patched": float((met - wanted).norm() / wanted.norm()),
        "silent": silent,
    }
    print(  # noqa: T201
        f"model without the context, at two positions: relative error {figures['unpatched']:.2f} unpatched, "
        f"{figures['patched']:.1e} patched"
    )
    return figures


if __name__ == "__main__":
    main()
