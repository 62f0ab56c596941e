"""Applying a patch never changes the user's model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import zoo
from contextfold.anatomy import bind
from contextfold.errors import NotControllable, PatchMismatch
from contextfold.fold import fold_token
from contextfold.lowrank import LowRank
from contextfold.outcomes import Outcome
from contextfold.overlays import cannot_overflow
from contextfold.patch import MatrixEdit, ScaleEdit, Site
from contextfold.runtime import Decoder, InTurn, Run, applied, materialised, recording, run
from tiny import bits, build, shared, tokens

CONTEXT, QUERY = tokens(11), tokens(3, seed=2)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Interrupt(Exception):
    pass


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", [applied, materialised], ids=["applied", "materialised"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_the_model_comes_back_bit_for_bit(model_type, way, dtype):
    model = build(model_type, dtype)
    before, storage = bits(model), [p.data_ptr() for p in model.parameters()]
    folded = fold_token(model, CONTEXT, QUERY)
    assert bits(model) == before
    for _ in range(3):
        with way(model, folded.patch):
            assert not torch.equal(
                run(model, folded.split.reduced)[0], run(build(model_type, dtype), folded.split.reduced)[0]
            )
        with pytest.raises(Interrupt), way(model, folded.patch):
            raise Interrupt
    assert bits(model) == before
    assert [p.data_ptr() for p in model.parameters()] == storage
    assert hooks(model) == 0


def test_a_failing_forward_inside_the_action_gives_the_scale_back():
    model = build("gemma3_text")
    before = bits(model)
    folded = fold_token(model, CONTEXT, QUERY)

    def fail(*_args):
        raise Interrupt

    handle = model.model.layers[1].post_feedforward_layernorm.register_forward_hook(fail)
    with pytest.raises(Interrupt), applied(model, folded.patch):
        run(model, folded.split.reduced)
    handle.remove()
    assert bits(model) == before


def test_the_action_leaves_the_weights_alone_while_it_acts():
    model = build("gemma3_text")
    before = bits(model)
    with applied(model, fold_token(model, CONTEXT, QUERY).patch):
        assert bits(model) == before


def edited(model, originals):
    """Names of the parameters that are not what they were."""
    return {name for name, p in model.named_parameters() if p.data_ptr() != originals[name]}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "gpt_neox", "qwen2_moe", "gpt_oss"])
def test_written_in_turn_is_written_at_once_bit_for_bit(model_type):
    """The same stored weights where each of them is read, and never more than one module's at a time."""
    model = zoo.build(model_type, torch.float32)
    bound, before = bind(model), bits(model)
    originals = {name: p.data_ptr() for name, p in model.named_parameters()}
    ids = torch.randint(3, 60, (9,), generator=torch.Generator().manual_seed(0))
    folded = fold_token(bound, ids[:-2], ids[-2:])
    shared_by_experts = {f"{s.module}.{s.parameter}" for s in folded.patch.edits if s.expert is not None}
    with materialised(bound, folded.patch):
        at_once = run(model, folded.split.reduced)
    seen = set()

    def look(module, args):
        now = edited(model, originals)
        seen.update(now)
        assert len({name.rpartition(".")[0] for name in now - shared_by_experts}) <= 1

    overlay = InTurn(model, folded.patch.edits)
    with overlay:
        for site, edit in folded.patch.edits.items():
            overlay.put(site, edit)
        handles = [m.register_forward_pre_hook(look) for m in model.modules()]
        in_turn = run(model, folded.split.reduced)
        for handle in handles:
            handle.remove()
        assert edited(model, originals) == shared_by_experts
    assert torch.equal(at_once, in_turn)
    assert float((in_turn - run(model, folded.split.reduced)).abs().max()) > 1e-3
    assert seen | shared_by_experts == {f"{s.module}.{s.parameter}" for s in folded.patch.edits}
    assert bits(model) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_edit_that_is_told_to_fit_does_fit(dtype):
    """The largest number of the dtype stays itself under the largest edit that is not looked at."""
    largest = torch.finfo(dtype).max
    reach = largest * torch.finfo(dtype).eps / 4
    weight = torch.full((2, 3), largest, dtype=dtype)
    site = Site(0, "a")
    for size, told in ((reach * 0.99, True), (reach * 1.01, False)):
        delta = LowRank(torch.full((2, 1), size, dtype=torch.float32), torch.ones(1, 3))
        assert cannot_overflow(delta, dtype) is told
        if told:
            assert torch.equal(MatrixEdit(delta).merged(weight, site), weight)
    broken = LowRank(torch.tensor([[float("nan")], [1.0]]), torch.ones(1, 3))
    assert not cannot_overflow(broken, dtype)


def test_a_failing_fold_gives_the_model_back():
    model = build("qwen2")
    model.get_submodule("model.layers.2.mlp.up_proj").weight.data[...] = 0.0  # h = 0: refused at the third layer
    before = bits(model)
    with pytest.raises(NotControllable):
        fold_token(model, CONTEXT, QUERY)
    assert bits(model) == before
    assert hooks(model) == 0


def test_patches_nest_and_unwind_in_order():
    model = build("llama")
    folded = fold_token(model, CONTEXT, QUERY)
    bound, before = bind(model), bits(model)
    with materialised(bound, folded.patch.select([0])), applied(model, replaced_fingerprint(folded.patch, model)):
        pass
    assert bits(model) == before


def replaced_fingerprint(patch, model):
    from contextfold.anatomy import weights_digest

    return replace(patch, header=replace(patch.header, fingerprint=weights_digest(model)))


def test_other_weights_are_refused():
    patch = fold_token(shared("llama"), CONTEXT, QUERY).patch
    other = build("llama")
    other.get_submodule("model.layers.0.self_attn.q_proj").weight.data[0, 0] += 1e-3
    for way in (applied, materialised):
        with pytest.raises(PatchMismatch, match="fold again"), way(other, patch):
            pass


def test_another_model_type_is_refused():
    patch = fold_token(shared("llama"), CONTEXT, QUERY).patch
    with pytest.raises(PatchMismatch, match="'llama'"), applied(shared("mistral"), patch):
        pass


def test_a_site_that_is_not_there_is_refused():
    model = shared("llama")
    patch = fold_token(model, CONTEXT, QUERY).patch
    site, edit = next(iter(patch.edits.items()))
    strange = replace(patch, edits={replace(site, module="model.layers.0.nothing"): edit})
    with pytest.raises(PatchMismatch, match="does not have"), applied(model, strange):
        pass
    wide = replace(patch, edits={replace(site, module="model.layers.0.mlp.down_proj"): edit})
    with pytest.raises(PatchMismatch, match="shape"), applied(model, wide):
        pass


def test_a_binding_notices_changed_weights():
    model = build("llama")
    bound = bind(model)
    first = bound.fingerprint
    model.get_submodule("model.layers.0.mlp.up_proj").weight.data.mul_(1.5)
    assert bound.fingerprint != first


def test_values_beyond_the_dtype_are_refused():
    model = build("gemma3_text", torch.float16)
    patch = fold_token(model, CONTEXT, QUERY).patch
    site, edit = next((s, e) for s, e in patch.edits.items() if isinstance(e, ScaleEdit))
    huge = replace(patch, edits={site: ScaleEdit(edit.base, edit.value * 0 + 1e6, edit.offset)})
    with pytest.raises(NotControllable) as caught, materialised(model, huge):
        pass
    assert caught.value.findings[0].outcome is Outcome.OVERFLOW


def test_recorded_letters_obey_the_block_identity():
    """y = v + branch, z differs from h, and rows are picked from the first batch row."""
    model = shared("gemma3_text")
    bound = bind(model)
    tokens_ = Run(CONTEXT, torch.arange(11))
    with recording(bound.blocks, slice(-2, None), "xvzhy") as states:
        run(model, tokens_)
    for block, state in zip(bound.blocks, states, strict=True):
        branch = block.norm_post.scale * block.norm_post.unscaled(block.output_map.exact(state["h"]))
        assert torch.allclose(state["y"], state["v"] + branch, rtol=1e-5, atol=1e-5)
        assert state["z"].shape == state["v"].shape == (2, 32)
        assert state["h"].shape == (2, 48)
        assert not torch.allclose(state["z"], state["v"], rtol=1e-2)


def test_the_cached_path_is_the_model_itself():
    model = shared("llama")
    decoder = Decoder(model)
    decoder.extend(CONTEXT)
    stepwise = decoder.extend(QUERY)
    whole = model(torch.cat([CONTEXT, QUERY])[None]).logits[0, -1]
    assert torch.allclose(stepwise, whole, rtol=1e-9, atol=1e-9)


def test_combine_one_is_itself():
    model = shared("llama")
    folded = fold_token(model, CONTEXT, QUERY)
    for edit, again in zip(folded.patch.edits.values(), (folded.patch * 1.0).edits.values(), strict=True):
        assert isinstance(edit, MatrixEdit)
        assert torch.equal(edit.delta.B, again.delta.B)
