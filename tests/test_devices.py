"""Nothing forgets the device of a model: on one that is not there (`elsewhere`), on two, on a GPU if there is one.

What a device computes is seen by the tests of the marker `gpu` alone.
"""

from __future__ import annotations

import pytest
import torch

import contextfold as cf
import processes
import zoo
from contextfold import patchfile
from contextfold.errors import ContextfoldError
from contextfold.fold import fold_sequence
from contextfold.fold.course import dynamics
from contextfold.spectra import spectra
from contextfold.stepwise import generate
from contextfold.verify import fold_and_prove_sequence, verify_patch
from elsewhere import HERE, THERE, Machine
from tiny import COMMON, TYPES, build, tokens

CONTEXT, QUERY = tokens(9), tokens(3, seed=2)
PROMPT = cf.Prompt(CONTEXT, QUERY)


def made(model_type):
    return build(model_type) if model_type in TYPES else zoo.build(model_type)


def lent(bound, folded, patch):
    """The patch written, and beside the weights."""
    for way in (cf.materialised, cf.applied):
        with way(bound, patch) as edited:
            cf.run(edited, folded.split.reduced)


def token(bound, folder):
    folded = cf.fold_token(bound, CONTEXT, QUERY)
    lent(bound, folded, folded.patch)
    return folded


def sequence(bound, folder):
    folded = fold_sequence(bound, CONTEXT, QUERY)
    lent(bound, folded, folded.patch)
    return folded


def stored(bound, folder):
    """A patch from a file, whose tensors lie on the host."""
    folded = cf.fold_token(bound, CONTEXT, QUERY)
    patch = patchfile.load(patchfile.save(folded.patch, folder / "patch.safetensors"))
    lent(bound, folded, patch)
    verify_patch(bound, patch, cf.Prompt(CONTEXT, QUERY, keep=cf.SINK))
    return spectra(patch), spectra(folded.patch)


def stopped(bound, folder):
    fold_sequence(bound, CONTEXT, QUERY, store=folder)
    return fold_sequence(bound, CONTEXT, QUERY, store=folder)


WORK = {
    "token": token,
    "sequence": sequence,
    "all maps, whitened": lambda bound, _: fold_sequence(bound, CONTEXT, QUERY, sites="all", typical=CONTEXT),
    "attention": lambda bound, _: fold_sequence(bound, CONTEXT, QUERY, sites="attention"),
    "stored": stored,
    "stopped": stopped,
    "proof": lambda bound, _: cf.fold_and_prove(bound, PROMPT),
    "proof of a sequence": lambda bound, _: fold_and_prove_sequence(bound, PROMPT),
    "bake": lambda bound, _: processes.baked_of(bound),
    "generate": lambda bound, _: list(generate(bound, CONTEXT, tokens=3, prove_every=2)),
    "dynamics": lambda bound, _: dynamics(bound, CONTEXT, QUERY),
}
SOME = [("gemma3_text", "token"), ("gemma3_text", "sequence"), ("gemma3_text", "bake"), ("gemma3_text", "generate"),
        ("qwen2_moe", "token"), ("qwen2_moe", "sequence"), ("gpt_neox", "token")]  # fmt: skip


@pytest.mark.parametrize(("model_type", "work"), [*(("llama", work) for work in WORK), *SOME])
def test_everything_stays_on_the_device_of_the_model(model_type, work, tmp_path):
    model = made(model_type)
    with Machine() as machine:
        bound = cf.bind(model.to(THERE))
        assert bound.device == THERE
        given = WORK[work](bound, tmp_path)
        edits = getattr(getattr(given, "patch", None), "edits", {})
        assert all(edit.device == THERE for edit in edits.values())
        assert machine.waits, "the machine sees what is done on it"


@pytest.mark.parametrize(
    ("model_type", "work"),
    [*(("llama", work) for work in ("token", "sequence", "proof", "bake", "generate")), ("gpt_neox", "token")],
)
def test_factors_live_with_their_layer(model_type, work, tmp_path):
    """One layer on another device; hooks of accelerate move what enters it, as under a map of devices."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = made(model_type)
    layers = model.base_model.layers
    with Machine():
        layers[1].to(THERE)
        for module in [*model.base_model.children(), *model.children(), *layers]:
            if module not in (layers, model.base_model):
                device = THERE if module is layers[1] else HERE
                hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=device))
        given = WORK[work](cf.bind(model), tmp_path)
        if work in ("token", "sequence", "bake"):
            found = {(site.layer, edit.device) for site, edit in given.patch.edits.items()}
            assert found == {(k, THERE if k == 1 else HERE) for k in range(len(layers))}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_step_waits_for_the_device_as_often_whatever_the_depth(model_type, monkeypatch):
    """Once for what the patches read, once for the tokens, and once for each of two choices."""
    waits = {}
    for layers in (2, 5):
        monkeypatch.setitem(COMMON, "num_hidden_layers", layers)
        model = build(model_type)
        with Machine() as machine:
            counted = []
            for _ in generate(cf.bind(model.to(THERE)), CONTEXT, tokens=4, prove_every=0):
                counted.append(machine.waits.total())
                machine.waits.clear()
        waits[layers] = counted[1:]  # the first token is proven, layer by layer
    assert waits[2] == waits[5] == [4, 4, 4]


def test_the_machine_refuses_what_a_gpu_would():
    with Machine() as machine:
        there, here = torch.ones(3, device=THERE), torch.ones(3)
        assert (there.device, here.device, there.double()[1:].device) == (THERE, HERE, THERE)
        assert (there.cpu().device, here.to(there).device, torch.zeros_like(there).device) == (HERE, THERE, THERE)
        assert (there + torch.ones(())).device == THERE, "a number may come from the host"
        for wrong in (lambda: there + here, lambda: torch.cat([there, here]), lambda: here[there.long()]):
            with pytest.raises(RuntimeError, match="same device"):
                wrong()
        with pytest.raises(TypeError):
            there.numpy()
        assert not machine.waits, "none of these waits in the package"


def test_a_forgotten_device_is_found(monkeypatch, tmp_path):
    """The same test, with what it is for."""
    from contextfold.lowrank import LowRank

    monkeypatch.setattr(LowRank, "norm", lambda self: float((self.B * torch.ones(self.B.shape)).norm()))
    model = build("llama")
    with Machine(), pytest.raises(RuntimeError, match="same device"):
        token(cf.bind(model.to(THERE)), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("model_type", "work"), [*(("llama", work) for work in WORK), *SOME])
def test_on_a_gpu(model_type, work, dtype, tmp_path):
    """The gap on the GPU is that on the host, but for rounding."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    bound = cf.bind(made(model_type).to("cuda", dtype))
    try:
        given = WORK[work](bound, tmp_path)
    except ContextfoldError as error:
        pytest.skip(f"refused: {error}")
    if work in ("token", "sequence"):
        last = 1 if work == "token" else QUERY.numel()
        parts = given.split
        wanted, without = (cf.run(bound.model, each, last) for each in (parts.full, parts.reduced))
        with cf.materialised(bound, given.patch) as edited:
            met = cf.run(edited, parts.reduced, last)
        limit = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
        assert float((met - wanted).abs().max()) < limit * float((without - wanted).abs().max())
    if work == "generate":
        limit = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
        proofs = [step.proof for step in given if step.proof is not None]
        assert proofs
        assert all(p.written.logit_gap < limit * p.unpatched.logit_gap for p in proofs)
