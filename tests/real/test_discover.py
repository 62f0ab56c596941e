"""Discovery on the two real models: the sites of the records, in seconds."""

from __future__ import annotations

import time

import pytest
import torch

from contextfold import models
from contextfold.anatomy import bind
from contextfold.anatomy.discover import discover

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_discovered_and_recorded_anatomy_agree(name):
    model = models.load(name, dtype=torch.float32).model
    start = time.perf_counter()
    family = discover(model)
    assert time.perf_counter() - start < 60  # the whole model, proof included
    recorded, found = bind(model), bind(model, family)
    assert {s for b in found.blocks for s in b.sites} == {s for b in recorded.blocks for s in b.sites}
    assert [b.norm_post and b.norm_post.offset for b in found.blocks] == [
        b.norm_post and b.norm_post.offset for b in recorded.blocks
    ]
