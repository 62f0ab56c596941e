"""Tiny configurations for every causal language model type of transformers: sizes, and what some types need besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["HIDDEN", "VOCABULARY", "tiny_config"]

HIDDEN = 64
VOCABULARY = 160
WINDOW = 8
"""Sliding windows are this long, and the sequences of the tests are longer."""


def _same(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_same(VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    **_same(
        HIDDEN,
        "hidden_size d_model n_embd dim model_dim embed_dim emb_dim hidden_dim lru_width vision_output_dim "
        "word_embed_proj_dim embedding_size",
    ),
    **_same(
        96,
        "intermediate_size ffn_dim n_inner d_ff dff ffn_hidden_size inner_dim decoder_ffn_dim encoder_ffn_dim d_inner "
        "feedforward_size",
    ),
    "intermediate_size_mlp": 112,
    **_same(4, "num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers"),
    **_same(4, "encoder_layers num_encoder_layers"),
    **_same(
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads index_n_heads",
    ),
    **_same(2, "num_key_value_heads num_kv_heads n_kv_heads num_global_key_value_heads swa_num_key_value_heads"),
    **_same(
        16,
        "head_dim attention_head_dim v_head_dim qk_head_dim global_head_dim swa_head_dim swa_v_head_dim index_head_dim "
        "query_pre_attn_scalar hidden_size_per_layer_input kv_lora_rank",
    ),
    **_same(8, "qk_nope_head_dim qk_rope_head_dim rotary_dim laurel_rank index_topk"),
    "q_lora_rank": 32,
    **_same(4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    **_same(2, "num_experts_per_tok moe_topk top_k_experts moe_k"),
    **_same(1, "n_shared_experts num_shared_experts n_group topk_group num_expert_group"),
    **_same(1, "first_k_dense_replace moe_layer_start_index num_dense_layers"),
    **_same(
        48,
        "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size",
    ),
    **_same(128, "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len seq_length mamba_d_ssm"),
    **_same(8, "mamba_d_state mamba_n_heads mamba_chunk_size mamba_num_heads mamba_dt_rank"),
    **_same(4, "mamba_d_conv conv_kernel linear_num_value_heads linear_conv_kernel_dim"),
    **_same(2, "mamba_expand n_mamba_heads linear_num_key_heads num_kv_shared_layers altup_num_inputs type_vocab_size"),
    **_same(1, "mamba_n_groups mamba_ngroups n_groups"),
    **_same(16, "mamba_d_head mamba_head_dim mamba_headdim linear_key_head_dim linear_value_head_dim"),
    **_same(8, "state_size chunk_size ssm_state_size time_step_rank"),
    **_same(WINDOW, "attention_window_size sliding_window"),
    "attention_chunk_size": 16,
    "use_mamba_kernels": False,
    "altup_active_idx": 0,
    "image_size": 28,
    "patch_size": 14,
    "mm_tokens_per_image": 1,
    "projection_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **_same(
        0.0,
        "attention_dropout hidden_dropout dropout attn_pdrop resid_pdrop embd_pdrop activation_dropout "
        "hidden_dropout_prob attention_probs_dropout_prob",
    ),
}

OPTIONAL = frozenset({"q_lora_rank", "n_inner", "sliding_window", "n_group", "topk_group", "rotary_dim"})
"""Sizes that mean "none of this" when their default is None."""

DROP = object()
"""In an override: leave this size at the type's own default."""

_FULL_SLIDING = ["sliding_attention", "full_attention"] * 2
_BERT = (
    "bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm "
    "roc_bert roformer xlm-roberta xlm-roberta-xl"
)
_LATENT = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text glm4_moe_lite glm_moe_dsa minicpm3 "
    "sarvam_mla youtu"
)
_GRANITE = "granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared hyperclovax"
_ZAMBA = ["linear_attention", "linear_attention", "hybrid", "linear_attention"] * 2
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32,
    "indexer_compress_ratio": 4, "hc_lowrank": 8, "hc_count": 2, "ple_embed_dim": 16, "ngram_vocab_size_base": 101,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "heads_per_ngram": 2,
}  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in _BERT.split()},
    **{name: {"num_key_value_heads": 4} for name in _LATENT.split()},
    **{name: {"residual_multiplier": 0.22} for name in _GRANITE.split()},
    "granitemoehybrid": {
        "residual_multiplier": 0.22, "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    **{
        name: {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4}
        for name in ("bailing_hybrid", "kimi_linear")
    },
    "falcon_h1": {"mlp_multipliers": [0.5, 2.0]},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8, "zero_expert_num": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh", "local", "lsh"], "axial_pos_embds": False,
        "feed_forward_size": 96, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4,
        "attention_head_size": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"num_hidden_layers": 8, "layers_block_type": _ZAMBA},
    "zamba2": {"num_hidden_layers": 8, "layers_block_type": _ZAMBA},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"], "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
    },
    "dots3_note_text": {
        "num_key_value_heads": 4, "sliding_window": DROP, "n_shared_experts": 1, "layer_types": ["full_attention"] * 4,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
    },
    "qwen4_exp_text": _QWEN4,
    "gemma3n_text": {"layer_types": _FULL_SLIDING},
    "gemma4_text": {"layer_types": _FULL_SLIDING},
    "gemma4_unified_text": {"layer_types": _FULL_SLIDING},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
}  # fmt: skip

TEXT_ONLY = {
    "emu3": "emu3_text_model",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "dots3_note": "dots3_note_text",
}
"""Types whose causal language model is built from another type's configuration."""


def _defaults(kind: type) -> dict[str, Any]:
    """Every option of a configuration class with its default."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        names = [n for n in getattr(base, "__annotations__", {}) if not n.startswith("_")]
        found |= {name: getattr(kind, name) for name in names if name in dir(kind)}
    return found


def _sizes(kind: type, **overrides: Any) -> dict[str, Any]:
    defaults = _defaults(kind)
    small = {
        name: value
        for name, value in SIZES.items()
        if name in defaults and not (name in OPTIONAL and defaults[name] is None)
    }
    return {name: value for name, value in (small | overrides).items() if value is not DROP}


def _of(model_type: str, **overrides: Any) -> Any:
    kind = CONFIG_MAPPING[model_type]
    return kind(**_sizes(kind, **{**OVERRIDES.get(model_type, {}), **overrides}))


def _composite(model_type: str) -> Any:
    """A wrapper whose text part has its own configuration; other parts are tiny where the wrapper has them."""
    kind = CONFIG_MAPPING[model_type]
    parts = dict(kind.sub_configs)
    text = parts.pop("text_config")
    made = {"text_config": _of(text.model_type)}
    for name, part in parts.items():
        if part.__name__ != "AutoConfig":
            made[name] = part(**_sizes(part))
    return kind(**_sizes(kind), **made)


def _gemma3() -> Any:
    from transformers import SiglipVisionConfig

    kind = CONFIG_MAPPING["gemma3"]
    vision = SiglipVisionConfig(**_sizes(SiglipVisionConfig))
    return kind(**_sizes(kind), text_config=_of("gemma3_text"), vision_config=vision)


def _assistant(model_type: str) -> Any:
    text = "gemma4_unified_text" if "unified" in model_type else "gemma4_text"
    config = _of(text, hidden_size_per_layer_input=0, num_kv_shared_layers=4, vocab_size_per_layer_input=0)
    return CONFIG_MAPPING[model_type](text_config=config, backbone_hidden_size=HIDDEN)


def _dbrx() -> Any:
    kind = CONFIG_MAPPING["dbrx"]
    attention = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}
    experts = {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}}
    return kind(**_sizes(kind), attn_config=attention, ffn_config=experts)


def _git() -> Any:
    kind = CONFIG_MAPPING["git"]
    vision = {
        "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    return kind(**_sizes(kind), vision_config=vision)


def _blt() -> Any:
    common = {"num_attention_heads": 4, "intermediate_size": 96, "hidden_size": HIDDEN}
    return CONFIG_MAPPING["blt"](
        vocab_size=260,
        max_position_embeddings=128,
        encoder_hash_byte_group_vocab=64,
        encoder_hash_byte_group_size=[3, 4],
        patching_mode="space",
        patch_in_forward=False,
        patcher_config={**common, "num_hidden_layers": 1},
        encoder_config={**common, "hidden_size_global": 128, "num_hidden_layers": 1},
        decoder_config={**common, "hidden_size_global": 128, "num_hidden_layers": 3},
        global_config={"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 160},
    )


def _fuyu() -> Any:
    return CONFIG_MAPPING["fuyu"](image_size=28, patch_size=14, text_config=_of("persimmon"))


def _got_ocr2() -> Any:
    from transformers.models.got_ocr2.configuration_got_ocr2 import GotOcr2VisionConfig

    vision = GotOcr2VisionConfig(
        hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=16,
        mlp_dim=64, global_attn_indexes=[1],
    )  # fmt: skip
    return CONFIG_MAPPING["got_ocr2"](vision_config=vision, text_config=_of("qwen2"), image_token_index=150)


def _moss() -> Any:
    from transformers.models.moss_transcribe_diarize.configuration_moss_transcribe_diarize import (
        MossTranscribeDiarizeAudioConfig,
    )

    audio = MossTranscribeDiarizeAudioConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    kind = CONFIG_MAPPING["moss_transcribe_diarize"]
    return kind(audio_config=audio, text_config=_of("qwen3"), audio_token_id=150)


def _musicgen(model_type: str) -> Any:
    from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig
    from transformers.models.musicgen_melody.configuration_musicgen_melody import MusicgenMelodyDecoderConfig

    kind = MusicgenDecoderConfig if model_type == "musicgen" else MusicgenMelodyDecoderConfig
    return kind(**_sizes(kind, audio_channels=1, num_codebooks=1, ffn_dim=96))


def _phi4() -> Any:
    from transformers.models.phi4_multimodal.configuration_phi4_multimodal import (
        Phi4MultimodalAudioConfig,
        Phi4MultimodalVisionConfig,
    )

    kind = CONFIG_MAPPING["phi4_multimodal"]
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    vision = Phi4MultimodalVisionConfig(**small, num_hidden_layers=2, image_size=56, patch_size=14, crop_size=56)
    audio = Phi4MultimodalAudioConfig(
        **small, num_blocks=2, ext_pw_out_channel=32, depthwise_separable_out_channel=32, nemo_conv_channels=32
    )
    sizes = _sizes(kind, image_size=DROP, patch_size=DROP)
    return kind(**sizes, vision_config=vision, audio_config=audio)


_BUILDERS: dict[str, Callable[[], Any]] = {
    "gemma3": _gemma3,
    "gemma4": lambda: _composite("gemma4"),
    "gemma4_unified": lambda: _composite("gemma4_unified"),
    "gemma4_assistant": lambda: _assistant("gemma4_assistant"),
    "gemma4_unified_assistant": lambda: _assistant("gemma4_unified_assistant"),
    "dbrx": _dbrx,
    "git": _git,
    "blt": _blt,
    "fuyu": _fuyu,
    "got_ocr2": _got_ocr2,
    "moss_transcribe_diarize": _moss,
    "musicgen": lambda: _musicgen("musicgen"),
    "musicgen_melody": lambda: _musicgen("musicgen_melody"),
    "phi4_multimodal": _phi4,
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The configuration of a tiny `model_type`; `overrides` reach plain types only (others have sub-configurations)."""
    if model_type in _BUILDERS:
        return _BUILDERS[model_type]()
    if model_type == "mllama":
        return _of("mllama_text_model", cross_attention_layers=[2])
    return _of(TEXT_ONLY.get(model_type, model_type), **overrides)
