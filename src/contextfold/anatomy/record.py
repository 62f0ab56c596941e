"""Where the letters of the equation sheet live in one decoder layer: records, as data.

`y = N_out( r + alpha · g_out(h) )`, `h = f(z)`. A record says, in dotted names inside the layer, which maps read z,
which give the branch, and how the branch joins the stream; `bind` finds them and proves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Dense", "Experts", "Factor", "Family", "Mixer", "Sites", "Tap", "Wiring", "given_by", "read_by"]

Factor = float | str | Callable[[Any], Any] | Mapping[int, float]
"""A multiplier: a number, the dotted name of the attribute, parameter or buffer of the layer that holds it, how to
compute it from the layer, or one number per index of a layer where it depends on the depth."""


@dataclass(frozen=True)
class Tap:
    """Where a value can be read while a forward runs, times `factor`."""

    module: str
    """Dotted name inside the layer; empty for the layer itself."""
    side: Literal["input", "output"]
    factor: Factor = 1.0
    calls: int = 1
    """How often the module runs in one forward; the value is that of the first call."""


def read_by(module: str, factor: Factor = 1.0) -> Tap:
    """What `module` is called on."""
    return Tap(module, "input", factor)


def given_by(module: str, factor: Factor = 1.0) -> Tap:
    """What `module` gives back (the first tensor of a tuple)."""
    return Tap(module, "output", factor)


@dataclass(frozen=True)
class Wiring:
    """How a branch joins the stream. Everything but the defaults is named."""

    norm_pre: str | None = None
    """The norm that reads v and gives z; None when z is v itself, or when attention reads the same norm."""
    norm_post: str | None = None
    """The norm over the branch, whose scale is m."""
    norm_attention: str | None = None
    """The norm over the attention output, before it joins the stream."""
    norm_outer: str | None = None
    """N_out, the norm over the finished sum."""
    attention_output: str | None = None
    """The linear map that reads the concatenated heads, in layers that have one."""
    residual: tuple[Tap, ...] = ()
    """Values that add up to r. Empty: what `norm_pre` reads, or lacking one, what the branch reads."""
    total: Tap | None = None
    """Where the finished sum can be read, times a factor that comes after it. None: what N_out reads, or else the
    layer's output."""
    alpha: Factor = 1.0
    """Residual multiplier."""
    shift: tuple[tuple[str, ...], ...] = ()
    """A constant that joins the sum besides, as the sum of the products of these vectors of the layer."""
    when: Mapping[str, object] = field(default_factory=dict)
    """Configuration attributes under which this wiring holds."""


@dataclass(frozen=True)
class Dense:
    """One branch of linear maps."""

    input_maps: tuple[str, ...]
    """The linear maps that read z (gate and up, or one)."""
    output_map: str
    """The linear map that reads h."""
    wiring: Wiring


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: routed ones as slices of stacked parameters, shared ones and routers as maps."""

    branch: tuple[str, ...]
    """The modules that read z and whose results add up to the branch."""
    input_maps: tuple[str, ...]
    """Maps that read z besides the routed experts: routers, gates, input maps of shared experts."""
    stacked_inputs: tuple[str, ...]
    """Parameters that hold the input maps of all routed experts."""
    outputs: tuple[str, ...]
    """Parameters that hold output maps: stacked ones, and those of shared experts."""
    wiring: Wiring
    transposed: bool = False
    """Stacked parameters are stored (in, out)."""
    output_transposed: bool | None = None
    """The same for stacked outputs, where they differ from the inputs."""
    packed: str | None = None
    """Attribute with the number of experts, where they are packed into one matrix of stacked rows."""


@dataclass(frozen=True)
class Mixer:
    """A layer without a token-wise branch: its mixer's own output map carries the whole edit."""

    output_map: str
    wiring: Wiring


Sites = Dense | Experts | Mixer


@dataclass(frozen=True)
class Family:
    """One architecture: which models it covers and where its letters live. Always proven at binding."""

    name: str
    model_types: tuple[str, ...]
    """Values of `config.model_type`."""
    layers: str
    """Dotted path of the list of decoder layers."""
    sites: tuple[Sites, ...]
    """Kinds of layer that the family mixes: each layer takes the first whose names it has and whose conditions the
    configuration meets."""
    quirks: str = ""
    """What a reader should know, in words."""
    idle: str | None = None
    """Submodule that marks layers which text alone never runs; they are left out."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Smallest example configuration, beyond the common one of the tests."""
