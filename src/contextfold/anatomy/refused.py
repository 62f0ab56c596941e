"""Model types that cannot be folded, each with its true reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["REFUSED"]

_NO_BRANCH = (
    "the channel mix of an RWKV layer reads the previous token as well and gates its result, so it is not a token-wise "
    "branch; fold a model whose MLP reads one token at a time"
)
_MIXED_AFTER = (
    "a short convolution mixes tokens after the MLP, so a change of the branch at one position also moves later ones; "
    "fold a model whose MLP result joins the stream as it is"
)
_STREAMS = (
    "a layer carries several residual streams ({}); an MLP writes one vector per layer and cannot absorb the change "
    "that the context makes in all of them"
)
_REUSED = (
    "one attention and MLP block is run at several depths with the same weights, and its result enters a mixer instead "
    "of the stream; one edit cannot serve several depths"
)
_DRAFTER = "it is a drafter that reads the keys and values of another model; fold the model that it drafts for"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "rwkv": _NO_BRANCH,
        "inkling_text": _MIXED_AFTER,
        "inkling2_text": _MIXED_AFTER,
        "inkling2_loop_text": _MIXED_AFTER,
        "gemma3n": _STREAMS.format("AltUp"),
        "gemma3n_text": _STREAMS.format("AltUp"),
        "deepseek_v4": _STREAMS.format("hyper-connections"),
        "hy_v4": _STREAMS.format("hyper-connections"),
        "qwen4_exp": _STREAMS.format("hyper-connections"),
        "qwen4_exp_text": _STREAMS.format("hyper-connections"),
        "zamba": _REUSED,
        "zamba2": _REUSED,
        "hrm_text": (
            "each layer runs several times per forward with the same weights; one edit cannot serve several depths"
        ),
        "dory": (
            "each layer runs twice per forward with the same weights, on a stream that is normalised after every sum; "
            "one edit cannot serve both depths"
        ),
        "xlm": "its layers have no module of their own, so a layer's output cannot be read while the model runs",
        "xlnet": "its layers run sequence-first on two streams, a layout that the hooks do not follow",
        "reformer": "its reversible layers carry two streams, and its hashed attention is random between runs",
        "prophetnet": "its decoder predicts several tokens ahead with side streams that share every layer's weights",
        "blt": "it groups bytes into patches and runs three stacks, so one token is not one position of every layer",
        "gemma4_assistant": _DRAFTER,
        "gemma4_unified_assistant": _DRAFTER,
    }
)
