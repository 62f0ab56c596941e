"""A model whose MLP rectifies, made on the spot with random weights: where exact zeros stand, and what they break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import bind
from contextfold.fold import fold_token
from contextfold.reproduce.curves import Magnitudes, step_of
from contextfold.reproduce.engine import Bench
from contextfold.runtime import materialised, run
from contextfold.verify import compare

__all__ = ["RECTIFIED", "measure_rectified"]

RECTIFIED = ("opt", "gemma3_text")
"""Model types: OPT rectifies as it is; Gemma 3 with its activation replaced has a norm after the MLP besides."""

VOCABULARY = 512
SPREAD = 0.12
"""Standard deviation that random weights are moved by: at initialisation a block hardly does anything."""


def rectified(model_type: str, dtype: torch.dtype, seed: int) -> nn.Module:
    """A small random model in evaluation mode: 6 layers, width 64, MLP width 256, ReLU."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, OPTConfig, OPTForCausalLM

    torch.manual_seed(seed)
    model: nn.Module
    if model_type == "opt":
        model = OPTForCausalLM(
            OPTConfig(
                vocab_size=VOCABULARY, hidden_size=64, word_embed_proj_dim=64, ffn_dim=256, num_hidden_layers=6,
                num_attention_heads=4, max_position_embeddings=128, activation_function="relu", dropout=0.0,
            )
        )  # fmt: skip
    else:
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=VOCABULARY, hidden_size=64, intermediate_size=256, num_hidden_layers=6,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16,
                max_position_embeddings=128, hidden_activation="relu", sliding_window=64,
            )
        )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(SPREAD * torch.randn_like(parameter))
    nn.Module.to(model, dtype)
    model.train(False)
    return model


@torch.no_grad()
def measure_rectified(
    bench: Bench, advance: Callable[[], None], *, model_type: str, number: str, rules: Sequence[str], contexts: int,
    length: int,
) -> dict[str, Any]:  # fmt: skip
    """Fold the last token of `contexts` random sequences of `length` tokens, nothing else kept in the window.

    `number` names the dtype. Gives per rule the agreements and gaps, how often an update was refused, and how many
    entries of h and of u are exactly zero in the model's own dtype.
    """
    bound = bind(rectified(model_type, getattr(torch, number), seed=0))
    tokens = torch.randint(5, VOCABULARY, (contexts, length), generator=torch.Generator().manual_seed(1))
    branch, zeros = Magnitudes(), torch.zeros(2, dtype=torch.int64)
    same: dict[str, list[bool]] = {rule: [] for rule in (*rules, "unpatched")}
    gaps: dict[str, list[float]] = {rule: [] for rule in same}
    for ids in tokens:
        step = step_of(bound, ids)
        branch.add(bound, step.states)
        zeros += sum((_zeros(state["h"]) for state in step.states), torch.zeros(2, dtype=torch.int64))
        logits = {"unpatched": run(bound.model, step.parts.reduced)[0]}
        for rule in rules:
            folded = fold_token(bound, ids[:-1], ids[-1:], keep=(), rule=rule, targets=step.targets)
            with materialised(bound, folded.patch):
                logits[rule] = run(bound.model, step.parts.reduced)[0]
        for rule, found in logits.items():
            compared = compare(step.targets.logits, found)
            same[rule].append(compared.top1_match)
            gaps[rule].append(compared.logit_gap)
        advance()
    return {
        "same": same,
        "logit_gap": gaps,
        "h_zero_share": float(zeros[0]) / float(zeros[1]),
        "u": branch.result(),
    }


def _zeros(h: Tensor) -> Tensor:
    """Exact zeros, and entries."""
    return torch.tensor([int((h == 0).sum()), h.numel()])
