"""Dense families with RMS norms: one shape, few names."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from contextfold.anatomy.families.wirings import (
    FFN_GATED,
    GATED,
    POST_NORM,
    PRE_NORM,
    SANDWICH,
    parallel,
    pre_norm,
    scaled,
)
from contextfold.anatomy.record import Dense, Family, Wiring, given_by, read_by

__all__ = ["MODERN"]

_LLAMA = Dense(GATED, "mlp.down_proj", replace(PRE_NORM, attention_output="self_attn.o_proj"))
_LLAMA_ANY = Dense(GATED, "mlp.down_proj", PRE_NORM)
_FUSED = Dense(("mlp.gate_up_proj",), "mlp.down_proj", PRE_NORM)

LLAMA = Family(
    name="llama",
    model_types=(
        "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "smollm3", "exaone", "internlm3",
        "iquestcoder", "cwm", "seed_oss", "ernie4_5", "emu3", "emu3_text_model", "helium",
        "hunyuan_v1_dense", "bitnet", "diffllama", "youtu",
    ),
    layers="model.layers",
    sites=(_LLAMA,),
    quirks="The norm called post_attention_layernorm is the one before the MLP. Llama may have MLP biases "
    "(`mlp_bias`); Qwen 2 has biases in attention, Qwen 3 norms on queries and keys: both act before v. BitNet has a "
    "norm between the activation and the output map, which acts before h.",
)  # fmt: skip

GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    layers="model.layers",
    sites=(_LLAMA,),
    quirks="Norms multiply by 1 + w and compute in float32; embeddings are scaled by the square root of d.",
)

VAULTGEMMA = Family(
    name="vaultgemma",
    model_types=("vaultgemma",),
    layers="model.layers",
    sites=(Dense(GATED, "mlp.down_proj", pre_norm("pre_feedforward_layernorm")),),
    quirks="Gemma 2 without the norms after the sublayers; 1 + w.",
)

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2", "gemma3_text"),
    layers="model.layers",
    sites=(Dense(GATED, "mlp.down_proj", replace(SANDWICH, attention_output="self_attn.o_proj")),),
    quirks="Norms before and after each sublayer, 1 + w, float32. Gemma 2 caps attention scores and logits; "
    "Gemma 3 alternates sliding and full attention. Scales that are exactly zero occur in Gemma 3 270M.",
)

GEMMA3 = replace(GEMMA2, name="gemma3", model_types=("gemma3",), layers="model.language_model.layers")

_GEMMA4 = (
    Dense(GATED, "mlp.down_proj", replace(SANDWICH, total=read_by("per_layer_input_gate"))),
    Dense(GATED, "mlp.down_proj", replace(SANDWICH, total=given_by("", "layer_scalar"))),
)

GEMMA4_TEXT = Family(
    name="gemma4-text",
    model_types=("gemma4_text", "gemma4_unified_text"),
    layers="model.layers",
    sites=_GEMMA4,
    quirks="Norms multiply by w, unlike Gemma 1 to 3. A buffer `layer_scalar` multiplies the finished sum. Where the "
    "layer has per-layer inputs, they form a second token-wise branch that reads the sum, which is what is aimed at. "
    "Late layers read keys and values of earlier ones.",
)

GEMMA4 = replace(
    GEMMA4_TEXT, name="gemma4", model_types=("gemma4", "gemma4_unified"), layers="model.language_model.layers"
)

HYBRID = Family(
    name="qwen3.5",
    model_types=("qwen3_5", "qwen3_5_text"),
    layers="model.layers",
    sites=(_LLAMA_ANY,),
    quirks="Three gated delta layers for each attention layer; norms multiply by 1 + w.",
)

NESTED = Family(
    name="nested-qwen",
    model_types=("got_ocr2", "moss_transcribe_diarize"),
    layers="model.language_model.layers",
    sites=(_LLAMA,),
    quirks="A Qwen inside a wrapper for images or sound; text alone runs the language model.",
)

MLLAMA = Family(
    name="mllama",
    model_types=("mllama", "mllama_text_model"),
    layers="model.layers",
    sites=(_LLAMA,),
    quirks="Layers with cross-attention do not run on text and are left out.",
    idle="cross_attn",
)

PHI3 = Family(
    name="phi3",
    model_types=("phi3", "phi4_multimodal", "glm"),
    layers="model.layers",
    sites=(_FUSED,),
    quirks="Gate and up are one matrix.",
)

UP_DOWN = Family(
    name="up-down",
    model_types=("arcee", "nemotron", "jais2"),
    layers="model.layers",
    sites=(Dense(("mlp.up_proj",), "mlp.down_proj", PRE_NORM),),
    quirks="No gate; ReLU squared. Nemotron and Jais have a LayerNorm (of 1 + w in Nemotron) before the MLP.",
)

APERTUS = Family(
    name="apertus",
    model_types=("apertus", "apertus1p5_text"),
    layers="model.layers",
    sites=(Dense(("mlp.up_proj",), "mlp.down_proj", pre_norm("feedforward_layernorm")),),
    quirks="No gate; the activation xIELU has learned numbers of its own.",
)

FC = Family(
    name="fc1-fc2",
    model_types=("moshi", "nanochat"),
    layers="model.layers",
    sites=(Dense(("mlp.fc1",), "mlp.fc2", PRE_NORM),),
    quirks="Moshi fuses gate and up in fc1. NanoChat's norms have no weight.",
)

LAYERNORM = Family(
    name="olmo",
    model_types=("olmo",),
    layers="model.layers",
    sites=(_LLAMA,),
    quirks="The LayerNorm before the MLP has no weight.",
)

STABLELM = Family(
    name="stablelm",
    model_types=("stablelm",),
    layers="model.layers",
    sites=(
        Dense(GATED, "mlp.down_proj", replace(PRE_NORM, when={"use_parallel_residual": False})),
        Dense(GATED, "mlp.down_proj", parallel("self_attn", {"use_parallel_residual": True})),
    ),
    quirks="Sequential or parallel, as the configuration says.",
)

OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2", "olmo3", "exaone4"),
    layers="model.layers",
    sites=(Dense(GATED, "mlp.down_proj", POST_NORM),),
    quirks="No norm before the MLP, so z is v; a norm after it.",
)

OLMO_HYBRID = Family(
    name="olmo-hybrid",
    model_types=("olmo_hybrid",),
    layers="model.layers",
    sites=(Dense(GATED, "mlp.down_proj", POST_NORM), _LLAMA_ANY),
    quirks="Attention layers have norms after each sublayer, linear-attention layers before.",
)

GLM4 = Family(
    name="glm4",
    model_types=("glm4",),
    layers="model.layers",
    sites=(
        Dense(
            ("mlp.gate_up_proj",),
            "mlp.down_proj",
            Wiring(
                norm_pre="post_attention_layernorm",
                norm_post="post_mlp_layernorm",
                norm_attention="post_self_attn_layernorm",
            ),
        ),
    ),
    quirks="Norms before and after each sublayer; gate and up are one matrix.",
)

GRANITE = Family(
    name="granite",
    model_types=("granite", "granite_swa"),
    layers="model.layers",
    sites=(Dense(GATED, "mlp.down_proj", scaled(PRE_NORM, "residual_multiplier")),),
    quirks="Branches are multiplied by `residual_multiplier` before they join the stream.",
)

_PERIPHERAL = Wiring(
    norm_pre="post_attention_layernorm",
    norm_post="post_norm2",
    alpha="residual_multiplier",
    when={"use_post_norm": True},
)

HYPERCLOVAX = Family(
    name="hyperclovax",
    model_types=("hyperclovax",),
    layers="model.layers",
    sites=(
        Dense(GATED, "mlp.down_proj", _PERIPHERAL),
        Dense(GATED, "mlp.down_proj", replace(_PERIPHERAL, norm_post=None, when={"use_post_norm": False})),
    ),
    quirks="A residual multiplier and, unless the configuration says otherwise, a norm after each sublayer.",
)

MINICPM3 = Family(
    name="minicpm3",
    model_types=("minicpm3",),
    layers="model.layers",
    sites=(Dense(GATED, "mlp.down_proj", scaled(PRE_NORM, "residual_scale")),),
    quirks="Branches are multiplied by scale_depth over the square root of the number of layers.",
)

COHERE = Family(
    name="cohere",
    model_types=("cohere", "cohere2", "cohere_compass_text"),
    layers="model.layers",
    sites=(Dense(GATED, "mlp.down_proj", parallel("self_attn")),),
    quirks="Attention and MLP read the same norm of the block's input.",
)

FEED_FORWARD = Family(
    name="bamba",
    model_types=("bamba",),
    layers="model.layers",
    sites=(Dense(FFN_GATED, "feed_forward.down_proj", pre_norm("pre_ff_layernorm")),),
    quirks="Mamba and attention, alternating.",
)

FALCON_H1 = Family(
    name="falcon-h1",
    model_types=("falcon_h1",),
    layers="model.layers",
    sites=(
        Dense(
            FFN_GATED, "feed_forward.down_proj", scaled(pre_norm("pre_ff_layernorm"), "feed_forward.down_multiplier")
        ),
    ),
    quirks="Mamba and attention side by side; the gate and the MLP's result are multiplied by constants.",
)

RECURRENT_GEMMA = Family(
    name="recurrent-gemma",
    model_types=("recurrent_gemma",),
    layers="model.layers",
    sites=(Dense(("mlp_block.gate_proj", "mlp_block.up_proj"), "mlp_block.down_proj", pre_norm("channel_pre_norm")),),
    quirks="Gated linear recurrences and local attention; biases in the MLP; norms multiply by 1 + w.",
)

_LFM_MAPS = ("feed_forward.w1", "feed_forward.w3")

LFM2 = Family(
    name="lfm2",
    model_types=("lfm2",),
    layers="model.layers",
    sites=(Dense(_LFM_MAPS, "feed_forward.w2", pre_norm("ffn_norm")),),
    quirks="Short convolutions and attention.",
)

LFM3 = Family(
    name="lfm3",
    model_types=("lfm3",),
    layers="model.layers",
    sites=(
        Dense(
            _LFM_MAPS,
            "feed_forward.w2",
            Wiring(norm_pre="ffn_norm", norm_post="post_ffn_norm", when={"use_sandwich_norm": True}),
        ),
        Dense(_LFM_MAPS, "feed_forward.w2", Wiring(norm_pre="ffn_norm", when={"use_sandwich_norm": False})),
    ),
    quirks="LFM 2 with, unless the configuration says otherwise, a norm after each sublayer.",
)


def depth_weight(layer: Any) -> float:
    """Weight of a branch in BEAM: one over the square root of the number of sums so far."""
    return 1 / math.sqrt(layer.mlp_residual_add_idx)


def depth_keep(layer: Any) -> float:
    """Weight of the stream in BEAM."""
    return math.sqrt((layer.mlp_residual_add_idx - 1) / layer.mlp_residual_add_idx)


DOGE = Family(
    name="doge",
    model_types=("doge",),
    layers="model.layers",
    sites=(
        Dense(
            GATED,
            "mlp.down_proj",
            Wiring(
                norm_pre="post_attention_layernorm",
                residual=(read_by("post_attention_layernorm", "post_attention_residual"),),
                when={"is_moe": False},
            ),
        ),
    ),
    quirks="The stream is multiplied by a learned vector before each sum. The variant with product-key experts is not "
    "covered.",
)

XLSTM = Family(
    name="xlstm",
    model_types=("xlstm",),
    layers="backbone.blocks",
    sites=(Dense(("ffn.proj_up_gate", "ffn.proj_up"), "ffn.proj_down", pre_norm("norm_ffn")),),
    quirks="Matrix-memory recurrences; needs the chunk size to divide nothing in particular.",
)

MODERN: tuple[Family, ...] = (
    LLAMA, GEMMA, VAULTGEMMA, GEMMA2, GEMMA3, GEMMA4_TEXT, GEMMA4, HYBRID, NESTED, MLLAMA, PHI3, UP_DOWN, APERTUS, FC,
    LAYERNORM, STABLELM, OLMO2, OLMO_HYBRID, GLM4, GRANITE, HYPERCLOVAX, MINICPM3, COHERE, FEED_FORWARD, FALCON_H1,
    RECURRENT_GEMMA, LFM2, LFM3, DOGE, XLSTM,
)  # fmt: skip
