"""The main paper's experiment at a tiny size. Oracles: plain calls of the model, and the printed formulas by hand."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

import tiny
from contextfold.anatomy import bind
from contextfold.fold import split
from contextfold.reproduce.arxiv_2511_17864 import PAPER
from contextfold.reproduce.curves import CURVES, Curve, Magnitudes, Solved, measure_prompt, step_of
from contextfold.reproduce.printed import PRINTED, fold_as_printed, in_context_states
from contextfold.reproduce.rectified import measure_rectified, rectified
from contextfold.runtime import applied, materialised, recording, run

STEPS = 5


def alone(model, token: int, position: int) -> Tensor:
    """Logits `(V,)` after one token at its own position, by a plain call."""
    at = torch.tensor([[position]])
    return model(input_ids=torch.tensor([[token]]), position_ids=at, attention_mask=torch.ones_like(at)).logits[0, -1]


@pytest.fixture(scope="module")
def measured():
    model = tiny.build("gemma3_text", torch.float32)
    prompt = tiny.tokens(9)
    return model, prompt, measure_prompt(bind(model), prompt, STEPS)


def test_the_baseline_is_what_the_model_generates(measured):
    model, prompt, found = measured
    text = prompt
    for _ in range(STEPS):
        text = torch.cat([text, model(input_ids=text[None]).logits[0, -1:].argmax(-1)])
    assert found["unpatched"]["in_context"] == text[len(prompt) :].tolist()
    wanted = model(input_ids=prompt[None]).logits[0, -1]
    gap = float((alone(model, int(prompt[-1]), len(prompt) - 1) - wanted).abs().max())
    assert found["unpatched"]["logit_gap"][0] == pytest.approx(gap, rel=1e-4)


def test_every_update_meets_the_model_with_the_context(measured):
    _, _, found = measured
    assert list(found["curves"]) == [curve.name for curve in CURVES]
    assert min(found["unpatched"]["logit_gap"]) > 0.1
    for curve in CURVES:
        ways = found["curves"][curve.name]
        assert {"written", "action"} <= set(ways) or not curve.in_every_way
        for way in set(ways) & {"written", "action"}:
            assert ways[way]["same"] == [True] * STEPS
            assert max(ways[way]["logit_gap"]) < 1e-3
        assert ways["free"] == found["unpatched"]["in_context"]


def test_a_wrong_update_does_not_agree_and_runs_free_on_its_own_words():
    """The control: nothing is edited, so the model sees one token at a time and knows of no other."""
    model = tiny.build("gemma3_text", torch.float32)
    prompt = tiny.tokens(9)
    theorem = CURVES[0]

    def nothing(step, written):
        return Solved(theorem.solve(step, written).patch.select([]), {})

    def wrong_sign(step, written):
        return Solved(theorem.solve(step, written).patch * -1.0, {})

    curves = [Curve("nothing", nothing, False), Curve("wrong sign", wrong_sign, False)]
    found = measure_prompt(bind(model), prompt, STEPS, curves)
    said = [int(prompt[-1])]
    for k in range(STEPS):
        said.append(int(alone(model, said[-1], len(prompt) - 1 + k).argmax()))
    assert found["curves"]["nothing"]["free"] == said[1:]
    assert found["curves"]["nothing"]["written"]["logit_gap"] == found["unpatched"]["logit_gap"]
    assert found["curves"]["nothing"]["free"] != found["unpatched"]["in_context"]
    assert min(found["curves"]["wrong sign"]["written"]["logit_gap"]) > 0.1
    assert sum(found["curves"]["wrong sign"]["written"]["same"]) < STEPS


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("rule", PRINTED)
@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma2", "llama"])
def test_the_printed_updates_are_exact_in_exact_arithmetic(model_type, rule, written):
    model = tiny.build(model_type, torch.float64)
    bound, ids = bind(model), tiny.tokens(12)
    parts = split(bound, ids[:-1], ids[-1:], ())
    with in_context_states(bound) as states:
        wanted = run(model, parts.full)[0]
    printed = fold_as_printed(bound, parts, states, rule, written=written)
    before = float((run(model, parts.reduced)[0] - wanted).abs().max())
    with (materialised if written else applied)(bound, printed.patch):
        after = float((run(model, parts.reduced)[0] - wanted).abs().max())
    assert before > 0.1
    assert after < tiny.FLOAT32_NORMS * before
    assert printed.hard_cases == printed.zero_divisions == 0


def test_the_printed_theorem_is_the_formula():
    """Equations (2) to (4) on the first block, from tensors that hooks of our own saw."""
    model = tiny.build("gemma3_text", torch.float64)
    bound, ids = bind(model), tiny.tokens(12)
    layer = model.model.layers[0]
    parts = split(bound, ids[:-1], ids[-1:], ())

    def seen(tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            norms = {"v": layer.pre_feedforward_layernorm, "q": layer.post_feedforward_layernorm}
            for name, module in {**norms, "z": layer.mlp.gate_proj}.items():
                hook = module.register_forward_pre_hook(lambda _m, a, name=name: found.update({name: a[0][0, -1]}))
                stack.callback(hook.remove)
            model(input_ids=tokens[None], position_ids=positions[None], attention_mask=torch.ones(1, len(tokens)))
        return found

    full, reduced = seen(ids, torch.arange(12)), seen(ids[-1:], torch.tensor([11]))
    with in_context_states(bound) as states:
        run(model, parts.full)
    edits = {site.name: edit for site, edit in fold_as_printed(bound, parts, states).patch.edits.items()}
    z, z_C = reduced["z"], full["z"]
    for name in ("gate_proj", "up_proj"):
        W = getattr(layer.mlp, name).weight
        wanted = torch.outer(W @ (z_C - z), z) / (z @ z)
        assert torch.allclose(edits[f"model.layers.0.mlp.{name}.weight"].delta.B @ edits[
            f"model.layers.0.mlp.{name}.weight"
        ].delta.A, wanted, atol=1e-9)  # fmt: skip
    h = full["q"] / torch.sqrt(full["q"].square().mean() + layer.post_feedforward_layernorm.eps)
    scale = edits["model.layers.0.post_feedforward_layernorm.weight"]
    assert torch.allclose(scale.value - scale.base, (full["v"] - reduced["v"]) / h, rtol=1e-6)


@pytest.mark.parametrize("layer", [1, 2])
def test_the_printed_appendix_loses_what_a_zero_scale_would_have_to_give(layer):
    """Its remainder is divided by one there. Layers above make up for the entry; above the last there is none."""
    model = tiny.build("gemma3_text", torch.float64)
    model.model.layers[layer].post_feedforward_layernorm.weight.data[5] = -1.0  # m = 1 + w
    bound, ids = bind(model), tiny.tokens(12)
    parts = split(bound, ids[:-1], ids[-1:], ())
    with in_context_states(bound) as states, recording(bound.blocks, slice(-1, None), "y") as wanted:
        logits = run(model, parts.full)[0]
    y_C = [state["y"][0] for state in wanted]
    printed = fold_as_printed(bound, parts, states, "appendix")
    assert (printed.zero_divisions, printed.hard_cases) == (1, 0)
    with materialised(bound, printed.patch), recording(bound.blocks, slice(-1, None), "y") as found:
        gap = float((run(model, parts.reduced)[0] - logits).abs().max())
    missed = [(state["y"][0] - y).abs() for state, y in zip(found, y_C, strict=True)]
    assert int(missed[layer].argmax()) == 5
    assert float(missed[layer][5]) > 0.1
    assert float(missed[layer].sum() - missed[layer][5]) < 1e-4
    assert (gap > 1e-2) == (layer == 2)


def unscaled(q: Tensor, eps: float) -> Tensor:
    return q * torch.rsqrt(q.square().mean() + eps)


def test_zero_entries_of_u_are_counted():
    model = tiny.build("gemma3_text", torch.float32)
    model.model.layers[1].mlp.down_proj.weight.data[3] = 0
    bound, sizes, counted = bind(model), [], Magnitudes()
    norms = [layer.post_feedforward_layernorm for layer in model.model.layers]
    with ExitStack() as stack:
        for norm in norms:
            hook = norm.register_forward_pre_hook(lambda m, a: sizes.append(unscaled(a[0][0, -1], m.eps)))
            stack.callback(hook.remove)
        for count in (7, 8):
            model(input_ids=tiny.tokens(count)[None])
    for count in (7, 8):
        counted.add(bound, step_of(bound, tiny.tokens(count)).states)
    assert counted.zeros == [0, 2, 0]
    assert counted.tokens_with_zeros == 2
    u = torch.stack(sizes).view(2, 3, -1).double().abs()
    assert counted.smallest == pytest.approx(u.amin((0, 2)).tolist(), rel=1e-3, abs=1e-12)
    assert [sum(row) for row in counted.counts] == [2 * u.shape[-1]] * 3
    below = (u < 1e-2).sum((0, 2)).tolist()
    assert [sum(row[:13]) for row in counted.counts] == below


def test_a_held_patch_is_right_at_its_own_step(measured):
    model, prompt, found = measured
    for rule in ("theorem", "balanced"):
        assert found["held"][rule]["alone"][0][0]
        assert found["held"][rule]["since"][0][0]
        assert len(found["held"][rule]["alone"][0]) == STEPS
    history = torch.tensor([*prompt.tolist(), *found["unpatched"]["in_context"]])
    bound = bind(model)
    patch = CURVES[2].solve(step_of(bound, prompt), True).patch
    with materialised(bound, patch):
        said = [
            int(alone(model, int(history[len(prompt) - 1 + k]), len(prompt) - 1 + k).argmax()) for k in range(STEPS)
        ]
    same = [a == b for a, b in zip(said, found["unpatched"]["in_context"], strict=True)]
    assert found["held"]["balanced"]["alone"][0] == same


@pytest.mark.parametrize(("model_type", "rule"), [("opt", "balanced"), ("gemma3_text", "theorem")])
def test_a_rectified_model_is_full_of_zeros_and_met_all_the_same(model_type, rule):
    found = measure_rectified(
        None, lambda: None, model_type=model_type, number="float64", rules=(rule,), contexts=3, length=12
    )  # fmt: skip
    model = rectified(model_type, torch.float64, 0)
    layers = model.model.decoder.layers if model_type == "opt" else model.model.layers
    ids = torch.randint(5, 512, (3, 12), generator=torch.Generator().manual_seed(1))
    zeros = []
    with ExitStack() as stack:
        for layer in layers:
            down = layer.fc2 if model_type == "opt" else layer.mlp.down_proj
            hook = down.register_forward_pre_hook(lambda _m, a: zeros.append(a[0].view(12, -1)[-1] == 0))
            stack.callback(hook.remove)
        for row in ids:
            model(input_ids=row[None])
    assert found["h_zero_share"] == pytest.approx(float(torch.stack(zeros).double().mean()), abs=1e-12)
    assert found["h_zero_share"] > 0.3
    assert found["same"][rule] == [True] * 3
    assert max(found["logit_gap"][rule]) < 1e-5 < 1e-2 < min(found["logit_gap"]["unpatched"])


def test_the_command_runs_resumes_and_writes_what_it_prints(call, folder, tmp_path):
    asked = ("reproduce", PAPER.number, "--model", folder, "--quick", "--work", tmp_path / "w", "--json")
    code, printed, _ = call(*asked, "--out", tmp_path / "out.json")
    assert code == 0
    found = json.loads(printed)
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert found["quick"] is True
    assert found["rows"]
    published = {(row["section"].split(",")[0], row["figure"]): row["published"] for row in found["rows"][::-1]}
    assert published["bfloat16", "exact update (theorem), weights written"] == 87.5
    assert published["bfloat16", "stable update (appendix), weights written"] == 100.0
    assert published["float32", "exact update (theorem), weights written"] == 100.0
    for row in found["rows"]:
        assert set(row) == {"section", "figure", "published", "ours", "difference", "note"}
        if row["published"] is not None:
            assert row["difference"] == pytest.approx(row["ours"] - row["published"])
    assert not any(part["resumed"] for part in found["parts"])
    _, again, _ = call(*asked)
    kept = json.loads(again)
    assert all(part["resumed"] for part in kept["parts"])
    assert kept["rows"] == found["rows"]
    code, screen, _ = call(*asked[:-1])
    assert code == 0
    assert "87.5" in screen
    assert "not reproduced here" in screen
