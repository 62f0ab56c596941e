"""Models whose MLP rectifies: most of h is exactly zero, and the patch is as exact as anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from contextfold.anatomy import DenseBlock, bind
from contextfold.errors import NotControllable
from contextfold.fold import fold_token
from contextfold.outcomes import Outcome
from contextfold.runtime import materialised, recording, run
from zoo import build

CONTEXT, QUERY = torch.tensor([1, 5, 9, 3, 7, 11, 2]), torch.tensor([4, 8, 2])


def silence(model: nn.Module, keep: float) -> list[DenseBlock]:
    """Give the rectifier so little that about `keep` of h is left: by its bias where there is one, else by a large
    constant part of z (the bias of the norm) that most rows of the map read with a minus sign."""
    blocks = [block for block in bind(model).blocks if isinstance(block, DenseBlock)]
    for block in blocks:
        linear = block.input_maps[0]
        silent = slice(int(keep * linear.weight.shape[0]), None)
        norm_bias = None if block.norm_pre is None else block.norm_pre._parameters.get("bias")
        if linear.bias is not None:
            linear.bias[silent] -= 100.0
        elif norm_bias is not None:
            norm_bias.data += 5.0
            linear.weight[silent] -= 0.5
    return blocks


@pytest.mark.parametrize(("model_type", "share"), [("opt", 0.85), ("nemotron", 0.8), ("arcee", 0.3)])
def test_a_rectified_model_is_folded_exactly(model_type: str, share: float) -> None:
    model = build(model_type)
    blocks = silence(model, 0.15)
    folded = fold_token(model, CONTEXT, QUERY)
    with recording(blocks, slice(-1, None), "h") as states:
        unpatched = run(model, folded.split.reduced)[0]
    zeros = torch.cat([state["h"].flatten() for state in states]) == 0
    assert float(zeros.double().mean()) > share
    with materialised(model, folded.patch):
        met = run(model, folded.split.reduced)[0]

    def gap(logits: Tensor) -> float:
        return float((logits - folded.in_context).abs().max())

    assert gap(unpatched) > 1e-3
    assert gap(met) < 1e-6 * gap(unpatched) + 1e-9


def test_the_theorem_names_a_zero_entry_of_u_and_the_default_passes_it() -> None:
    model = build("gemma3_text")
    bind(model).blocks[1].anchor[3] = 0
    with pytest.raises(NotControllable, match="layer 1: zero activation") as refused:
        fold_token(model, CONTEXT, QUERY, rule="theorem")
    assert refused.value.findings[0].outcome is Outcome.ZERO_ACTIVATION
    folded = fold_token(model, CONTEXT, QUERY)
    with materialised(model, folded.patch):
        met = run(model, folded.split.reduced)[0]
    assert float((met - folded.in_context).abs().max()) < 1e-5
