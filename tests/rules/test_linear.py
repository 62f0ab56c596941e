"""Matrix edits: the input maps, an output map with no norm after it, attention's output map, parallel blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contextfold.errors import NotControllable
from contextfold.outcomes import Outcome
from contextfold.rules import AttentionOutput, InputWeight, OutputAlone, OutputWeight, ParallelOutput
from contract import random, reaches, smallest, vanishes

OUTPUTS = (OutputWeight, OutputAlone, AttentionOutput, ParallelOutput)


@pytest.mark.parametrize("n", [1, 3])
def test_input_weight(n: int) -> None:
    z, z_C, W = random(n, 8), random(n, 8, seed=1), random(5, 8, seed=2)
    delta = InputWeight().solve("block", z, z_C).delta(W)
    reaches(z @ (W + delta.to_dense()).T, z_C @ W.T, z @ W.T)
    vanishes(delta, z)


def test_the_steering_of_input_maps_is_the_smallest() -> None:
    z, z_C = random(2, 8), random(2, 8, seed=1)
    smallest(InputWeight().solve("block", z, z_C).D, z)


@pytest.mark.parametrize("rule", OUTPUTS)
@pytest.mark.parametrize("n", [1, 4])
def test_output_weight(rule: type[OutputWeight], n: int) -> None:
    h, g, W, b = random(n, 9), random(n, 6, seed=1), random(6, 9, seed=2), random(6, seed=3)
    delta = rule().solve("block", h, h @ W.T + b, g).delta
    reaches(h @ (W + delta.to_dense()).T + b, g, h @ W.T + b)
    vanishes(delta, h)
    smallest(delta, h)


def test_a_parallel_block_takes_up_what_attention_lost() -> None:
    x, a_C, a, h, W = (random(1, 6, seed=s) for s in range(4)), None, None, random(1, 9, seed=5), random(6, 9, seed=6)
    x, a_C, a, _ = x
    y_C = x + a_C + h @ W.T
    delta = ParallelOutput().solve("block", h, h @ W.T, y_C - x - a).delta
    reaches(x + a + h @ (W + delta.to_dense()).T, y_C, x + a + h @ W.T)


def test_attention_output_makes_the_mlp_need_no_edit() -> None:
    a, x, v_C, W_o = random(1, 7), random(1, 6, seed=1), random(1, 6, seed=2), random(6, 7, seed=3)
    delta = AttentionOutput().solve("block", a, a @ W_o.T, v_C - x).delta
    v = x + a @ (W_o + delta.to_dense()).T

    def mlp(v: torch.Tensor) -> torch.Tensor:
        return v + torch.tanh(v @ random(6, 6, seed=4))

    reaches(mlp(v), mlp(v_C), mlp(x + a @ W_o.T))


def test_a_rectifier_that_leaves_one_entry_is_enough() -> None:
    h = torch.zeros(1, 40, dtype=torch.float64)
    h[0, 17] = 3e-5
    W, g = random(6, 40), random(1, 6, seed=1)
    reaches(h @ (W + OutputWeight().solve("block", h, h @ W.T, g).delta.to_dense()).T, g, h @ W.T)


@pytest.mark.parametrize("rule", OUTPUTS)
def test_a_zero_source_is_named(rule: type[OutputWeight]) -> None:
    with pytest.raises(NotControllable) as refused:
        rule().solve("block", torch.zeros(1, 9), random(1, 6), random(1, 6, seed=1))
    assert refused.value.findings[0].outcome is Outcome.ZERO_SOURCE


def test_dependent_positions_are_exact_when_they_agree_and_named_when_not() -> None:
    z = random(1, 8).repeat(2, 1)
    z_C = random(1, 8, seed=1)
    InputWeight().solve("block", z, z_C.repeat(2, 1))
    with pytest.raises(NotControllable) as refused:
        InputWeight().solve("block", z, random(2, 8, seed=2))
    assert refused.value.findings[0].outcome is Outcome.INCONSISTENT


def test_nearly_dependent_positions_are_named_and_exact() -> None:
    z = random(1, 8).repeat(2, 1)
    z[1] += 1e-8 * random(8, seed=3)
    steering = InputWeight().solve("block", z, random(2, 8, seed=1))
    assert [finding.outcome for finding in steering.findings] == [Outcome.NEAR_SINGULAR]


def test_what_is_not_finite_is_named() -> None:
    with pytest.raises(NotControllable, match="entries of h that are not finite"):
        OutputWeight().solve("block", torch.full((1, 3), torch.inf), random(1, 2), random(1, 2))


def test_a_protected_row_is_left_where_it_was() -> None:
    z, z_C, sink, W = random(1, 8), random(1, 8, seed=1), 1e3 * random(1, 8, seed=2), random(5, 8, seed=3)
    delta = InputWeight().solve("block", z, z_C, sink).delta(W)
    reaches(z @ (W + delta.to_dense()).T, z_C @ W.T, z @ W.T)
    assert float(delta(sink).norm()) < 1e-9 * float((sink @ W.T).norm())


@given(st.integers(1, 4), st.integers(0, 10**6), st.permutations(range(4)))
def test_positions_may_come_in_any_order(n: int, seed: int, order: list[int]) -> None:
    z, z_C = random(4, 7, seed=seed), random(4, 7, seed=seed + 1)
    one = InputWeight().solve("block", z, z_C).D.to_dense()
    other = InputWeight().solve("block", z[order], z_C[order]).D.to_dense()
    assert torch.allclose(one, other, rtol=1e-6, atol=1e-8)


@given(st.floats(-3, 3), st.integers(0, 10**6))
def test_the_edit_is_linear_in_what_is_wanted(factor: float, seed: int) -> None:
    h, branch, change = random(2, 7, seed=seed), random(2, 5, seed=seed + 1), random(2, 5, seed=seed + 2)
    one = OutputWeight().solve("block", h, branch, branch + change).delta.to_dense()
    other = OutputWeight().solve("block", h, branch, branch + factor * change).delta.to_dense()
    assert torch.allclose(factor * one, other, rtol=1e-7, atol=1e-9)


def test_the_suite_can_fail() -> None:
    z, z_C, W = random(1, 8), random(1, 8, seed=1), random(5, 8, seed=2)
    delta = InputWeight().solve("block", z, z_C).delta(W)
    with pytest.raises(AssertionError):
        reaches(z @ (W - delta.to_dense()).T, z_C @ W.T, z @ W.T)
