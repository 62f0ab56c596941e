"""A few-shot prompt with a decoy: the parts are ranked as brute-force removal ranks them, computed independently."""

from __future__ import annotations

import pytest
import torch

from contextfold import models, prompts
from contextfold.ablate import ablate
from contextfold.anatomy import bind

pytestmark = pytest.mark.real

SHOTS = {"hot": "hot: cold\n", "big": "big: small\n", "decoy": "tall: banana\n", "fast": "fast: slow\n"}
QUERY = "happy:"


@pytest.fixture(scope="module")
def loaded():
    return models.load("gemma3-270m", dtype=torch.float32)


@pytest.fixture(scope="module")
def found(loaded):
    ids, spans = prompts.encode_parts(loaded.tokenizer, SHOTS, QUERY)
    return ablate(bind(loaded.model), ids.context, ids.query, {name: (span,) for name, span in spans.items()})


@pytest.fixture(scope="module")
def brute(loaded):
    """Each part cut out by hand: ids from the tokenizer, logits from transformers, divergence from torch."""
    bos, *rest = loaded.tokenizer("".join(SHOTS.values()) + QUERY)["input_ids"]
    pieces = [loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*SHOTS.values(), QUERY)]
    assert rest == [token for piece in pieces for token in piece]
    ids = [bos, *rest]
    full = loaded.model(torch.tensor([ids])).logits[0, -1].double().log_softmax(0)
    costs, start = {}, 1
    for name, piece in zip(SHOTS, pieces, strict=False):
        stays = [i for i in range(len(ids)) if not start <= i < start + len(piece)]
        start += len(piece)
        cut = torch.tensor([[ids[i] for i in stays]])
        output = loaded.model(cut, position_ids=torch.tensor([stays]), attention_mask=torch.ones_like(cut))
        without = output.logits[0, -1].double().log_softmax(0)
        lost = float((full - without)[full.argmax()])
        costs[name] = (float(torch.nn.functional.kl_div(without, full, reduction="sum", log_target=True)), lost)
    return loaded.tokenizer.decode([int(full.argmax())]), costs


def test_the_model_follows_the_examples(brute):
    """Otherwise a decoy among them would mean nothing."""
    assert brute[0] == " sad"


def test_parts_are_ranked_as_by_brute_force(found, brute):
    costs = brute[1]
    assert [part.name for part in found.ranked()] == sorted(costs, key=lambda name: -costs[name][0])
    for part in found.parts:
        assert (part.kl_nats, part.answer_nats) == pytest.approx(costs[part.name], rel=1e-3, abs=1e-4)


def test_only_the_decoy_speaks_against_the_answer(found):
    assert {part.name for part in found.parts if part.answer_nats < 0} == {"decoy"}


def test_every_patch_is_proven(found):
    assert found.proven
    for part in found.parts:
        assert part.logit_gap > 1
        assert part.patched_logit_gap < 1e-4
        assert not part.keeps_sink  # BOS is in no part


def test_the_largest_patch_is_that_of_the_most_costly_part(found):
    """The norm of the patch tells the parts that matter from those that do not, not their exact order."""
    by_patch = sorted(found.parts, key=lambda part: part.patch_rank)
    assert [part.name for part in by_patch[:2]] == [part.name for part in found.ranked()[:2]]
