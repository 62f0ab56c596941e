"""Every code path folds exactly on tiny models, every other type is refused with its reason, and mistakes are seen."""

from __future__ import annotations

import copy
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import conformance
import zoo
from conformance import DTYPES, UNPATCHED, gap, measure, tokens
from contextfold.anatomy import FAMILIES, REFUSED, Dense, Family, bind, layer
from contextfold.anatomy.families.wirings import PRE_NORM
from contextfold.errors import ProbeFailed, UnsupportedModel
from contextfold.fold import fold_token
from contextfold.patch import MatrixEdit, ScaleEdit
from contextfold.runtime import materialised, run

NO_SDPA = {"gpt_oss"}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", zoo.TWELVE)
def test_the_twelve_are_exact_in_float64(model_type, attention):
    if attention == "sdpa" and model_type in NO_SDPA:
        pytest.skip("has no sdpa")
    found = measure(model_type, attention=attention)
    assert found.unpatched > UNPATCHED
    assert found.worst <= found.limit, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", zoo.TWELVE)
def test_the_twelve_are_as_close_as_rounding_allows(model_type, dtype):
    found = measure(model_type, DTYPES[dtype])
    assert found.unpatched > UNPATCHED
    assert 0 < found.limit < 0.1
    assert found.worst <= found.limit, found


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_the_experts_implementation_is_chosen_for_the_look_and_restored(experts):
    model = zoo.build("qwen2_moe", torch.float32, experts=experts)
    folded = fold_token(model, tokens(model, 9, 3), tokens(model, 6, 103))
    assert model.config._experts_implementation == experts
    with materialised(model, folded.patch):
        assert gap(run(model, folded.split.reduced)[0], folded.in_context) < 1e-4


def test_every_registered_type_is_supported_or_refused():
    known = [name for family in FAMILIES for name in family.model_types]
    assert len(known) == len(set(known)), "a type is covered twice"
    assert not set(known) & set(REFUSED)
    assert set(zoo.MODEL_TYPES) <= set(known) | set(REFUSED)


@pytest.mark.parametrize(
    "model_type", ["rwkv", "inkling_text", "gemma3n_text", "zamba2", "hrm_text", "dory", "prophetnet"]
)
def test_refusals_name_their_reason(model_type):
    model = zoo.build(model_type)
    with pytest.raises(UnsupportedModel, match=r"cannot be folded: .{40}"):
        bind(model)


OTHER_WIRINGS = [
    ("gpt_neox", {"use_parallel_residual": False}),
    ("stablelm", {"use_parallel_residual": True}),
    ("falcon", {"parallel_attn": False, "new_decoder_architecture": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("opt", {"do_layer_norm_before": False}),
    ("llama", {"mlp_bias": True, "attention_bias": True}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    ("granitemoehybrid", {"num_local_experts": 0}),
    ("hyperclovax", {"use_post_norm": False}),
    ("lfm3", {"use_sandwich_norm": False}),
    ("qwen3_moe", {"mlp_only_layers": [1]}),
]


@pytest.mark.parametrize(("model_type", "options"), OTHER_WIRINGS)
def test_every_wiring_of_a_family_is_exact(model_type, options):
    found = conformance.measure_model(zoo.build(model_type, **options))
    assert found.unpatched > UNPATCHED
    assert found.worst <= found.limit, found


def test_a_family_is_one_record_and_can_be_added_at_run_time():
    """A model of a known form under a name that nobody has met."""
    model = zoo.build("llama")
    model.config.model_type = "newcomer"
    record = Family(
        "newcomer", ("newcomer",), "model.layers", (Dense(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", PRE_NORM),)
    )
    with pytest.raises(UnsupportedModel, match="newcomer"):
        bind(model)
    found = conformance.measure_model(model, record)
    assert found.worst <= found.limit


# Mistakes that the suite must see: each makes a patch, or a record, wrong in one way.


def _folded(model_type, dtype=torch.float64):
    model = zoo.build(model_type, dtype)
    return model, fold_token(model, tokens(model, 9, 3), tokens(model, 6, 103))


def _ratio(model, folded, edits):
    unpatched = gap(run(model, folded.split.reduced)[0], folded.in_context)
    with materialised(model, replace(folded.patch, edits=edits)):
        return gap(run(model, folded.split.reduced)[0], folded.in_context) / unpatched


def _flip(edit):
    return edit.scaled(-1.0) if isinstance(edit, MatrixEdit) else edit


@pytest.mark.parametrize("model_type", zoo.TWELVE)
def test_a_wrong_sign_is_seen(model_type):
    model, folded = _folded(model_type)
    assert _ratio(model, folded, {s: _flip(e) for s, e in folded.patch.edits.items()}) > 1e-3


@pytest.mark.parametrize("model_type", zoo.TWELVE)
def test_a_skipped_site_is_seen(model_type):
    """Any one site of a block: its other edits were solved for it.

    A parallel block reads what the layers below have made right already, so its input maps have nothing to change.
    """
    model, folded = _folded(model_type)
    sites = [s for s, e in folded.patch.edits.items() if s.layer == 2 and e.size() > 1e-6]
    assert sites
    for skipped in sites:
        rest = {s: e for s, e in folded.patch.edits.items() if s != skipped}
        assert _ratio(model, folded, rest) > 1e-6, skipped.name


def _in_roundings(model, folded, edits):
    """The gap of a patch with these `edits`, in units of what rounding does to the model's own logits."""
    rounding = conformance.own_rounding(model, folded.split.full, folded.in_context)
    with materialised(model, replace(folded.patch, edits=edits)):
        return gap(run(model, folded.split.reduced)[0], folded.in_context) / rounding


FEW_BITS = [
    *((name, torch.float32, torch.bfloat16) for name in zoo.TWELVE),
    *((name, torch.bfloat16, torch.float8_e5m2) for name in ("llama", "gemma3_text", "granite", "bart", "deepseek_v3")),
]


@pytest.mark.parametrize(("model_type", "dtype", "narrow"), FEW_BITS, ids=str)
def test_factors_of_too_few_bits_are_seen(model_type, dtype, narrow):
    model, folded = _folded(model_type, dtype)
    short = {
        s: MatrixEdit(e.delta.to(narrow).to(torch.float32)) if isinstance(e, MatrixEdit) else e
        for s, e in folded.patch.edits.items()
    }
    allowed = conformance.ROUNDINGS[dtype]
    assert _in_roundings(model, folded, folded.patch.edits) <= allowed < _in_roundings(model, folded, short)


@pytest.mark.parametrize("model_type", zoo.TWELVE)
def test_a_patch_that_is_aimed_at_unrounded_weights_is_further_off(model_type):
    """The same weights, folded in float32: every edit is right, and rounding it moves what the next layer reads."""
    model, folded = _folded(model_type, torch.bfloat16)
    wide = copy.deepcopy(model).float()
    unrounded = fold_token(wide, tokens(wide, 9, 3), tokens(wide, 6, 103)).patch.edits
    assert _in_roundings(model, folded, unrounded) > 3 * _in_roundings(model, folded, folded.patch.edits)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma4_text", "olmo2"])
def test_a_mistaken_scale_convention_is_seen(model_type):
    model, folded = _folded(model_type)
    edits = {
        s: ScaleEdit(e.base, e.value, 1 - e.offset) if isinstance(e, ScaleEdit) else e
        for s, e in folded.patch.edits.items()
    }
    assert _ratio(model, folded, edits) > 1e-2


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo2"])
def test_a_mistaken_scale_convention_is_refused_at_binding(model_type, monkeypatch):
    true = layer._offset
    monkeypatch.setattr(layer, "_offset", lambda *a: 1 - true(*a))
    with pytest.raises(ProbeFailed, match="m ⊙ u"):
        bind(zoo.build(model_type))


@pytest.mark.parametrize("model_type", zoo.TWELVE)
def test_a_record_that_lacks_a_map_is_refused(model_type):
    model = zoo.build(model_type)
    family = next(f for f in FAMILIES if model.config.model_type in f.model_types)
    short = tuple(replace(s, input_maps=s.input_maps[1:]) if len(s.input_maps) > 1 else s for s in family.sites)
    if short == family.sites:
        pytest.skip("has one input map")
    with pytest.raises(ProbeFailed):
        bind(model, replace(family, sites=short))


@pytest.mark.parametrize("alpha", [-1.0, 1.01])
def test_a_mistaken_multiplier_is_refused(alpha):
    family = next(f for f in FAMILIES if f.name == "llama")
    sites = tuple(replace(s, wiring=replace(s.wiring, alpha=alpha)) for s in family.sites)
    with pytest.raises(ProbeFailed, match="alpha"):
        bind(zoo.build("llama"), replace(family, sites=sites))


def test_the_support_page_is_as_generated():
    root = Path(__file__).parents[1]
    page = runpy.run_path(str(root / "scripts" / "tables.py"))["support_page"]()
    assert (root / "docs" / "support.md").read_text(encoding="utf-8") == page, "run python scripts/tables.py"
    assert all(f"| `{name}` | refused | {reason} |" in page for name, reason in REFUSED.items())


def test_the_support_table_speaks_of_these_records():
    found = json.loads((Path(__file__).parents[1] / "docs" / "measured" / "support.json").read_text())
    rows = found["model_types"]
    assert set(rows) == set(zoo.MODEL_TYPES)
    assert found["counts"] == {"exact": len(rows) - len(REFUSED), "refused": len(REFUSED), "neither": 0}
    for name, row in rows.items():
        family = next((f.name for f in FAMILIES if name in f.model_types), None)
        assert (row["family"], row["status"]) == (family, "exact" if family else "refused")
