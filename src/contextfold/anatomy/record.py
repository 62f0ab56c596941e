"""Where the letters of the equation sheet live in one decoder layer: records, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Family", "Sites"]


@dataclass(frozen=True)
class Sites:
    """Dotted names inside one decoder layer, for `y = v + alpha · g_out(f(z))`, `z = norm_pre(v)`."""

    input_maps: tuple[str, ...]
    """The linear maps that read z (gate and up, or one)."""
    output_map: str
    """The linear map that reads h."""
    attention_output: str
    """The linear map that reads the concatenated heads."""
    norm_pre: str
    """The norm that reads v and gives z."""
    norm_post: str | None = None
    """The norm over the output map's result, whose scale is m."""
    norm_attention: str | None = None
    """The norm over the attention output, if there is one."""


@dataclass(frozen=True)
class Family:
    """One architecture: which models it covers and where its letters live. Always proven at binding."""

    name: str
    model_types: tuple[str, ...]
    """Values of `config.model_type`."""
    layers: str
    """Dotted path of the list of decoder layers."""
    sites: Sites
    norm_eps: str
    """Attribute of a norm that holds its eps."""
    quirks: str
    """What a reader should know, in words."""
