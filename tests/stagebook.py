"""Random blocks for the tests of the calculus: an ordinary torch forward beside its description as stages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from contextfold.blocks import Parts, UserBlock
from contextfold.calculus import Bias, Expression, Multiplier, Normalise, Pointwise, Product, Scale, Skip, Sum

WIDTH = 6
ACTIVATIONS = {"tanh": torch.tanh, "silu": torch.nn.functional.silu, "relu": torch.relu}


@dataclass(frozen=True)
class Node:
    """A tree of operations; `kind` names the operation, `children` are side by side or one after the other."""

    kind: str
    children: tuple[Node, ...] = ()


LEAVES = st.sampled_from(
    ["linear", "plain", "up down", "bias", "scale", "rms", "scaled rms", "layer norm", "tanh", "silu", "relu", "half"]
)


def trees() -> st.SearchStrategy[Node]:
    leaf = LEAVES.map(Node)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda c: Node("chain", tuple(c))),
            st.lists(inner, min_size=2, max_size=2).map(lambda c: Node("sum", tuple(c))),
            st.lists(inner, min_size=2, max_size=2).map(lambda c: Node("product", tuple(c))),
        ),
        max_leaves=5,
    )


class Mean(nn.Module):
    """A contextual layer: every position gets a mixture of itself and the mean of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.mix(torch.tanh(x).cumsum(1) / steps) + 0.1 * x


class Operation(nn.Module):
    """One node, run by plain torch."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.inner = nn.ModuleList(Operation(child) for child in node.children)
        match node.kind:
            case "linear":
                self.map = nn.Linear(WIDTH, WIDTH)
            case "plain":
                self.map = nn.Linear(WIDTH, WIDTH, bias=False)
            case "up down":
                self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)
            case "bias":
                self.bias = nn.Parameter(torch.zeros(WIDTH))
            case "scale":
                self.weight = nn.Parameter(torch.ones(WIDTH))
            case "scaled rms":
                self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
            case "layer norm":
                self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        match self.node.kind:
            case "chain":
                for part in self.inner:
                    x = part(x)
                return x
            case "sum":
                return self.inner[0](x) + self.inner[1](x)
            case "product":
                return self.inner[0](x) * self.inner[1](x)
            case "linear" | "plain":
                return self.map(x)
            case "up down":
                return self.down(torch.tanh(self.up(x)))
            case "bias":
                return x + self.bias
            case "scale":
                return x * self.weight
            case "rms":
                return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
            case "scaled rms" | "layer norm":
                return self.norm(x)
            case "half":
                return 0.5 * x
            case kind:
                return ACTIVATIONS[kind](x)

    def stages(self, parts: Parts, name: str) -> Expression:
        match self.node.kind:
            case "chain" | "sum" | "product":
                inner = [part.stages(parts, f"{name}.inner.{i}") for i, part in enumerate(self.inner)]
                if self.node.kind == "chain":
                    whole = inner[0]
                    for part in inner[1:]:
                        whole = whole >> part
                    return whole
                return (Sum if self.node.kind == "sum" else Product).of(*inner)
            case "linear" | "plain":
                return parts.linear(f"{name}.map")
            case "up down":
                return parts.linear(f"{name}.up") >> Pointwise("tanh", torch.tanh) >> parts.linear(f"{name}.down")
            case "bias":
                return Bias(name, WIDTH)
            case "scale":
                return Scale(name, WIDTH)
            case "rms":
                return Normalise(1e-5)
            case "scaled rms" | "layer norm":
                return parts.norm(f"{name}.norm")
            case "half":
                return Multiplier(0.5)
            case kind:
                return Pointwise(kind, ACTIVATIONS[kind])


@dataclass(eq=False)
class Case:
    """A block `y = v + f(v)` or `y = f(v)`, v from a contextual layer; tokens with and without the context."""

    block: nn.Module
    described: UserBlock
    context: Tensor
    query: Tensor
    parameters: list[Tensor] = field(default_factory=list)

    def with_context(self) -> Tensor:
        return self.block(torch.cat([self.context, self.query])[None])

    def without(self) -> Tensor:
        return self.block(self.query[None])


class Block(nn.Module):
    def __init__(self, node: Node, skip: bool) -> None:
        super().__init__()
        self.mean, self.f, self.skip = Mean(), Operation(node), skip

    def forward(self, x: Tensor) -> Tensor:
        v = self.mean(x)
        return v + self.f(v) if self.skip else self.f(v)


def case(node: Node, skip: bool, seed: int, queries: int = 4) -> Case:
    """A random block of this form in float64, every parameter disturbed."""
    generator = torch.Generator().manual_seed(seed)
    block = Block(node, skip).double().eval()
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(float(p.dim() == 1) + 0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
            p.requires_grad_(False)
    parts = Parts(block)
    f = block.f.stages(parts, "f")
    expression = parts.given_by("mean", "v") >> (Skip() + f if skip else f)
    context, query = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (5, queries))
    return Case(block, UserBlock(block, expression), context, query, list(block.f.parameters()))
