"""Families with mixtures of experts. Nearly all stack the maps of their experts in 3-D parameters."""

from __future__ import annotations

from dataclasses import replace

from contextfold.anatomy.families.modern import depth_keep, depth_weight
from contextfold.anatomy.families.wirings import FFN_GATED, GATED, POST_NORM, PRE_NORM, SANDWICH, parallel, pre_norm
from contextfold.anatomy.record import Dense, Experts, Family, Wiring, given_by, read_by

__all__ = ["MIXTURES"]


def routed(wiring: Wiring, router: str = "mlp.gate", branch: str = "mlp") -> Experts:
    """A router and stacked experts, with gate and up in one parameter."""
    return Experts(
        branch=(branch,),
        input_maps=(router,),
        stacked_inputs=(f"{branch}.experts.gate_up_proj",),
        outputs=(f"{branch}.experts.down_proj",),
        wiring=wiring,
    )


def shared(base: Experts, expert: str, *gates: str) -> Experts:
    """The same with an expert that every token uses, `expert`, and maps that weigh it."""
    maps = (*base.input_maps, f"{expert}.gate_proj", f"{expert}.up_proj", *gates)
    return replace(base, input_maps=maps, outputs=(*base.outputs, f"{expert}.down_proj"))


_DENSE = Dense(GATED, "mlp.down_proj", PRE_NORM)
_ROUTED = routed(PRE_NORM)
_SHARED = shared(_ROUTED, "mlp.shared_experts")

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral", "qwen3_moe", "olmoe", "mellum", "mimo_v2_flash", "minimax_m2"),
    layers="model.layers",
    sites=(_ROUTED, _DENSE),
    quirks="No shared expert; some layers may be dense.",
)

QWEN_MOE = Family(
    name="qwen-moe",
    model_types=("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    layers="model.layers",
    sites=(shared(_ROUTED, "mlp.shared_expert", "mlp.shared_expert_gate"), _DENSE),
    quirks="The shared expert is weighed by a gate of its own. Qwen3-Next and Qwen3.5 have three gated delta layers "
    "for each attention layer, and norms of 1 + w.",
)

DEEPSEEK = Family(
    name="deepseek",
    model_types=(
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "dots1",
        "dots3_note", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "kimi_linear", "bailing_hybrid", "hy_v3",
        "laguna", "sarvam_mla", "sarvam_moe", "solar_open", "axk2",
    ),
    layers="model.layers",
    sites=(_SHARED, _ROUTED, _DENSE),
    quirks="Dense first layers, then routed and shared experts. The router's bias only chooses, it does not weigh. The "
    "norm before the MLP may be gated by two maps of its own (A.X K2), which act before z.",
)  # fmt: skip

FLINT = Family(
    name="flint",
    model_types=("flint", "lara_mini"),
    layers="model.layers",
    sites=(shared(_ROUTED, "mlp.shared_expert"), _DENSE),
    quirks="One shared expert without a gate.",
)

MINIMAX_M3 = Family(
    name="minimax-m3",
    model_types=("minimax_m3_vl_text",),
    layers="model.layers",
    sites=(
        replace(
            _ROUTED,
            input_maps=("mlp.gate", "mlp.shared_experts.gate_up_proj"),
            outputs=("mlp.experts.down_proj", "mlp.shared_experts.down_proj"),
        ),
        Dense(("mlp.gate_up_proj",), "mlp.down_proj", PRE_NORM),
    ),
    quirks="Routed experts are multiplied by a constant; the shared expert fuses gate and up; norms of 1 + w.",
)

MINIMAX = Family(
    name="minimax",
    model_types=("minimax",),
    layers="model.layers",
    sites=(
        routed(
            Wiring(
                norm_pre="post_attention_layernorm",
                residual=(read_by("mlp", "mlp_alpha_factor"),),
                alpha="mlp_beta_factor",
            )
        ),
    ),
    quirks="The stream continues behind the norm, times a factor; lightning attention and attention.",
)

HUNYUAN = Family(
    name="hunyuan-moe",
    model_types=("hunyuan_v1_moe",),
    layers="model.layers",
    sites=(shared(routed(PRE_NORM, "mlp.gate.wg"), "mlp.shared_mlp"), _DENSE),
    quirks="The router computes in float32.",
)

ARIA = Family(
    name="aria",
    model_types=("aria_text",),
    layers="model.layers",
    sites=(replace(shared(routed(PRE_NORM, "mlp.router"), "mlp.shared_experts"), transposed=True),),
    quirks="Experts are stored (in, out).",
)

GPT_OSS = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    layers="model.layers",
    sites=(replace(routed(PRE_NORM, "mlp.router"), transposed=True),),
    quirks="Experts are stored (in, out), gate and up interleaved, with biases; attention has sinks and no SDPA.",
)

PHIMOE = Family(
    name="phimoe",
    model_types=("phimoe",),
    layers="model.layers",
    sites=(routed(PRE_NORM, "mlp.router"),),
    quirks="LayerNorms with biases.",
)

_LLAMA4 = routed(PRE_NORM, "feed_forward.router", "feed_forward")

LLAMA4 = Family(
    name="llama4",
    model_types=("llama4", "llama4_text"),
    layers="model.layers",
    sites=(
        replace(shared(_LLAMA4, "feed_forward.shared_expert"), transposed=True),
        Dense(FFN_GATED, "feed_forward.down_proj", PRE_NORM),
    ),
    quirks="The router's weight multiplies what an expert reads, not what it gives. Experts are stored (in, out).",
)

JAMBA = Family(
    name="jamba",
    model_types=("jamba",),
    layers="model.layers",
    sites=(
        routed(pre_norm("pre_ff_layernorm"), "feed_forward.router", "feed_forward"),
        Dense(FFN_GATED, "feed_forward.down_proj", pre_norm("pre_ff_layernorm")),
    ),
    quirks="Mamba and attention; every other layer a mixture.",
)

LFM2_MOE = Family(
    name="lfm2-moe",
    model_types=("lfm2_moe",),
    layers="model.layers",
    sites=(
        routed(pre_norm("ffn_norm"), "feed_forward.gate", "feed_forward"),
        Dense(("feed_forward.w1", "feed_forward.w3"), "feed_forward.w2", pre_norm("ffn_norm")),
    ),
    quirks="Short convolutions and attention; dense first layers.",
)

_GRANITE = routed(replace(PRE_NORM, alpha="residual_multiplier"), "block_sparse_moe.router", "block_sparse_moe")

GRANITE_MOE = Family(
    name="granite-moe",
    model_types=("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    layers="model.layers",
    sites=(
        replace(
            _GRANITE,
            branch=("block_sparse_moe", "shared_mlp"),
            input_maps=("block_sparse_moe.router", "shared_mlp.input_linear"),
            outputs=("block_sparse_moe.experts.down_proj", "shared_mlp.output_linear"),
        ),
        _GRANITE,
        Dense(("shared_mlp.input_linear",), "shared_mlp.output_linear", _GRANITE.wiring),
    ),
    quirks="Branches are multiplied by `residual_multiplier`; routed experts and the shared MLP are two modules whose "
    "results are added. Granite 4 mixes Mamba-2 and attention.",
)

DBRX = Family(
    name="dbrx",
    model_types=("dbrx",),
    layers="transformer.blocks",
    sites=(
        Experts(
            branch=("ffn",),
            input_maps=("ffn.router.layer",),
            stacked_inputs=("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"),
            outputs=("ffn.experts.mlp.w2",),
            wiring=pre_norm("norm_attn_norm.norm_2"),
            output_transposed=True,
            packed="ffn.experts.num_experts",
        ),
    ),
    quirks="Experts are packed into matrices of stacked rows; the output maps are stored (in, out).",
)

JETMOE = Family(
    name="jetmoe",
    model_types=("jetmoe",),
    layers="model.layers",
    sites=(
        Experts(
            branch=("mlp",),
            input_maps=("mlp.router.layer",),
            stacked_inputs=("mlp.input_linear.weight",),
            outputs=("mlp.output_linear.weight",),
            wiring=PRE_NORM,
        ),
    ),
    quirks="Attention is a mixture too; one bias for the whole MLP.",
)

_AFMOE = Wiring(norm_pre="pre_mlp_layernorm", norm_post="post_mlp_layernorm")

AFMOE = Family(
    name="afmoe",
    model_types=("afmoe",),
    layers="model.layers",
    sites=(
        shared(routed(_AFMOE, "mlp.router.gate"), "mlp.shared_experts"),
        Dense(GATED, "mlp.down_proj", _AFMOE),
    ),
    quirks="Norms before and after each sublayer; dense first layers.",
)

AXK1 = Family(
    name="axk1",
    model_types=("axk1",),
    layers="model.layers",
    sites=(
        shared(routed(replace(PRE_NORM, norm_post="mlp.post_mlp_layernorm")), "mlp.shared_experts"),
        _DENSE,
    ),
    quirks="The norm after the MLP stands inside the mixture; dense first layers have none.",
)

_BEAM = replace(SANDWICH, residual=(read_by("pre_feedforward_layernorm", depth_keep),), alpha=depth_weight)

BEAM = Family(
    name="beam",
    model_types=("beam",),
    layers="model.layers",
    sites=(routed(_BEAM), Dense(GATED, "mlp.down_proj", _BEAM)),
    quirks="Stream and branch are weighed by the number of sums so far, so that their squares add up to one.",
)

KOLIBRI = Family(
    name="kolibri1",
    model_types=("kolibri1",),
    layers="model.layers",
    sites=(
        shared(
            routed(Wiring(norm_pre="post_attention_layernorm", norm_post="post_mlp_layernorm")), "mlp.shared_experts"
        ),
    ),
    quirks="Norms before and after each sublayer.",
)

COHERE_MOE = Family(
    name="cohere2-moe",
    model_types=("cohere2_moe",),
    layers="model.layers",
    sites=(
        shared(routed(parallel("self_attn")), "mlp.shared_experts"),
        routed(parallel("self_attn")),
        Dense(GATED, "mlp.down_proj", parallel("self_attn")),
    ),
    quirks="Attention and MLP read the same norm; routed and shared experts are averaged.",
)

FLEX_OLMO = Family(
    name="flex-olmo",
    model_types=("flex_olmo",),
    layers="model.layers",
    sites=(routed(POST_NORM),),
    quirks="No norm before the MLP, so z is v; a norm after it.",
)

LONGCAT = Family(
    name="longcat-flash",
    model_types=("longcat_flash",),
    layers="model.layers",
    sites=(
        Dense(
            ("mlps.1.gate_proj", "mlps.1.up_proj"),
            "mlps.1.down_proj",
            Wiring(
                norm_pre="post_attention_layernorm.1",
                residual=(read_by("post_attention_layernorm.1"), given_by("mlp")),
            ),
        ),
    ),
    quirks="Two attentions and two MLPs in a layer, and a mixture that is read early and joins last. The second MLP is "
    "edited; the mixture's result is a part of r.",
)


ZAYA = Family(
    name="zaya",
    model_types=("zaya",),
    layers="model.layers",
    sites=(
        routed(
            Wiring(
                norm_pre="post_attention_layernorm",
                residual=(read_by("post_attention_layernorm", "post_mlp_residual_scale.residual_scale"),),
                alpha="post_mlp_residual_scale.hidden_states_scale",
                shift=(
                    ("post_mlp_residual_scale.hidden_states_bias", "post_mlp_residual_scale.hidden_states_scale"),
                    ("post_mlp_residual_scale.residual_bias", "post_mlp_residual_scale.residual_scale"),
                ),
            ),
            "mlp.gate.down_proj",
        ),
    ),
    quirks="Stream and branch have learned scales and biases; the router also reads the state of the router below, so "
    "that it may choose other experts than with the context, which the output maps then absorb. A token may skip all "
    "experts; its block then cannot be steered.",
)

MIXTURES: tuple[Family, ...] = (
    MIXTRAL, QWEN_MOE, DEEPSEEK, FLINT, MINIMAX_M3, MINIMAX, HUNYUAN, ARIA, GPT_OSS, PHIMOE, LLAMA4, JAMBA, LFM2_MOE,
    GRANITE_MOE, DBRX, JETMOE, AFMOE, AXK1, BEAM, KOLIBRI, COHERE_MOE, FLEX_OLMO, LONGCAT, ZAYA,
)  # fmt: skip
