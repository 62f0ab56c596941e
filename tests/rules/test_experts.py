"""Mixtures of experts against a dense float64 mixture written out in the test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contextfold.errors import NotControllable
from contextfold.lowrank import LowRank
from contextfold.outcomes import Outcome
from contextfold.rules import Active, EvenShare, ExpertInput, LeastNorm, OutputOnly, PostNorm, SharedExpert, flips, ties
from contract import random, reaches, smallest, vanishes

E, K, D, F = 5, 2, 8, 7


class Mixture:
    """Top-2 of 5 gated experts, softmax over the selected, and a shared expert behind a sigmoid gate."""

    def __init__(self, seed: int = 0) -> None:
        self.router, self.gate = random(E, D, seed=seed), random(1, D, seed=seed + 1)
        self.inner, self.outer = random(E, F, D, seed=seed + 2), random(E, D, F, seed=seed + 3)
        self.shared_in, self.shared_out = random(F, D, seed=seed + 4), random(D, F, seed=seed + 5)

    def select(self, z: Tensor) -> tuple[Tensor, Tensor]:
        scores = z @ self.router.T
        top, index = scores.topk(K, dim=1)
        return torch.zeros_like(scores).scatter(1, index, top.softmax(1)), index

    def active(self, z: Tensor) -> Active:
        return Active(self.select(z)[0], torch.tanh(torch.einsum("efd,nd->nef", self.inner, z)))

    def shared(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(z @ self.gate.T), torch.tanh(z @ self.shared_in.T)

    def __call__(self, z: Tensor) -> Tensor:
        active, (s, h_s) = self.active(z), self.shared(z)
        routed = torch.einsum("ne,edf,nef->nd", active.gates, self.outer, active.hidden)
        return routed + s * (h_s @ self.shared_out.T)

    def edit_outputs(self, deltas: dict[int, LowRank]) -> None:
        for e, delta in deltas.items():
            self.outer[e] += delta.to_dense()


def steered(mixture: Mixture, z: Tensor, z_C: Tensor) -> None:
    """Apply the input rule to router, shared gate, shared expert and the experts active under z_C."""
    steering = ExpertInput().solve("block", z, z_C, z_C @ mixture.router.T, K)
    used = mixture.select(z_C)[1].unique().tolist()
    for W in (mixture.router, mixture.gate, mixture.shared_in, *(mixture.inner[e] for e in used)):
        W += steering.delta(W).to_dense()


@pytest.mark.parametrize("n", [1, 3])
def test_input_makes_the_mixture_work_as_under_the_context(n: int) -> None:
    mixture, z, z_C = Mixture(), random(n, D, seed=20), random(n, D, seed=21)
    wanted, chosen, before = mixture(z_C), mixture.select(z_C)[1], mixture(z)
    assert flips("block", chosen, mixture.select(z)[1])[0].outcome is Outcome.EXPERT_FLIP
    steered(mixture, z, z_C)
    reaches(mixture(z), wanted, before)
    assert flips("block", chosen, mixture.select(z)[1]) == []


@pytest.mark.parametrize("rule", [EvenShare, LeastNorm])
def test_outputs_after_the_input_rule(rule: type[LeastNorm]) -> None:
    mixture, z, z_C, g = Mixture(), random(1, D, seed=20), random(1, D, seed=21), random(1, D, seed=22)
    steered(mixture, z, z_C)
    before = mixture(z)
    solution = rule().solve("block", mixture.active(z), before, g)
    assert sorted(solution.deltas) == sorted(mixture.select(z)[1][0].tolist())
    mixture.edit_outputs(dict(solution.deltas))
    reaches(mixture(z), g, before)


@pytest.mark.parametrize("n", [1, 4])
def test_output_only_leaves_the_router_alone(n: int) -> None:
    mixture, z, g = Mixture(), random(n, D, seed=20), random(n, D, seed=22)
    before, active = mixture(z), mixture.active(z)
    solution = OutputOnly().solve("block", active, before, g)
    mixture.edit_outputs(dict(solution.deltas))
    reaches(mixture(z), g, before)
    joined = torch.zeros(D, E * F, dtype=torch.float64)
    for e, delta in solution.deltas.items():
        joined[:, e * F : (e + 1) * F] = delta.to_dense()
    whole = LowRank(joined, torch.eye(E * F, dtype=torch.float64))
    vanishes(whole, active.sources)
    smallest(whole, active.sources)


def test_the_shared_expert_alone() -> None:
    mixture, z, g = Mixture(), random(2, D, seed=20), random(2, D, seed=22)
    before = mixture(z)
    delta = SharedExpert().solve("block", *mixture.shared(z), before, g).deltas[0]
    mixture.shared_out += delta.to_dense()
    reaches(mixture(z), g, before)
    vanishes(delta, mixture.shared(z)[1])


def test_least_norm_is_the_formula_and_smaller_than_the_even_share() -> None:
    mixture, z, g = Mixture(), random(1, D, seed=20), random(1, D, seed=22)
    active, before = mixture.active(z), mixture(z)
    least = LeastNorm().solve("block", active, before, g)
    s, h = active.gates[0], active.hidden[0]
    size = sum(float(s[e] ** 2 * (h[e] @ h[e])) for e in range(E))
    for e, delta in least.deltas.items():
        assert torch.allclose(delta.to_dense(), float(s[e]) * torch.outer((g - before)[0], h[e]) / size)
    even = EvenShare().solve("block", active, before, g)
    assert sum(d.norm() ** 2 for d in least.deltas.values()) < sum(d.norm() ** 2 for d in even.deltas.values())


def test_a_gate_sum_of_zero_is_named_and_least_norm_still_works() -> None:
    gates = torch.tensor([[0.7, -0.7]], dtype=torch.float64)
    active, W = Active(gates, random(1, 2, F)), random(2, D, F, seed=1)
    branch, g = torch.einsum("ne,edf,nef->nd", gates, W, active.hidden), random(1, D, seed=2)
    with pytest.raises(NotControllable, match="gate sum zero") as refused:
        EvenShare().solve("block", active, branch, g)
    assert refused.value.findings[0].outcome is Outcome.GATE_SUM_ZERO
    for e, delta in LeastNorm().solve("block", active, branch, g).deltas.items():
        W[e] += delta.to_dense()
    reaches(torch.einsum("ne,edf,nef->nd", gates, W, active.hidden), g, branch)


def test_a_gate_sum_that_is_not_one_is_measured() -> None:
    gates = torch.tensor([[0.9, 1.6]], dtype=torch.float64)
    active, W = Active(gates, random(1, 2, F)), random(2, D, F, seed=1)
    branch, g = torch.einsum("ne,edf,nef->nd", gates, W, active.hidden), random(1, D, seed=2)
    for e, delta in EvenShare().solve("block", active, branch, g).deltas.items():
        W[e] += delta.to_dense()
    reaches(torch.einsum("ne,edf,nef->nd", gates, W, active.hidden), g, branch)


def test_a_dead_expert_stops_the_even_share_only() -> None:
    hidden = random(1, 2, F)
    hidden[0, 1] = 0
    active = Active(torch.tensor([[0.5, 0.5]], dtype=torch.float64), hidden)
    with pytest.raises(NotControllable, match="expert 1: zero source"):
        EvenShare().solve("block", active, random(1, D), random(1, D, seed=1))
    LeastNorm().solve("block", active, random(1, D), random(1, D, seed=1))
    with pytest.raises(NotControllable) as refused:
        OutputOnly().solve("block", Active(active.gates, 0 * hidden), random(1, D), random(1, D, seed=1))
    assert refused.value.findings[0].outcome is Outcome.ZERO_SOURCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_router_is_named(dtype: torch.dtype) -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, -1.0]], dtype=dtype)
    assert ties("block", scores, 2)[0].outcome is Outcome.TIED_ROUTER
    assert ties("block", scores, 3) == []
    assert ties("block", scores, 5) == []
    z = random(1, D)
    assert ExpertInput().solve("block", z, 2 * z, scores, 2).findings[0].outcome is Outcome.TIED_ROUTER


def test_experts_go_through_a_norm_as_one_matrix() -> None:
    mixture, z, g, m = Mixture(), random(1, D, seed=20), random(1, D, seed=22), 1 + 0.2 * random(D, seed=23)

    def normed(p: Tensor) -> Tensor:
        return m * p / torch.sqrt(p.square().mean() + 1e-6)

    before, active = mixture(z), mixture.active(z)
    solution = PostNorm().solve("block", active.sources, before, g, m, 1e-6)
    assert solution.delta is not None
    mixture.edit_outputs(dict(active.split(solution.delta)))
    reaches(solution.scale / m * normed(mixture(z)), g, normed(before))
