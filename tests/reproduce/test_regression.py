"""In-context linear regression: the trained models, the course of updates, and updates at every position.

Oracles: sums written out, attention written out, and a model edited by hand.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from contextfold.reproduce import paper_named
from contextfold.reproduce.arxiv_2507_16003 import decay
from contextfold.reproduce.implicit import RATES, measure_block, measure_stack
from contextfold.reproduce.positions import measure_positions
from contextfold.reproduce.regression import Attention, Recipe, Regressor, Shape, draw, trained

RECIPE = {"steps": 30, "tasks": 32, "rate": 5e-3, "points": 10, "inputs": 2}
BLOCK = {"layers": 1, "width": 8, "heads": 2, "hidden": 16, "skip": False}


def nothing() -> None:
    pass


def test_tasks_are_linear_and_the_query_hides_its_answer():
    batch = draw(5, 7, 3, torch.Generator().manual_seed(0))
    x, y = batch.tokens[..., :-1], batch.tokens[..., -1]
    assert torch.allclose(y[:, :-1], (x[:, :-1] * batch.weights[:, None]).sum(-1))
    assert torch.equal(y[:, -1], torch.zeros(5))
    assert torch.allclose(batch.y, (x[:, -1] * batch.weights).sum(-1))


def test_attention_is_causal_softmax():
    torch.manual_seed(0)
    layer, x = Attention(6, 2).double(), torch.randn(1, 5, 6).double()
    W_q, W_k, W_v = layer.qkv.weight.chunk(3)
    heads = []
    for h in range(2):
        rows = slice(3 * h, 3 * h + 3)
        q, k, v = x[0] @ W_q[rows].T, x[0] @ W_k[rows].T, x[0] @ W_v[rows].T
        scores = (q @ k.T / math.sqrt(3)).masked_fill(torch.triu(torch.ones(5, 5), 1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    assert torch.allclose(layer(x)[0], torch.cat(heads, 1) @ layer.out.weight.T)


def test_training_learns_and_repeats_itself():
    shape, recipe = Shape("attention", **BLOCK), Recipe(**{**RECIPE, "steps": 200, "rate": 2e-2})
    model, losses = trained(shape, recipe, 0)
    again, same = trained(shape, recipe, 0)
    assert losses == same
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    batch = draw(200, 10, 2, torch.Generator().manual_seed(7))
    seen = (batch.tokens, batch.tokens[:, -1:])
    with_context, without = (float((model.answer(model(t)[:, -1]) - batch.y).square().mean()) for t in seen)
    assert with_context < 0.6 * without
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert trained(shape, recipe, 1)[1] != losses


@pytest.mark.parametrize("mixing", ["attention", "gru"])
def test_the_theorem_holds_on_a_block_and_its_control_does_not(mixing):
    found = measure_block(
        None, nothing, shape={"mixing": mixing, **BLOCK}, recipe=RECIPE, tasks=4, seed=0, queries=(1, 5, 40)
    )  # fmt: skip
    gaps = found["theorem"]
    assert len(gaps["patched"]) == len(gaps["unpatched"]) == 4
    assert len(gaps["other_task"]) == 3  # the first has no task before it
    assert max(gaps["patched"]) < 1e-5 * min(gaps["unpatched"])
    assert min(gaps["other_task"]) > 1e3 * max(gaps["patched"])
    # The context's effect on the unpatched error, by a plain call.
    model, _ = trained(Shape(mixing, **BLOCK), Recipe(**RECIPE), 0)
    batch = draw(4, 10, 2, torch.Generator().manual_seed(10_000))
    bare = [float((model(t[None])[0, -1] - model(t[None, -1:])[0, -1]).norm()) for t in batch.tokens]
    assert gaps["unpatched"] == pytest.approx(bare, rel=1e-5)


def test_steps_are_those_of_the_formula():
    """`‖W_(i+1) - W_i‖ = ‖W (a_(i+1) - a_i)‖ / ‖a_0‖`, a_i by running each prefix."""
    shape = {"mixing": "attention", **BLOCK}
    found = measure_block(None, nothing, shape=shape, recipe=RECIPE, tasks=2, seed=0, queries=(1, 40))
    model, _ = trained(Shape(**shape), Recipe(**RECIPE), 0)
    block, batch = model.blocks[0], draw(2, 10, 2, torch.Generator().manual_seed(10_000))
    for tokens, steps in zip(batch.tokens, found["step_norm"], strict=True):
        a = []
        for i in range(11):
            seen: list[torch.Tensor] = []
            hook = block.up.register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(args[0][0, -1]))
            model(torch.cat([tokens[:i], tokens[-1:]])[None])
            hook.remove()
            a.append(seen[0].double())
        W = block.up.weight.double()
        wanted = [float((W @ (a[i + 1] - a[i])).norm() / a[0].norm()) for i in range(10)]
        assert steps == pytest.approx(wanted, rel=1e-4)
    # By the theorem, the curve of implicit updates is the model's own error with i points.
    prefixes = [torch.cat([batch.tokens[:, :i], batch.tokens[:, -1:]], 1) for i in range(11)]
    errors = [float((model.answer(model(p)[:, -1]) - batch.y).square().mean()) for p in prefixes]
    assert found["sgd"]["implicit"] == pytest.approx(errors, rel=1e-4)


def test_sgd_beside_it_is_torch_s_own():
    shape = {"mixing": "gru", **BLOCK}
    found = measure_block(None, nothing, shape=shape, recipe=RECIPE, tasks=2, seed=0, queries=(1, 40))
    batch = draw(2, 10, 2, torch.Generator().manual_seed(10_000))
    rate, errors = RATES[1], []
    for tokens, y in zip(batch.tokens, batch.y, strict=True):
        model, _ = trained(Shape(**shape), Recipe(**RECIPE), 0)
        weight = model.blocks[0].up.weight.requires_grad_(True)
        optimiser = torch.optim.SGD([weight], lr=rate)
        curve = []
        for point in [None, *tokens[:-1]]:
            if point is not None:
                with torch.enable_grad():
                    asked = torch.cat([point[:-1], torch.zeros(1)])
                    loss = 0.5 * (model.answer(model(asked[None, None])[0, -1]) - point[-1]).square()
                    optimiser.zero_grad()
                    loss.backward()
                optimiser.step()
            with torch.no_grad():
                curve.append(float((model.answer(model(tokens[None, -1:])[0, -1]) - y).square()))
        errors.append(curve)
    wanted = torch.tensor(errors).mean(0).tolist()
    assert found["sgd"]["sgd"][f"{rate:g}"] == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_a_power_law_is_found_and_a_level_course_is_not_called_decaying():
    i = torch.arange(1, 51).double()
    assert decay([(3 / i).tolist()] * 2) == pytest.approx(-1.0)
    assert decay([i.pow(-0.5).tolist()]) == pytest.approx(-0.5)
    noise = torch.rand(30, 50, generator=torch.Generator().manual_seed(0)).double() + 0.5
    assert abs(decay(noise.tolist())) < 0.2


def test_a_stack_is_met_block_by_block():
    shape = {"mixing": "attention", "layers": 3, "width": 8, "heads": 2, "hidden": 16, "norms": True}
    found = measure_stack(None, nothing, shape=shape, recipe=RECIPE, tasks=3, seed=0)
    assert max(found["theorem"]["patched"]) < 1e-5 * min(found["theorem"]["unpatched"])
    assert found["loss"]["without"] > 0


@pytest.mark.parametrize("norms", [False, True])
def test_every_position_of_every_block_is_met(norms):
    shape = {"mixing": "attention", "layers": 2, "width": 3, "heads": 3, "hidden": 12, "inner": 2, "embed": False}
    shape |= {"norms": norms}
    advanced: list[int] = []
    found = measure_positions(
        None, lambda: advanced.append(1), shape=shape, recipe=RECIPE, tasks=2, seeds=(0, 1)
    )  # fmt: skip
    assert len(advanced) == 2 * RECIPE["steps"]
    for seed in [*found["seeds"], found["untrained"]]:
        for block in seed["blocks"]:
            assert block["squared_gap"] < 1e-9 * block["unpatched_squared_gap"]
            assert block["unpatched_squared_gap"] > 1e-2
            assert block["rank"] == 1
            assert len(block["norms"]) == 11
        assert [row[i] for i, row in enumerate(seed["between_blocks"])] == pytest.approx([1.0, 1.0])
    # The first block's updates by hand: cosines of W (z_i - z), since all share the vector that they read.
    model, _ = trained(Shape(**shape), Recipe(**RECIPE), 0)
    assert isinstance(model, Regressor)
    block, batch = model.blocks[0], draw(2, 10, 2, torch.Generator().manual_seed(10_000))
    inner, last, norms_by_hand = [], [], []
    for tokens in batch.tokens:
        z_C = block.norm2(tokens + block.mixer(block.norm1(tokens[None]))[0])
        query = tokens[-1:]
        z = block.norm2(query + block.mixer(block.norm1(query[None]))[0])[0]
        heads = ((z_C - z) @ block.up.weight.T).double()
        cosines = torch.cosine_similarity(heads[:, None], heads[None], -1)
        inner.append(float((cosines[:-1, :-1].sum() - 10) / 90))
        last.append(float(cosines[-1, :-1].mean()))
        norms_by_hand.append(heads.norm(dim=1) / z.double().norm())
    first = found["seeds"][0]["blocks"][0]
    assert first["alignment_context"] == pytest.approx(sum(inner) / 2, rel=1e-3)
    assert first["alignment_last"] == pytest.approx(sum(last) / 2, rel=1e-3)
    assert first["norms"] == pytest.approx(torch.stack(norms_by_hand).mean(0).tolist(), rel=1e-3)


@pytest.mark.parametrize("number", ["2507.16003", "2512.11255"])
def test_the_command_prints_words_beside_words(call, tmp_path, number):
    asked = ("reproduce", number, "--quick", "--work", tmp_path / "w", "--json")
    code, printed, _ = call(*asked, "--out", tmp_path / "out.json", "--report", tmp_path / "page.html")
    assert code == 0
    found = json.loads(printed)
    assert found["model"] is None
    assert found["paper"] == paper_named(number).number
    assert any(isinstance(row["published"], str) for row in found["rows"])
    assert all(row["difference"] is None or isinstance(row["published"], float) for row in found["rows"])
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert call(*asked[:-1])[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "Quick form" in page
    for k, row in enumerate(found["rows"]):
        ours = row["ours"]
        assert (f'value="{ours}" data-key="rows/{k}/ours"' if isinstance(ours, float | int) else ours) in page
    code, printed, said = call("reproduce", number, "--model", "smollm2", "--work", tmp_path / "w")
    assert (code, printed) == (2, "")
    assert "trains its own models" in said
