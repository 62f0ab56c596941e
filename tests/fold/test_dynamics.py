"""The vanilla theorem, the two recursions of a growing and a shrinking context, and the arrays made of them."""

from __future__ import annotations

import io
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from contextfold.anatomy import bind
from contextfold.errors import InputError, NotControllable
from contextfold.fold.course import dynamics, dynamics_view
from contextfold.fold.dynamics import (
    alignment,
    effective_rank,
    growing,
    implicit_bias,
    implicit_update,
    numerical_rank,
    removing,
    skip_bias,
)
from contextfold.lowrank import LowRank
from contextfold.runtime import Run, run
from zoo import build

SEEDS = st.integers(0, 10**6)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(x: Tensor, context: Tensor) -> Tensor:
    """Softmax attention of x over the context and itself, with the skip."""
    keys = torch.cat([context, x[None]])
    return x + torch.softmax(keys @ x / 2, 0) @ torch.tanh(keys)


D, F = 5, 7
X, CONTEXT = random(D), random(6, D, seed=1)
W, B, W_OUT, B_OUT = random(F, D, seed=2), random(F, seed=3), random(D, F, seed=4), random(D, seed=5)
A, A_C = attention(X, CONTEXT[:0]), attention(X, CONTEXT)


def test_the_vanilla_theorem_without_a_skip() -> None:
    def block(W: Tensor, b: Tensor, a: Tensor) -> Tensor:
        return W_OUT @ torch.tanh(W @ a + b)

    wanted = block(W, B, A_C)
    assert float((block(W, B, A) - wanted).norm()) > 0.05
    assert torch.allclose(block(W + implicit_update(W, A, A_C).to_dense(), B, A), wanted, rtol=1e-12)
    assert torch.allclose(block(W, B + implicit_bias(W, A, A_C), A), wanted, rtol=1e-12)
    assert implicit_update(W, A, A_C).rank == 1


def test_the_vanilla_theorem_with_a_skip() -> None:
    def block(W: Tensor, b: Tensor, a: Tensor) -> Tensor:
        return a + W_OUT @ torch.tanh(W @ a + B) + b

    dW, db = implicit_update(W, A, A_C).to_dense(), skip_bias(A, A_C)
    assert torch.allclose(block(W + dW, B_OUT + db, A), block(W, B_OUT, A_C), rtol=1e-12)
    assert not torch.allclose(block(W + dW, B_OUT, A), block(W, B_OUT, A_C), rtol=1e-3)


def test_a_zero_state_has_no_update_but_a_bias() -> None:
    with pytest.raises(NotControllable, match="zero source"):
        implicit_update(W, 0 * A, A_C)
    assert torch.allclose(W @ (0 * A) + implicit_bias(W, 0 * A, A_C), W @ A_C)


@given(st.integers(1, 8), SEEDS)
def test_growing(k: int, seed: int) -> None:
    states = random(k + 1, D, seed=seed)
    course = growing(W, states)
    W_i = W.clone()
    for i in range(k):
        gradient = torch.outer(W @ (states[i] - states[i + 1]), states[0])
        assert torch.allclose(course.gradient_norm[i], gradient.norm())
        assert torch.allclose(course.loss[i], torch.trace(gradient.T @ W_i))
        W_i = W_i - gradient / states[0].square().sum()
        assert torch.allclose(W_i @ states[0], W @ states[i + 1])
        assert torch.allclose(course.total_norm[i + 1], (W_i - W).norm(), atol=1e-9)
    assert torch.allclose(course.total.to_dense(), W_i - W, atol=1e-10)
    assert numerical_rank(course.total) == 1
    assert torch.allclose(course.effective_ranks[1:], torch.ones(k, dtype=torch.float64), atol=1e-6)


@given(st.integers(1, 4), SEEDS)
def test_removing_is_the_product_formula(k: int, seed: int) -> None:
    states = random(k + 1, D, seed=seed)
    course = removing(W, states)
    product = torch.eye(D, dtype=torch.float64)
    for i in range(k):
        rest = states[i + 1]
        product = product @ (torch.eye(D) + torch.outer(states[i] - rest, rest) / rest.square().sum())
        assert torch.allclose(W @ product @ rest, W @ states[0])
    assert torch.allclose(W + course.total.to_dense(), W @ product, rtol=1e-8, atol=1e-8)
    assert numerical_rank(course.total) <= k
    assert torch.allclose(course.step_norm, torch.tensor([step.norm() for step in course.steps], dtype=torch.float64))


def test_token_by_token_is_the_same_total_as_all_at_once() -> None:
    states = torch.stack([attention(X, CONTEXT[:i]) for i in range(len(CONTEXT) + 1)])
    assert torch.allclose(growing(W, states).total.to_dense(), implicit_update(W, A, A_C).to_dense())


def test_alignment_and_effective_rank_against_dense_matrices() -> None:
    updates = [LowRank(random(4, 2, seed=s), random(2, 6, seed=s + 10)) for s in range(3)]
    flat = torch.stack([u.to_dense().flatten() for u in updates])
    flat = flat / flat.norm(dim=1, keepdim=True)
    assert torch.allclose(alignment(updates), flat @ flat.T)
    assert torch.allclose(alignment([updates[0], updates[0] * -3.0])[0], torch.tensor([1.0, -1.0]).double())
    assert alignment([updates[0], updates[0] * 0.0])[0, 1] == 0
    assert effective_rank(LowRank(torch.eye(4).double(), torch.eye(4).double())) == pytest.approx(4)
    assert effective_rank(updates[0] * 0.0) == 0
    assert 1 < effective_rank(updates[0]) <= numerical_rank(updates[0]) == 2
    with pytest.raises(ValueError, match="one shape"):
        alignment([updates[0], LowRank(random(4, 1), random(1, 5))])


def test_too_few_states_and_a_zero_state_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two states"):
        growing(W, random(1, D))
    with pytest.raises(NotControllable, match="zero source"):
        removing(W, torch.stack([A_C, A, 0 * A]))


CTX, QUERY = torch.tensor([1, 5, 9, 3, 7]), torch.tensor([4, 8, 2])


@pytest.mark.parametrize("direction", ["growing", "removing"])
def test_a_model(direction: str) -> None:
    model = build("llama")
    found = dynamics(model, CTX, QUERY, direction=direction)  # type: ignore[arg-type]
    assert len(found.blocks) == len(bind(model).blocks)
    seen: list[Tensor] = []
    gate = model.model.layers[1].mlp.gate_proj
    handle = gate.register_forward_pre_hook(lambda _m, args: seen.append(args[0][0, -1]))
    ids = torch.cat([CTX, QUERY])
    run(model, Run(ids, torch.arange(8)))
    run(model, Run(ids[[0, 5, 6, 7]], torch.tensor([0, 5, 6, 7])))
    handle.remove()
    z_C, z = seen
    block = found.blocks[1]
    total = block.course.total
    assert torch.allclose(total(z[None])[0], gate.weight @ (z_C - z), rtol=1e-6, atol=1e-8)
    assert len(block.course.steps) == 4
    assert block.shift is not None
    assert float(block.shift[-1]) > 0
    assert block.spreading.norms.shape == (3,)
    assert block.spreading.rank == 3
    if direction == "growing":
        assert float(block.spreading.norms[-1]) == pytest.approx(float(block.course.total_norm[-1]))
    assert torch.allclose(found.between_blocks.diagonal(), torch.ones(len(found.blocks)).double())


def test_a_mixture_of_experts_is_followed_at_its_router() -> None:
    found = dynamics(build("qwen2_moe"), CTX, QUERY)
    assert found.blocks[0].site.endswith("mlp.gate.weight")


def test_json_and_view() -> None:
    found = dynamics(build("gpt2"), CTX, QUERY)
    data = json.loads(json.dumps(found.to_json()))
    assert data["tokens"] == [5, 9, 3, 7]
    assert len(data["blocks"][0]["step_norm"]) == 4
    assert len(data["blocks"][0]["positions"]["alignments"]) == 3
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(dynamics_view(found))
    assert "4 context tokens added" in console.export_text()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="second token"):
        dynamics(build("llama"), CTX[:1], QUERY)
    with pytest.raises(InputError, match="choose 'growing'"):
        dynamics(build("llama"), CTX, QUERY, direction="sideways")  # type: ignore[arg-type]
