"""How branches join the stream, by anatomy. Families share these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from contextfold.anatomy.record import Factor, Wiring, given_by, read_by

__all__ = ["FFN_GATED", "GATED", "POST_NORM", "PRE_NORM", "SANDWICH", "parallel", "post_ln", "pre_norm", "scaled"]

GATED = ("mlp.gate_proj", "mlp.up_proj")
FFN_GATED = ("feed_forward.gate_proj", "feed_forward.up_proj")

PRE_NORM = Wiring(norm_pre="post_attention_layernorm")
"""A: the norm that is called post_attention_layernorm is the one before the MLP."""

SANDWICH = Wiring(
    norm_pre="pre_feedforward_layernorm",
    norm_post="post_feedforward_layernorm",
    norm_attention="post_attention_layernorm",
)
"""B: norms before and after each sublayer."""

POST_NORM = Wiring(norm_post="post_feedforward_layernorm", norm_attention="post_attention_layernorm")
"""D: norms only after each sublayer, so z is v itself."""


def pre_norm(norm: str) -> Wiring:
    """A, with the norm called `norm`."""
    return Wiring(norm_pre=norm)


def scaled(wiring: Wiring, alpha: Factor) -> Wiring:
    """The same with a residual multiplier."""
    return replace(wiring, alpha=alpha)


def parallel(attention: str, when: Mapping[str, object] | None = None) -> Wiring:
    """C: attention and MLP both read the block's input, and attention runs first."""
    return Wiring(residual=(read_by(""), given_by(attention)), when=when or {})


def post_ln(norm: str, when: Mapping[str, object] | None = None) -> Wiring:
    """E: a norm over the finished sum; z and r are both what the norm of the attention sublayer gave."""
    return Wiring(norm_outer=norm, when=when or {})
