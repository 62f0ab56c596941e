"""The known families. A new one of the known form is one record here and one line in `FAMILIES`."""

from __future__ import annotations

from contextfold.anatomy.record import Family, Sites

__all__ = ["FAMILIES", "GEMMA", "GEMMA2", "LLAMA"]

_GATED = ("mlp.gate_proj", "mlp.up_proj")

_PRE_NORM = Sites(
    input_maps=_GATED,
    output_map="mlp.down_proj",
    attention_output="self_attn.o_proj",
    norm_pre="post_attention_layernorm",
)

_SANDWICH = Sites(
    input_maps=_GATED,
    output_map="mlp.down_proj",
    attention_output="self_attn.o_proj",
    norm_pre="pre_feedforward_layernorm",
    norm_post="post_feedforward_layernorm",
    norm_attention="post_attention_layernorm",
)

LLAMA = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    layers="model.layers",
    sites=_PRE_NORM,
    norm_eps="variance_epsilon",
    quirks="The norm called post_attention_layernorm is the one before the MLP. Llama may have MLP biases "
    "(`mlp_bias`); Qwen 2 has biases in attention, Qwen 3 norms on queries and keys: both act before v.",
)

GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    layers="model.layers",
    sites=_PRE_NORM,
    norm_eps="eps",
    quirks="Norms multiply by 1 + w and compute in float32; embeddings are scaled by the square root of d.",
)

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2", "gemma3_text"),
    layers="model.layers",
    sites=_SANDWICH,
    norm_eps="eps",
    quirks="Norms before and after each sublayer, 1 + w, float32. Gemma 2 caps attention scores and logits; "
    "Gemma 3 alternates sliding and full attention. Scales that are exactly zero occur in Gemma 3 270M.",
)

FAMILIES: tuple[Family, ...] = (LLAMA, GEMMA, GEMMA2)
