"""A tiny random model for every registered causal language model type, perturbed so that nothing is trivial.

At initialisation scales are 1 and biases 0, and whole classes of mistakes are invisible. Here every parameter and
every multiplier that a layer keeps in a buffer is moved.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zoo_configs import tiny_config

__all__ = ["MODEL_TYPES", "TWELVE", "build"]

MODEL_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every registered type, buildable or not."""

TWELVE = (
    "llama", "gpt2", "gemma3_text", "gemma4_text", "olmo2", "gpt_neox", "granite", "bart", "qwen2_moe", "gpt_oss",
    "deepseek_v3", "qwen3_next",
)  # fmt: skip
"""Types that together take every code path: transposed maps and biases, a norm of 1 + w after the MLP, one of w with
per-layer inputs and shared K/V, z = v, a parallel block, a multiplier, an outer norm, experts with shared and gated
experts, transposed experts with biases, a dense first layer, a recurrent mixer."""

LIMIT = 40_000_000
"""Parameters: a configuration that missed a size is refused before memory is spent on it."""

STIR = 0.25
"""How far, relative to its own scale, a vector parameter is moved."""


def build(
    model_type: str,
    dtype: torch.dtype = torch.float64,
    attention: str = "eager",
    experts: str | None = None,
    seed: int = 0,
    **overrides: Any,
) -> nn.Module:
    """A tiny `model_type` in evaluation mode. `attention`: `eager` or `sdpa`; `experts`: `eager`, `batched_mm`, ...

    Experts run eagerly unless told otherwise, since the default refuses float64 on CPU.
    """
    config = tiny_config(model_type, **overrides)
    config._attn_implementation = attention
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}]
    for part in [config, *(p for p in parts if p is not None)]:
        part._experts_implementation = experts or "eager"
    kind = _class(model_type, config)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    if size > LIMIT:
        raise MemoryError(f"tiny {model_type} has {size} parameters; one of its sizes is not set")
    torch.manual_seed(seed)
    model = kind(config).to(dtype).eval()
    _stir(model, seed)
    return model


def _class(model_type: str, config: Any) -> Any:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    name = name if isinstance(name, str) else name[0]
    found = getattr(transformers, name, None)
    return found if found is not None else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


DYNAMICS = ("A_log", "dt_bias", "conv1d", "dt_proj", "rg_lru", "time_")
"""Parameters of recurrences, which explode or die when moved freely."""

BUFFERS = ("layer_scalar", "expert_bias", "e_score_correction_bias")
"""Buffers that enter the mathematics with a trivial initial value."""


@torch.no_grad()
def _stir(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)

    for name, parameter in model.named_parameters():
        if any(word in name for word in DYNAMICS) or not parameter.is_floating_point():
            continue
        if parameter.dim() <= 1:
            parameter.add_(STIR * noise(parameter))
        else:
            # Random maps of the usual initial size barely move the residual stream; these do.
            parameter.add_(noise(parameter) * 0.6 / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.rsplit(".", 1)[-1] in BUFFERS:
            buffer.add_(STIR * noise(buffer))
