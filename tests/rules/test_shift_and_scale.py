"""Edits of a bias alone and of a scale alone."""

from __future__ import annotations

import pytest
import torch

from contextfold.errors import NotControllable
from contextfold.outcomes import Outcome
from contextfold.rules import InputBias, InputScale, OutputBias, OutputScale
from contract import random, reaches


def test_input_bias_needs_nothing_of_z() -> None:
    z, z_C, W, b = torch.zeros(1, 8, dtype=torch.float64), random(1, 8, seed=1), random(5, 8), random(5, seed=2)
    delta = InputBias().solve("block", W, z, z_C).delta
    reaches(z @ W.T + b + delta, z_C @ W.T + b, z @ W.T + b)


def test_output_bias_needs_nothing_of_h() -> None:
    branch, g = random(1, 6), random(1, 6, seed=1)
    reaches(branch + OutputBias().solve("block", branch, g).delta, g, branch)


def test_a_bias_serves_several_positions_that_want_the_same() -> None:
    branch, shift = random(3, 6), random(6, seed=1)
    assert torch.allclose(OutputBias().solve("block", branch, branch + shift).delta, shift)
    with pytest.raises(NotControllable) as refused:
        OutputBias().solve("block", branch, branch + random(3, 6, seed=2))
    assert refused.value.findings[0].outcome is Outcome.INCONSISTENT


@pytest.mark.parametrize("rule", [InputScale, OutputScale])
def test_a_scale(rule: type[OutputScale]) -> None:
    u, g, m = random(1, 6), random(1, 6, seed=1), random(6, seed=2)
    reaches(rule().solve("block", u, g, m).scale * u, g, m * u)


@pytest.mark.parametrize("rule", [InputScale, OutputScale])
def test_a_zero_entry_is_named_unless_nothing_is_wanted_of_it(rule: type[OutputScale]) -> None:
    u, g, m = random(1, 6), random(1, 6, seed=1), random(6, seed=2)
    u[0, 2] = 1e-17
    with pytest.raises(NotControllable) as refused:
        rule().solve("block", u, g, m)
    assert refused.value.findings[0].outcome is Outcome.ZERO_ENTRY
    g[0, 2] = 0
    assert float(rule().solve("block", u, g, m).scale[2]) == float(m[2])


def test_a_scale_alone_does_not_serve_two_positions() -> None:
    with pytest.raises(NotControllable) as refused:
        OutputScale().solve("block", random(2, 6), random(2, 6, seed=1), random(6, seed=2))
    assert refused.value.findings[0].outcome is Outcome.INCONSISTENT
    m, u = random(6, seed=2), random(2, 6)
    assert torch.allclose(OutputScale().solve("block", u, m * u, torch.ones(6)).scale, m)
