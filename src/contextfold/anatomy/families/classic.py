"""Dense families of the older style: LayerNorm, biases, one input map."""

from __future__ import annotations

from dataclasses import replace

from contextfold.anatomy.families.wirings import PRE_NORM, parallel, post_ln, pre_norm
from contextfold.anatomy.record import Dense, Family, Tap, Wiring, read_by

__all__ = ["CLASSIC"]

GPT2 = Family(
    name="gpt2",
    model_types=("gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo"),
    layers="transformer.h",
    sites=(Dense(("mlp.c_fc",), "mlp.c_proj", pre_norm("ln_2")),),
    quirks="Weights of GPT-2 and GPT-SW3 are stored (in, out); all maps have biases. This is also the form of GPT-3.",
)

OPENAI_GPT = Family(
    name="openai-gpt",
    model_types=("openai-gpt",),
    layers="transformer.h",
    sites=(Dense(("mlp.c_fc",), "mlp.c_proj", post_ln("ln_2")),),
    quirks="The first GPT: norms over the sums, as in the original transformer. Weights are stored (in, out).",
)

_NEOX = ("mlp.dense_h_to_4h",)

GPT_NEOX = Family(
    name="gpt-neox",
    model_types=("gpt_neox",),
    layers="gpt_neox.layers",
    sites=(
        Dense(_NEOX, "mlp.dense_4h_to_h", parallel("attention", {"use_parallel_residual": True})),
        Dense(_NEOX, "mlp.dense_4h_to_h", replace(PRE_NORM, when={"use_parallel_residual": False})),
    ),
    quirks="Parallel unless `use_parallel_residual` is off; the MLP has its own norm of the block's input. Pythia.",
)

GPT_NEOX_JAPANESE = Family(
    name="gpt-neox-japanese",
    model_types=("gpt_neox_japanese",),
    layers="gpt_neox_japanese.layers",
    sites=(Dense(_NEOX, "mlp.dense_4h_to_h", PRE_NORM),),
    quirks="Sequential; only the last layer's attention has a bias.",
)

GPTJ = Family(
    name="gptj",
    model_types=("gptj", "codegen"),
    layers="transformer.h",
    sites=(Dense(("mlp.fc_in",), "mlp.fc_out", parallel("attn")),),
    quirks="Attention and MLP read the same norm of the block's input.",
)

PHI = Family(
    name="phi",
    model_types=("phi",),
    layers="model.layers",
    sites=(Dense(("mlp.fc1",), "mlp.fc2", parallel("self_attn")),),
    quirks="Attention and MLP read the same norm of the block's input; biases everywhere.",
)

FALCON = Family(
    name="falcon",
    model_types=("falcon",),
    layers="transformer.h",
    sites=(
        Dense(_NEOX, "mlp.dense_4h_to_h", parallel("self_attention", {"new_decoder_architecture": True})),
        Dense(
            _NEOX,
            "mlp.dense_4h_to_h",
            parallel("self_attention", {"new_decoder_architecture": False, "parallel_attn": True}),
        ),
        Dense(
            _NEOX,
            "mlp.dense_4h_to_h",
            replace(PRE_NORM, when={"new_decoder_architecture": False, "parallel_attn": False}),
        ),
    ),
    quirks="Three wirings: one shared norm (7B), two norms (40B), or sequential (RW).",
)

BLOOM = Family(
    name="bloom",
    model_types=("bloom",),
    layers="transformer.h",
    sites=(
        Dense(
            _NEOX,
            "mlp.dense_4h_to_h",
            replace(PRE_NORM, when={"apply_residual_connection_post_layernorm": False}),
        ),
        Dense(
            _NEOX,
            "mlp.dense_4h_to_h",
            replace(
                PRE_NORM,
                residual=(read_by("mlp"),),
                when={"apply_residual_connection_post_layernorm": True},
            ),
        ),
    ),
    quirks="The MLP module adds the residual itself. Positions enter as a bias on attention scores that counts tokens, "
    "so kept tokens cannot keep the positions that they had.",
)

MPT = Family(
    name="mpt",
    model_types=("mpt",),
    layers="transformer.blocks",
    sites=(Dense(("ffn.up_proj",), "ffn.down_proj", pre_norm("norm_2")),),
    quirks="The MLP module adds the residual itself; attention scores have a bias that counts tokens.",
)

PERSIMMON = Family(
    name="persimmon",
    model_types=("persimmon",),
    layers="model.layers",
    sites=(Dense(_NEOX, "mlp.dense_4h_to_h", PRE_NORM),),
    quirks="ReLU squared; biases everywhere.",
)

FUYU = replace(PERSIMMON, name="fuyu", model_types=("fuyu",), layers="model.language_model.layers")

STARCODER2 = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    layers="model.layers",
    sites=(Dense(("mlp.c_fc",), "mlp.c_proj", PRE_NORM),),
    quirks="Biases everywhere.",
)

CTRL = Family(
    name="ctrl",
    model_types=("ctrl",),
    layers="transformer.h",
    sites=(Dense(("ffn.0",), "ffn.2", pre_norm("layernorm2")),),
    quirks="Sinusoidal positions.",
)

CPMANT = Family(
    name="cpmant",
    model_types=("cpmant",),
    layers="cpmant.encoder.layers",
    sites=(Dense(("ffn.ffn.w_in.w_0", "ffn.ffn.w_in.w_1"), "ffn.ffn.w_out", pre_norm("ffn.layernorm_before_ffn")),),
    quirks="A learned prompt and a relative position bias.",
)

MODERNBERT = Family(
    name="modernbert-decoder",
    model_types=("modernbert-decoder",),
    layers="model.layers",
    sites=(Dense(("mlp.Wi",), "mlp.Wo", pre_norm("mlp_norm")),),
    quirks="Gate and up are one matrix; the first layer has no norm before attention.",
)

_FC = ("fc1",)
_FC_PRE = Dense(_FC, "fc2", pre_norm("final_layer_norm"))
_FC_POST = Dense(_FC, "fc2", post_ln("final_layer_norm"))

OPT = Family(
    name="opt",
    model_types=("opt",),
    layers="model.decoder.layers",
    sites=(
        Dense(_FC, "fc2", replace(pre_norm("final_layer_norm"), when={"do_layer_norm_before": True})),
        Dense(_FC, "fc2", post_ln("final_layer_norm", {"do_layer_norm_before": False})),
    ),
    quirks="fc1 and fc2 stand in the layer itself; OPT 350M has the norm over the sum.",
)

PRE_LN_DECODER = Family(
    name="mbart",
    model_types=(
        "mbart", "pegasus", "bigbird_pegasus", "blenderbot", "musicgen", "musicgen_decoder", "musicgen_melody",
        "musicgen_melody_decoder", "whisper",
    ),
    layers="model.decoder.layers",
    sites=(_FC_PRE,),
    quirks="The decoder of an encoder-decoder model, run alone; its cross-attention does not run.",
)  # fmt: skip

POST_LN_DECODER = Family(
    name="bart",
    model_types=("bart", "blenderbot-small", "marian", "mvp", "plbart", "trocr"),
    layers="model.decoder.layers",
    sites=(_FC_POST,),
    quirks="The original transformer's form: norms over the sums. Its decoder, run alone.",
)

XGLM = Family(name="xglm", model_types=("xglm",), layers="model.layers", sites=(_FC_PRE,))

BIOGPT = Family(name="biogpt", model_types=("biogpt",), layers="biogpt.layers", sites=(_FC_PRE,))

_BERT = Dense(("intermediate.dense",), "output.dense", post_ln("output.LayerNorm"))

BERT = Family(
    name="bert",
    model_types=("bert", "bert-generation", "big_bird"),
    layers="bert.encoder.layer",
    sites=(_BERT,),
    quirks="The original transformer's form, with a causal mask (`is_decoder`). The output module adds the residual.",
)


def _bert_like(name: str, *model_types: str, layers: str) -> Family:
    return replace(BERT, name=name, model_types=model_types, layers=f"{layers}.encoder.layer")


ROBERTA = _bert_like("roberta", "camembert", "roberta", "xlm-roberta", layers="roberta")
DATA2VEC = _bert_like("data2vec-text", "data2vec-text", layers="data2vec_text")
ELECTRA = _bert_like("electra", "electra", layers="electra")
ERNIE = _bert_like("ernie", "ernie", layers="ernie")
GIT = _bert_like("git", "git", layers="git")
REMBERT = _bert_like("rembert", "rembert", layers="rembert")
ROC_BERT = _bert_like("roc_bert", "roc_bert", layers="roc_bert")
ROFORMER = _bert_like("roformer", "roformer", layers="roformer")


def _bert_pre(name: str, layers: str, norm: str) -> Family:
    """BERT with the norm before the MLP. The norm's input is r."""
    return Family(
        name=name,
        model_types=(name,),
        layers=f"{layers}.encoder.layer",
        sites=(Dense(("intermediate.dense",), "output.dense", Wiring(norm_pre=norm)),),
        quirks="BERT with norms before the sublayers; the output module adds the residual.",
    )


MEGATRON = _bert_pre("megatron-bert", "bert", "ln")
ROBERTA_PRE = _bert_pre("roberta-prelayernorm", "roberta_prelayernorm", "intermediate.LayerNorm")
ROBERTA_XL = _bert_pre("xlm-roberta-xl", "roberta", "LayerNorm")

XMOD = Family(
    name="xmod",
    model_types=("xmod",),
    layers="roberta.encoder.layer",
    sites=(
        Dense(
            ("intermediate.dense",),
            "output.dense",
            Wiring(
                total=Tap("output.LayerNorm", "input", calls=2),
                when={"pre_norm": False, "adapter_layer_norm": False, "adapter_reuse_layer_norm": True},
            ),
        ),
    ),
    quirks="Behind the MLP an adapter per language, token by token, between two calls of the norm over the sum.",
)

CLASSIC: tuple[Family, ...] = (
    GPT2, OPENAI_GPT, GPT_NEOX, GPT_NEOX_JAPANESE, GPTJ, PHI, FALCON, BLOOM, MPT, PERSIMMON, FUYU, STARCODER2, CTRL,
    CPMANT, MODERNBERT, OPT, PRE_LN_DECODER, POST_LN_DECODER, XGLM, BIOGPT, BERT, ROBERTA, DATA2VEC, ELECTRA, ERNIE,
    GIT, REMBERT, ROC_BERT, ROFORMER, MEGATRON, ROBERTA_PRE, ROBERTA_XL, XMOD,
)  # fmt: skip
