"""Where float64 is solved, by kinds of devices that are not at hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import contextfold as cf
import processes
from contextfold.errors import UnsupportedModel
from contextfold.fold import fold_sequence
from contextfold.solving import has_float64, is_fast, solved
from elsewhere import HERE, THERE, Machine
from tiny import build, tokens

FAST, SLOW = (8, 0), (8, 6)
"""An A100 has half as many units of float64 as of float32, a card for games one in 64."""


@pytest.mark.parametrize(
    ("capability", "fast"),
    [((6, 0), True), ((7, 0), True), (FAST, True), ((9, 0), True), ((10, 0), True), ((6, 1), False), ((7, 5), False),
     (SLOW, False), ((8, 9), False), ((10, 3), False), ((12, 0), False), ((99, 0), False)],
)  # fmt: skip
def test_cuda_solves_where_it_has_units_of_float64(capability, fast, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert is_fast(torch.device("cuda", 1)) is fast


def test_other_devices_leave_float64_to_the_host():
    assert is_fast(HERE)
    assert not is_fast(torch.device("xpu", 0))
    assert not is_fast(torch.device("mps"))
    assert has_float64(torch.device("xpu", 0))
    assert has_float64(HERE)
    assert not has_float64(torch.device("mps"))


@pytest.mark.parametrize("capability", [FAST, SLOW])
def test_operands_go_to_the_host_and_the_result_comes_back(capability):
    matrix = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    K, b = matrix @ matrix.T + torch.eye(4, dtype=torch.float64), matrix[:, :2].contiguous()
    with Machine(capability) as machine:
        x = solved(torch.linalg.solve, K.to(THERE), b.to(THERE))
        values, vectors = solved(torch.linalg.eigh, K.to(THERE))
        assert {x.device, values.device, vectors.device} == {THERE}
        assert machine.solves == {THERE if capability == FAST else HERE: 2}
        solved(torch.linalg.qr, b.to(THERE, torch.float32))
        assert machine.solves.total() == 2, "float32 is computed where it is"
    assert float((K @ x - b).abs().max()) < 1e-12
    assert float((vectors * values @ vectors.T - K).abs().max()) < 1e-12


WORK = {
    "token": lambda bound: cf.fold_token(bound, tokens(9), tokens(3, seed=2)).patch,
    "sequence": lambda bound: fold_sequence(bound, tokens(9), tokens(3, seed=2)).patch,
    "whitened": lambda bound: fold_sequence(
        bound, tokens(9), tokens(3, seed=2), sites="all", typical=tokens(9)
    ).patch,
    "bake": lambda bound: processes.baked_of(bound).patch,
}  # fmt: skip


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_nothing_is_factored_on_a_device_that_is_slow_at_it(model_type, work):
    """On the device that is fast everything is; the patch is the same, bit for bit, and lies on the device."""
    found = {}
    for capability in (FAST, SLOW):
        model = build(model_type)
        with Machine(capability) as machine:
            patch = WORK[work](cf.bind(model.to(THERE)))
            assert {edit.device for edit in patch.edits.values()} == {THERE}
            found[capability] = {site: tensors(edit) for site, edit in patch.edits.items()}
            assert set(machine.solves) == {THERE if capability == FAST else HERE}
    assert found[FAST].keys() == found[SLOW].keys()
    for site, parts in found[FAST].items():
        assert all(torch.equal(a, b) for a, b in zip(parts, found[SLOW][site], strict=True))


def tensors(edit):
    return (edit.delta.B, edit.delta.A) if isinstance(edit, cf.patch.MatrixEdit) else (edit.value, edit.base)


def test_a_device_without_float64_is_refused_by_name():
    class Away(nn.Parameter):
        device = torch.device("mps")

    model = build("llama")
    model.lm_head.weight = Away(model.lm_head.weight.data)
    with pytest.raises(UnsupportedModel, match=r"lies on mps, which has no float64.*model\.to\('cpu'\)"):
        cf.bind(model)


def test_every_factoring_goes_through_the_one_door():
    """A call of `torch.linalg` that factors or solves stands nowhere as a call of its own."""
    found = []
    for file in Path(cf.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name.startswith(("torch.linalg.", "torch.cholesky", "torch.svd")) and "norm" not in name:
                    found.append(f"{file.name}:{node.lineno} {name}")
    assert not found
