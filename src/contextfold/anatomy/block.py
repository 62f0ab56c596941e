"""One decoder layer bound to its form: modules and parameters in place of names."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from contextfold.anatomy.proof import TOLERANCE
from contextfold.anatomy.wrapped import in_memory, with_adapters
from contextfold.errors import ProbeFailed
from contextfold.lowrank import PARTS, LowRank, times
from contextfold.patch import Site

__all__ = [
    "AdaptedMap",
    "Block",
    "DenseBlock",
    "ExpertBlock",
    "LinearMap",
    "Norm",
    "OffloadedMap",
    "QuantisedMap",
    "Reading",
    "at_home",
    "first_output",
    "first_tensor",
    "is_plain",
    "rows",
    "stored_shape",
]


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that a module was called on, passed by position or by name."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise ProbeFailed("a module of the block was called without a tensor")


def first_output(output: Any) -> Tensor:
    """The tensor of a module's output: itself, or the first of a tuple."""
    return output if isinstance(output, Tensor) else first_tensor(tuple(output), {})


def at_home(module: nn.Module, value: Tensor) -> Tensor:
    """`value` on the device of `module`: what enters a layer may lie where the layer below gave it."""
    home = next((p.device for p in module.parameters() if p.device.type != "meta"), value.device)
    return value if value.device == home else value.to(home)


def rows(value: Tensor) -> Tensor:
    """`(n, ·)` of the first sequence, from `(1, n, ·)`, or `(n, ·)` where a module flattens its tokens."""
    return value if value.dim() == 2 else value[0]


def is_plain(stored: Tensor | None) -> bool:
    """Whether edits can be written where these weights lie.

    Quantised ones have another dtype, or are no tensor; offloaded ones lie elsewhere until their module is called.
    """
    known = stored is not None and stored.dtype in TOLERANCE and type(stored.data) is Tensor
    return known and stored is not None and stored.device.type != "meta"


def stored_shape(module: nn.Module, parameter: str = "weight") -> tuple[int, ...]:
    """Shape of a parameter; of a quantised weight, that of the map `(out, in)` that it stands for.

    Raises `AttributeError` where there is none.
    """
    stored = module._parameters.get(parameter)
    if parameter == "weight" and (stored is None or stored.dtype not in TOLERANCE or type(stored.data) is not Tensor):
        return (int(module.out_features), int(module.in_features))  # type: ignore[arg-type]
    return tuple(module.get_parameter(parameter).shape)


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map of a block; read in (out, in) order whatever the storage."""

    site: Site
    module: nn.Module

    @property
    def stored(self) -> nn.Parameter:
        """The parameter that edits are written into."""
        return self.module.get_parameter(self.site.parameter)

    @property
    def weight(self) -> Tensor:
        """`W (out, in)`, a view of the stored parameter."""
        return self.site.matrix(self.stored.data)

    @property
    def like(self) -> Tensor:
        """A tensor on the device and of the dtype that the map computes in."""
        return self.weight

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        out, width = self.weight.shape
        return out, width

    @property
    def bias(self) -> Tensor | None:
        """`b (out,)`, or None."""
        bias = self.module._parameters.get("bias")
        return None if bias is None else bias.data

    def exact(self, inputs: Tensor) -> Tensor:
        """`W x + b` for rows `(n, in) -> (n, out)`, in float64 from the stored weights."""
        out = times(self.weight, inputs)
        return out if self.bias is None else out + self.bias.double()

    def after(self, delta: LowRank) -> LowRank:
        """`W delta`, computed in the dtype of the factors."""
        return LowRank(self.weight.to(delta.B.dtype) @ delta.B, delta.A)

    def norm(self, dtype: torch.dtype) -> float:
        """Frobenius norm of W, summed in `dtype`; part by part where that is wider, since torch widens what it sums."""
        W = self.weight
        if W.dtype == dtype:
            return float(torch.linalg.vector_norm(W))
        parts = [torch.linalg.vector_norm(part, dtype=dtype) for part in W.chunk(PARTS)]
        return float(torch.linalg.vector_norm(torch.stack(parts)))


@dataclass(frozen=True, eq=False)
class AdaptedMap(LinearMap):
    """A map with a LoRA adapter beside its weight: it gives `(W + s B A) x + b`, and edits are written into W.

    `module` is the whole, `site` the parameter of the layer inside.
    """

    base: nn.Module
    """The layer inside, which owns the parameter."""

    @property
    def stored(self) -> nn.Parameter:
        return self.base.get_parameter(self.site.parameter)

    @property
    def weight(self) -> Tensor:
        return self.site.matrix(with_adapters(self.module, self.stored.data))

    @property
    def like(self) -> Tensor:
        return self.stored.data

    @property
    def bias(self) -> Tensor | None:
        """What the whole gives for zeros, since an adapter may bring a bias too."""
        zeros = self.like.new_zeros(1, self.weight.shape[1])
        with torch.no_grad():
            given: Tensor = self.module.forward(zeros)[0]
        return given


@dataclass(frozen=True, eq=False)
class OffloadedMap(LinearMap):
    """A map whose weights lie elsewhere until it is called: they are fetched to be read, and cannot be written."""

    beside: Tensor
    """Tells the device and dtype that the map computes in."""

    @property
    def weight(self) -> Tensor:
        # Not copied: it stays valid when the module lets go of it, and a part of a file takes no memory.
        with in_memory(self.module):
            return super().weight

    @property
    def bias(self) -> Tensor | None:
        with in_memory(self.module):
            return super().bias

    @property
    def like(self) -> Tensor:
        return self.beside


@dataclass(frozen=True, eq=False)
class QuantisedMap(LinearMap):
    """A map whose weight is stored in another form, or wrapped: edits act beside it and cannot be written into it.

    W and b are what its module computes from rows of the identity and of zeros; they are not kept. `forward` itself is
    called: no hook is to hear of it, and no edit beside the module to add to it.
    """

    beside: Tensor
    """A parameter of the layer that is not quantised: it tells device and dtype."""

    @property
    def weight(self) -> Tensor:
        return (self._forward(torch.eye(self._width)) - self.bias).T

    @property
    def bias(self) -> Tensor:
        return self._forward(torch.zeros(1, self._width))[0]

    @property
    def like(self) -> Tensor:
        return self.beside

    @property
    def _width(self) -> int:
        return stored_shape(self.module)[1]

    @torch.no_grad()
    def _forward(self, inputs: Tensor) -> Tensor:
        given: Tensor = self.module.forward(inputs.to(self.beside))
        return given


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm with a scale: `N(x) = (offset + w) ⊙ x / sqrt(mean(x²) + eps)`."""

    site: Site
    module: nn.Module
    eps: float
    offset: int

    @property
    def scale(self) -> Tensor:
        """Effective scale `m (d,)`, float64."""
        return self.module.get_parameter(self.site.parameter).data.double() + self.offset

    def unscaled(self, inputs: Tensor) -> Tensor:
        """`x / sqrt(mean(x²) + eps)` for rows `(n, d)`, float64."""
        x = inputs.double()
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps)


@dataclass(frozen=True, eq=False)
class Reading:
    """A tap bound to its module; `factor` is a float64 number `()` or vector `(d,)`."""

    module: nn.Module
    side: Literal["input", "output"]
    factor: Tensor
    calls: int = 1

    def listen(self, receive: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
        """Call `receive` with the value, without the factor, each time that it passes."""
        count = itertools.count()

        def first(value: Tensor) -> None:
            if self.calls == 1 or next(count) % self.calls == 0:
                receive(at_home(self.module, value))

        if self.side == "output":
            return self.module.register_forward_hook(lambda _m, _a, output: first(first_output(output)))
        return self.module.register_forward_pre_hook(
            lambda _m, args, kwargs: first(first_tensor(args, kwargs)), with_kwargs=True
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Block(ABC):
    """One decoder layer: `total = r + alpha · branch`, `y = N_out(total)`, all modules resolved."""

    index: int
    layer: nn.Module
    input_maps: tuple[LinearMap, ...]
    """The maps that read z; of a mixture, those that every token uses. None in a layer without a token-wise branch."""
    residual: tuple[Reading, ...]
    """Add up to r, each times its factor; all of them pass before the output maps run."""
    total: Reading
    """Passes the finished sum, times a factor that comes after it."""
    alpha: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    """Residual multiplier, float64 `()` or `(d,)`."""
    shift: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """A constant part of r, float64 `()` or `(d,)`."""
    norm_pre: nn.Module | None = None
    norm_post: Norm | None = None
    norm_attention: nn.Module | None = None
    norm_outer: nn.Module | None = None
    attention_output: LinearMap | None = None

    @property
    def name(self) -> str:
        return f"layer {self.index}"

    @property
    @abstractmethod
    def output_maps(self) -> tuple[LinearMap, ...]:
        """The maps that give the branch; one, or one per expert."""

    @property
    @abstractmethod
    def maps(self) -> tuple[LinearMap, ...]:
        """Every linear map that a fold may edit, input maps first."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every parameter, or slice of one, that a fold may edit."""
        post = () if self.norm_post is None else (self.norm_post.site,)
        return (*(linear.site for linear in self.maps), *post)

    def wanted_branch(self, total: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """`g = (r' - r) / alpha` `(n, d)`, from what `total` and the residual readings gave, in float64."""
        r = self.shift
        for reading, part in zip(self.residual, parts, strict=True):
            r = r + reading.factor * part.double()
        return (total.double() / self.total.factor - r) / self.alpha

    @property
    @abstractmethod
    def reads_z(self) -> nn.Module | None:
        """A module that is called on z; None when the layer has no token-wise branch."""

    @property
    @abstractmethod
    def anchor(self) -> Tensor:
        """A weight of the branch: it tells device and dtype."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseBlock(Block):
    """A branch of linear maps; without input maps, a mixer that only its output map can correct."""

    output_map: LinearMap

    @property
    def output_maps(self) -> tuple[LinearMap, ...]:
        return (self.output_map,)

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        return (*self.input_maps, self.output_map)

    @property
    def reads_z(self) -> nn.Module | None:
        return self.input_maps[0].module if self.input_maps else None

    @property
    def anchor(self) -> Tensor:
        return self.output_map.like


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertBlock(Block):
    """A mixture of experts. `branch` modules read z; their results add up to the branch."""

    branch: tuple[nn.Module, ...]
    stacked_inputs: tuple[LinearMap, ...]
    """One per routed expert and stacked parameter."""
    outputs: tuple[LinearMap, ...]
    """Output maps, of routed experts as slices and of shared ones."""

    @property
    def output_maps(self) -> tuple[LinearMap, ...]:
        return self.outputs

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        return (*self.input_maps, *self.stacked_inputs, *self.outputs)

    @property
    def reads_z(self) -> nn.Module | None:
        return self.branch[0]

    @property
    def anchor(self) -> Tensor:
        return self.outputs[0].like
