"""A short soak; `scripts/attack_soak.py` runs 2,000 folds and 200 bakes."""

from __future__ import annotations

from mmap import mmap
from pathlib import Path

import pytest
import torch

import soak
import tiny
from contextfold.anatomy import bind

KINDS = {"folds": (soak.folds, 10), "bakes": (soak.bakes, 2)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_work_leaves_nothing_behind(model_type, kind):
    make, count = KINDS[kind]
    bound = bind(tiny.build(model_type, torch.float32))
    work = make(bound)
    for k in range(count):  # what is looked up once is kept
        work(k)
    before = soak.left(bound)
    for k in range(count):
        work(k)
    after = soak.left(bound)
    assert after == before


def test_what_is_left_behind_is_seen():
    bound = bind(tiny.build("llama", torch.float32))
    before = soak.left(bound)
    handle = bound.model.model.norm.register_forward_hook(lambda *_: None)
    kept = [torch.zeros(1)]
    norm = bound.model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)
    with Path(__file__).open():
        after = soak.left(bound)
    handle.remove()
    assert after["hooks"] == before["hooks"] + 1
    assert after["files"] == before["files"] + 1
    assert after["tensors"] > before["tensors"]
    assert after["parameters"] != before["parameters"]
    assert after["bits"] == before["bits"]
    assert len(kept) == 1


def test_growth_and_slowing_down_are_seen():
    kept = []

    def work(k):
        # Pages from the system: memory from the heap may be what earlier tests have freed, and nothing would grow.
        kept.append(mmap(-1, 2**20))
        kept[-1].write(bytes(2**20))
        sum(range(20_000 * k))

    found = soak.course(work, 40, 5).to_json()
    assert 0.5 * 2**20 < found["bytes_per_piece"] < 2 * 2**20
    assert found["slowdown"] > 2
