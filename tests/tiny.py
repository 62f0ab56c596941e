"""Tiny models of the first families, with norm weights and biases perturbed: at initialisation scales are 1 and
biases 0, and whole classes of mistakes are invisible."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from torch import nn

COMMON = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

# model type -> (configuration, model, extra settings)
TYPES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"mlp_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 6}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
}
POST_NORM = ("gemma2", "gemma3_text")
WITHOUT_SDPA = ("gemma2",)

FLOAT32_NORMS = 1e-6
"""Upstream norms compute in float32 even in a float64 model."""


def build(model_type: str, dtype: torch.dtype = torch.float64, attention: str = "eager", seed: int = 0) -> nn.Module:
    """A fresh model; perturbed, in eval mode."""
    config_name, model_name, extra = TYPES[model_type]
    config = getattr(transformers, config_name)(**{**COMMON, **extra}, attn_implementation=attention)
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else 0.15
            parameter.add_(spread * torch.randn_like(parameter))
    return model.to(dtype).eval()


@cache
def shared(model_type: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """One model for read-only tests."""
    return build(model_type, dtype)


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, COMMON["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def bits(model: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer, byte for byte."""
    return {
        name: tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


def letters():
    """A tokenizer of one token per printable character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<bos>", *(chr(c) for c in range(32, 127))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<bos>")
