"""The rivals of baking, on a tiny model: each acts, leaves the model as it was, and learns what a context does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests import tiny

from contextfold.anatomy import Bound, bind
from contextfold.bake import Example, Frame, answered

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from baking.distil import Distillation
from baking.judge import Judge
from baking.rival import STEPS, prefix_cache
from baking.ways import Bake, Batch, Nothing, Steering, TokenAverage, Way

FRAME = Frame(tiny.tokens(2, seed=3), tiny.tokens(9, seed=4))


def asked(bound: Bound, count: int) -> tuple[Example, ...]:
    return answered(bound, FRAME.full, [tiny.tokens(3 + i % 4, seed=50 + i) for i in range(count)], tokens=4)


@pytest.mark.parametrize(
    ("way", "least"),
    [
        (Bake("two-sites", method="two-sites"), 0.9),
        (Distillation("distillation", budget=2.0, rank=8), 0.5),
        (Batch("batch"), 0.02),
        (Steering("steering vector"), 0.02),
        (TokenAverage("token average"), 0.02),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_is_learnt_acts_and_goes(way: Way, least: float) -> None:
    bound = bind(tiny.build("llama", dtype=torch.float32))
    examples = asked(bound, 6)
    before = tiny.bits(bound.model)
    judge = Judge.of(bound, FRAME, examples)
    bare = judge().mean
    learnt = way.learn(bound, FRAME, examples)
    with learnt.acting():
        assert judge().mean < (1 - least) * bare
    assert judge().mean == bare
    assert tiny.bits(bound.model) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in bound.model.modules())


def test_a_judge_knows_the_context() -> None:
    bound = bind(tiny.build("llama"))
    judge = Judge.of(bound, FRAME, asked(bound, 3))
    assert judge(FRAME.full).mean < 1e-12 < 1e-3 < judge().mean
    assert judge(FRAME.full).top1 == 1.0
    with Nothing("none").learn(bound, FRAME, ()).acting():
        assert judge().mean > 1e-3


def test_a_prefix_is_as_large_as_its_keys_and_values() -> None:
    bound = bind(tiny.build("llama"))
    row = prefix_cache(bound, 200)
    heads, head_dim, layers, width = 2, 8, 3, 8
    assert row["bytes"] == 200 * 2 * heads * head_dim * layers * width
    assert row["ms_per_token"] > 0
    assert "256 positions" in prefix_cache(bound, 256 - STEPS + 1)["skipped"]
