"""Token-exact folding. The oracle is always the model itself with the context in its window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from contextfold.anatomy import bind
from contextfold.errors import InputError, NotControllable
from contextfold.fold import SINK, fold_token, token_targets
from contextfold.outcomes import Outcome
from contextfold.patch import MatrixEdit, ScaleEdit
from contextfold.rules import REFERENCES
from contextfold.runtime import applied, materialised, run
from tiny import FLOAT32_NORMS, POST_NORM, TYPES, WITHOUT_SDPA, bits, build, shared, tokens

CONTEXT, QUERY = tokens(11), tokens(3, seed=2)
RULES = [r.name for r in REFERENCES]


def oracle(model, count=1):
    """In-context logits from transformers alone: one forward over all tokens, positions by default."""
    return model(torch.cat([CONTEXT, QUERY])[None]).logits[0, -count:]


def gaps(model, folded, way):
    """(patched, unpatched) largest logit gap to the oracle, relative to the unpatched one."""
    wanted = oracle(model)[0]
    with way(model, folded.patch):
        patched = run(model, folded.split.reduced)[0]
    unpatched = run(model, folded.split.reduced)[0]
    without = float((wanted - unpatched).abs().max())
    assert without > 0.1, "the context does nothing here, so the test would prove nothing"
    return float((wanted - patched).abs().max()) / without


@pytest.mark.parametrize("keep", [(), SINK, ((2, 5), (7, 8)), ((0, 1), (3, 4))], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", TYPES)
def test_exact_in_every_family(model_type, attention, keep):
    if attention == "sdpa" and model_type in WITHOUT_SDPA:
        pytest.skip(f"{model_type} has no sdpa attention")
    model = build(model_type, attention=attention)
    folded = fold_token(model, CONTEXT, QUERY, keep=keep)
    assert gaps(model, folded, materialised) < FLOAT32_NORMS
    assert gaps(model, folded, applied) < FLOAT32_NORMS
    assert max(layer.relative_error for layer in folded.layers) < FLOAT32_NORMS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model_type", POST_NORM)
def test_every_member_of_the_post_norm_class_is_exact(model_type, rule):
    model = build(model_type)
    folded = fold_token(model, CONTEXT, QUERY, rule=rule)
    assert gaps(model, folded, materialised) < 1e-4 if rule == "theorem" else FLOAT32_NORMS
    assert folded.patch.header.plan[-1].endswith(rule)


def test_the_theorem_leaves_the_output_map_alone():
    folded = fold_token(shared("gemma3_text"), CONTEXT, QUERY, rule="theorem")
    edited = {site.module.rpartition(".")[2] for site in folded.patch.edits}
    assert edited == {"gate_proj", "up_proj", "post_feedforward_layernorm"}


@pytest.mark.parametrize("mistake", ["sign", "layer", "scale", "kind"])
def test_the_suite_can_fail(mistake):
    """A wrong sign, a forgotten layer, a 1 + w mistake and a forgotten kind of edit are all visible."""
    model = build("gemma3_text")
    folded = fold_token(model, CONTEXT, QUERY)
    edits = dict(folded.patch.edits)
    match mistake:
        case "sign":
            broken = {s: e.scaled(-1.0) if isinstance(e, MatrixEdit) else e for s, e in edits.items()}
        case "layer":
            broken = {s: e for s, e in edits.items() if s.layer != 1}
        case "scale":
            broken = {
                s: ScaleEdit(e.base, e.value, 1 - e.offset) if isinstance(e, ScaleEdit) else e for s, e in edits.items()
            }
        case "kind":
            broken = {s: e for s, e in edits.items() if not isinstance(e, ScaleEdit)}
    bad = replace(folded, patch=replace(folded.patch, edits=broken))
    assert gaps(model, bad, materialised) > 1e-3


@pytest.mark.parametrize("keep", [(), SINK], ids=["alone", "sink"])
def test_ranks_are_one_per_position_that_changes(keep):
    """The sink is another source, with the wanted change zero: it shapes the edit and adds no rank."""
    patch = fold_token(shared("llama"), CONTEXT, QUERY, keep=keep).patch
    assert {e.delta.rank for e in patch.edits.values() if isinstance(e, MatrixEdit)} == {1}


def test_the_sink_stays_where_it_was():
    """Matrix edits leave what the sink token computes alone: hidden states after the last block are equal."""
    model = build("llama")
    folded = fold_token(model, CONTEXT, QUERY, keep=SINK)
    before = run(model, folded.split.reduced, last=4)[0]
    with materialised(model, folded.patch):
        after = run(model, folded.split.reduced, last=4)
    assert torch.allclose(before, after[0], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(run(model, folded.split.reduced)[0], after[-1], rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_rounding_is_measured_and_corrected(model_type, dtype):
    """Written weights are re-measured after rounding, so errors do not pile up over the layers."""
    model = build(model_type, dtype)
    folded = fold_token(model, CONTEXT, QUERY)
    limit = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    assert gaps(model, folded, materialised) < limit
    action = fold_token(model, CONTEXT, QUERY, written=False)
    assert gaps(model, action, applied) < limit


def test_targets_are_seen_once_for_several_folds():
    model = build("gemma3_text")
    bound = bind(model)
    calls = []
    handle = model.register_forward_pre_hook(
        lambda m, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    targets = token_targets(bound, CONTEXT, QUERY)
    for keep in ((), SINK):
        again = fold_token(bound, CONTEXT, QUERY, keep=keep, targets=targets)
        afresh = fold_token(bound, CONTEXT, QUERY, keep=keep)
        assert torch.equal(again.in_context, afresh.in_context)
        for a, b in zip(again.patch.edits.values(), afresh.patch.edits.values(), strict=True):
            assert torch.equal(a.value, b.value) if isinstance(a, ScaleEdit) else torch.equal(a.delta.B, b.delta.B)
    handle.remove()
    assert calls == [14, 3, 14, 3, 4, 14, 4]


def test_targets_of_other_tokens_or_weights_are_refused():
    model = build("llama")
    bound = bind(model)
    targets = token_targets(bound, CONTEXT, QUERY)
    with pytest.raises(InputError, match="other tokens"):
        fold_token(bound, CONTEXT, QUERY.flip(0), targets=targets)
    with pytest.raises(InputError, match="other model"):
        fold_token(shared("llama"), CONTEXT, QUERY, targets=targets)
    model.get_submodule("model.layers.0.mlp.up_proj").weight.data.mul_(1.5)
    with pytest.raises(InputError, match="other weights"):
        fold_token(bound, CONTEXT, QUERY, targets=targets)


def test_positions_absolute_and_renumbered_agree_on_rotary_models():
    """Nothing but a shift changes when the sink is dropped, and rotary attention does not see a shift."""
    model = shared("llama")
    for positions, first in (("absolute", 11), ("renumbered", 0)):
        folded = fold_token(model, CONTEXT, QUERY, keep=(), positions=positions)
        assert folded.split.reduced.positions[0] == first
        assert gaps(model, folded, materialised) < FLOAT32_NORMS


def test_a_gap_in_the_positions_is_not_taken_for_packed_sequences():
    """With the sink kept, positions jump; the query must still see the sink."""
    model = shared("llama")
    folded = fold_token(model, CONTEXT, QUERY, keep=SINK)
    seen = run(model, folded.split.reduced)[0]
    alone = fold_token(model, CONTEXT, QUERY, keep=())
    assert not torch.allclose(seen, run(model, alone.split.reduced)[0], rtol=1e-3)
    model_eager = build("llama", attention="eager")
    model_sdpa = build("llama", attention="sdpa")
    both = [run(m, folded.split.reduced)[0] for m in (model_eager, model_sdpa)]
    assert torch.allclose(*both, rtol=1e-4, atol=1e-4)  # eager attention computes its softmax in float32


def test_same_patch_bits_every_time():
    first, second = (fold_token(shared("gemma3_text"), CONTEXT, QUERY).patch for _ in range(2))
    for (site, a), b in zip(first.edits.items(), second.edits.values(), strict=True):
        same = torch.equal(a.value, b.value) if isinstance(a, ScaleEdit) else torch.equal(a.delta.B, b.delta.B)
        assert same, site


def poison(model, path, **values):
    """Overwrite weights so that a letter becomes exactly zero."""
    for name, value in values.items():
        model.get_submodule(path).get_parameter(name).data[...] = value
    return model


def test_zero_z_is_named_and_still_exact():
    """A pre-norm whose scale is zero: z = 0, no input map can be steered, biases keep h alive."""
    model = poison(build("llama"), "model.layers.1.post_attention_layernorm", weight=0.0)
    folded = fold_token(model, CONTEXT, QUERY)
    assert folded.layers[1].outcome == Outcome.SINK_MOVED.label  # h is the biases' for every token
    assert gaps(model, folded, materialised) < FLOAT32_NORMS


def test_zero_h_is_refused_by_name():
    model = poison(build("qwen2"), "model.layers.1.mlp.up_proj", weight=0.0)
    with pytest.raises(NotControllable) as caught:
        fold_token(model, CONTEXT, QUERY)
    assert caught.value.findings[0].outcome is Outcome.ZERO_SOURCE
    assert "layer 1" in str(caught.value)


@pytest.mark.parametrize(("rule", "outcome"), [("scalar", Outcome.TINY_SCALE), ("appendix", Outcome.TINY_SCALE)])
def test_zero_scale_is_named_and_the_default_is_exact(rule, outcome):
    model = build("gemma3_text")
    model.get_submodule("model.layers.1.post_feedforward_layernorm").weight.data[[3, 9]] = -1.0  # m = 1 + w = 0
    with pytest.raises(NotControllable) as caught:
        fold_token(model, CONTEXT, QUERY, rule=rule)
    assert caught.value.findings[0].outcome is outcome
    folded = fold_token(model, CONTEXT, QUERY)
    assert gaps(model, folded, materialised) < FLOAT32_NORMS
    fallen = fold_token(model, CONTEXT, QUERY, rule=rule, fallback="floored")
    assert Outcome.FELL_BACK in {f.outcome for f in fallen.layers[1].findings}
    assert gaps(model, fallen, materialised) < FLOAT32_NORMS


def test_zero_activation_is_named_and_the_default_is_exact():
    """Rows of the output map that are zero make u_i exactly zero: the paper's division by zero."""
    model = build("gemma3_text")
    model.get_submodule("model.layers.1.mlp.down_proj").weight.data[[3, 9]] = 0.0
    with pytest.raises(NotControllable) as caught:
        fold_token(model, CONTEXT, QUERY, rule="theorem")
    assert caught.value.findings[0].outcome is Outcome.ZERO_ACTIVATION
    folded = fold_token(model, CONTEXT, QUERY)
    assert gaps(model, folded, materialised) < FLOAT32_NORMS


def test_infinite_activations_are_refused_by_name():
    model = build("qwen2")
    bound = bind(model)
    handle = model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *a: a[2] * float("inf"))
    with pytest.raises(NotControllable) as caught:
        fold_token(bound, CONTEXT, QUERY)
    handle.remove()
    assert caught.value.findings[0].outcome is Outcome.NOT_FINITE


def test_overflow_of_half_precision_is_refused_and_the_model_restored():
    """A nearly dead row makes u_i tiny, and the theorem's scale larger than float16 holds."""
    model = build("gemma3_text", torch.float16)
    model.get_submodule("model.layers.1.mlp.down_proj").weight.data[3] *= 1e-6
    before = bits(model)
    with pytest.raises(NotControllable) as caught:
        fold_token(model, CONTEXT, QUERY, rule="theorem")
    assert caught.value.findings[0].outcome is Outcome.OVERFLOW
    assert bits(model) == before
    assert gaps(model, fold_token(model, CONTEXT, QUERY), materialised) < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": torch.empty(0, dtype=torch.int64)}, "empty"),
        ({"context": CONTEXT[None]}, "1-D"),
        ({"context": CONTEXT.float()}, "integer"),
        ({"query": torch.tensor([10**6])}, "vocabulary|outside"),
        ({"keep": ((3, 99),)}, "not inside the context"),
        ({"keep": ((0, 11),)}, "nothing to fold"),
        ({"rule": "magic"}, "choose one of"),
        ({"fallback": "magic"}, "choose one of"),
        ({"positions": "backwards"}, "absolute"),
        ({"context": tokens(300)}, "positions"),
    ],
)
def test_bad_input_says_what_to_do(change, message):
    arguments = {"context": CONTEXT, "query": QUERY, **change}
    with pytest.raises(InputError, match=message):
        fold_token(shared("llama"), arguments.pop("context"), arguments.pop("query"), **arguments)
