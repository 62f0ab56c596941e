"""The composition rule, stage by stage and way by way: each expectation follows from the rule at the head of `compose`.

`test_calculus.py` tries yes and no on random blocks; here stand the words and numbers that a reader is shown.
"""

from __future__ import annotations

from typing import Any

import pytest

from contextfold.calculus import (
    ALWAYS,
    Affine,
    Bias,
    Capacity,
    Chain,
    Demand,
    ExpertOutputs,
    Experts,
    Expression,
    Given,
    Kind,
    Mark,
    Multiplier,
    Normalise,
    Pointwise,
    Product,
    Scale,
    Service,
    Skip,
    Sum,
    Verdict,
    answer,
    definitions,
    formula,
    givens,
    plan,
)
from contextfold.errors import InputError, NoWay
from contextfold.rules import OutputAlone, OutputWeight, choose
from words import MATCH, NOT_ZERO, ONE_SCALE, REACH, SKIP, fixed, matrix

NOT_EVERY = "not every branch follows the context, so one of them must reach any wanted value"
BEFORE = "what comes before is out of reach: "


LLAMA = Chain.of(
    Sum.of(Given("x"), Chain.of(Given("a"), Affine("o_proj", 8, 8))),
    Mark("v"),
    Sum.of(
        Skip(),
        Chain.of(
            Normalise(1e-6), Scale("norm", 8), Mark("z"),
            Product.of(Affine("gate_proj", 8, 16) >> Pointwise("silu"), Affine("up_proj", 8, 16)),
            Mark("h"), Affine("down_proj", 16, 8),
        ),
    ),
)  # fmt: skip
V = Given("v")
POST = V >> (
    Skip()
    + Chain.of(
        Affine("in", 8, 16), Pointwise("gelu"), Mark("h"), Affine("out", 16, 8), Bias("out", 8), Mark("p"),
        Normalise(1e-6), Mark("u"), Scale("post", 8),
    )
)  # fmt: skip


def ways(expression: Expression, demand: Demand = MATCH) -> list[tuple[Any, ...]]:
    """Kind, capacity, and of each step: path, demand, what it reads, what stands beside it, anchor."""
    found = []
    for way in answer(expression, demand).ways:
        assert way.demand is demand
        steps = tuple((s.path, s.demand.value, s.reads, s.beside, s.anchor) for s in way.steps)
        for step in way.steps:
            assert expression.at(step.path) == step.stage
            assert step.kind is step.stage.kind
        found.append((way.kind.value, way.capacity, way.before, steps))
    return found


def test_the_ways_of_a_decoder_block() -> None:
    gated = f"{NOT_ZERO}; no entry of the other factors is 0; down_proj has full row rank"
    assert ways(LLAMA) == [
        ("weight", Capacity(8, 16, NOT_ZERO), ((2, 1), 5), (((2, 1, 5), "reach", "h", (), (2,)),)),
        ("weight", Capacity(0, 8, gated), ((2, 1), 3), (((2, 1, 3, 1), "reach", "z", (), (2,)),)),
        ("weight", Capacity(8, 8, NOT_ZERO), ((0, 1), 1), (((0, 1, 1), "reach", "a", (), (0,)),)),
    ]


def test_the_ways_through_a_norm() -> None:
    branch = "the wanted branch is not 0"
    scale = ((1, 1, 8), "reach", "", (), (1,))
    assert ways(POST) == [
        ("weight and scale", Capacity(1, 16, f"{NOT_ZERO}; {branch}"), ((1, 1), 3),
         (((1, 1, 3), "reach", "h", (), (1,)), scale)),
        ("bias and scale", Capacity(1, 1, branch), ((1, 1), 4), (((1, 1, 4), "reach", "", (), (1,)), scale)),
        ("scale", Capacity(1, 1, ONE_SCALE), ((1, 1), 8), (((1, 1, 8), "reach", "u", (), (1,)),)),
    ]  # fmt: skip


def test_a_scale_right_behind_a_norm_at_the_start_stands_alone() -> None:
    assert [way[0] for way in ways(V >> (Skip() + (Normalise() >> Scale("s", 4))))] == ["scale"]
    assert [way[0] for way in ways(V >> (Skip() + (Mark("p") >> Normalise() >> Scale("s", 4))))] == ["scale"]
    assert [way[0] for way in ways(V >> (Skip() + (Affine("w", 4, 4) >> Pointwise("f") >> Scale("s", 4))))] == ["scale"]


def test_the_ways_of_a_product() -> None:
    gate = V >> (Affine("a", 4, 4) * Bias("b", 4))
    others = "no entry of the other factors is 0"
    assert ways(gate) == [
        ("weight", Capacity(0, 4, f"{NOT_ZERO}; {others}"), ((), 1), (((1, 0), "reach", "v", (), (1,)),)),
        ("mixed", Capacity(1, 1, NOT_ZERO), ((), 1),
         (((1, 0), "match", "v", (), ()), ((1, 1), "match", "v", (), ()))),
        ("bias", Capacity(0, 1, others), ((), 1), (((1, 1), "reach", "v", (), (1,)),)),
    ]  # fmt: skip
    stuck = V >> (Skip() * Pointwise("tanh"))
    with pytest.raises(NoWay, match="not every factor follows the context, so one of them must reach"):
        plan(stuck)


def test_the_ways_of_a_sum_whose_branches_all_match() -> None:
    both = V >> ((Affine("a", 4, 4) >> Bias("a", 4)) + Bias("b", 4))
    assert ways(both) == [
        ("weight", Capacity(4, 4, NOT_ZERO), ((1, 0), 0), (((1, 0, 0), "reach", "v", (), (1,)),)),
        ("mixed", Capacity(1, 1, NOT_ZERO), ((), 1),
         (((1, 0, 0), "match", "v", (), ()), ((1, 1), "match", "v", (), ()))),
        ("bias", Capacity(1, 1), ((), 1), (((1, 0, 1), "match", "", (), ()), ((1, 1), "match", "v", (), ()))),
        ("bias", Capacity(1, 1), ((1, 0), 1), (((1, 0, 1), "reach", "", (), (1,)),)),
        ("bias", Capacity(1, 1), ((), 1), (((1, 1), "reach", "v", (), (1,)),)),
    ]  # fmt: skip


def test_ways_through_a_norm_do_not_mix_with_those_of_other_branches() -> None:
    normed = Affine("a", 4, 4) >> Normalise() >> Scale("a", 4)
    inner = normed >> (Skip() + (Affine("w", 4, 4) >> Normalise() >> Scale("s", 4)))
    found = answer(V >> (inner + Bias("b", 4)), MATCH)
    assert {way.kind.value for way in found.ways if way.reaches and len(way.steps) > 2} == set()
    assert all(len({step.demand for step in way.steps}) == 1 for way in found.ways)


def test_a_stage_that_steers_nothing_offers_no_way() -> None:
    outputs = ExpertOutputs("mlp", 2, 5, 6)
    assert (answer(outputs, MATCH).ways, answer(Experts("mlp", 8, 2, 6, 5), REACH).ways) == ((), ())
    assert [reason.what for reason in answer(outputs, MATCH).reasons] == [outputs.stuck]


def test_branches_are_matched_by_one_kind_where_all_have_it() -> None:
    first = Affine("a", 4, 4) >> Bias("a", 4) >> Scale("a", 4)
    found = answer(V >> (first + (Affine("b", 4, 4) >> Bias("b", 4))), MATCH)
    matched = [(way.kind.value, [step.path for step in way.steps]) for way in found.ways if not way.reaches]
    assert matched == [
        ("weight", [(1, 0, 0), (1, 1, 0)]),
        ("mixed", [(1, 0, 2), (1, 1, 0)]),
        ("bias", [(1, 0, 1), (1, 1, 1)]),
    ]


def test_branches_that_follow_need_no_step() -> None:
    (way,) = answer(Sum.of(Given("a", changes=False), Given("b", changes=False)), MATCH).ways
    assert (way.demand, way.kind, way.steps, way.capacity, way.before) == (MATCH, Kind.MIXED, (), ALWAYS, None)
    assert not way.reaches


def test_a_parallel_branch_takes_up_what_contextual_layers_gave_beside_it() -> None:
    attention = Given("a", after=True) >> Affine("o", 4, 4)
    mlp = Given("z") >> Affine("up", 4, 9) >> Pointwise("relu") >> Affine("down", 9, 4)
    assert ways(Sum.of(Given("x"), attention, mlp)) == [
        ("weight", Capacity(4, 4, NOT_ZERO), ((1,), 1), (((1, 1), "reach", "a", (), ()),)),
        ("weight", Capacity(4, 9, NOT_ZERO), ((2,), 3), (((2, 3), "reach", "", ("a",), ()),)),
    ]


def test_the_earliest_part_that_matches_comes_first() -> None:
    assert ways(V >> Affine("w", 4, 2) >> Affine("u", 2, 4)) == [
        ("weight", Capacity(4, 4, NOT_ZERO), ((), 1), (((1,), "match", "v", (), ()),)),
        ("weight", Capacity(2, 2, NOT_ZERO), ((), 2), (((2,), "match", "", (), ()),)),
    ]
    untouched = Given("x", changes=False) >> Affine("w", 4, 4)
    assert [way[0] for way in ways(untouched)] == ["mixed", "weight"]


def test_a_bottleneck_limits_what_a_later_weight_steers() -> None:
    assert ways(V >> (Skip() + (Affine("w", 4, 2) >> Affine("u", 2, 4)))) == [
        ("weight", Capacity(2, 2, NOT_ZERO), ((1, 1), 1), (((1, 1, 1), "reach", "", (), (1,)),))
    ]


def test_experts_match_inside_and_reach_outside() -> None:
    mixture = V >> (Skip() + Chain.of(Mark("z"), Experts("mlp", 8, 2, 6, 5), Mark("h"), ExpertOutputs("mlp", 2, 5, 6)))
    chosen = plan(mixture)
    assert chosen.outer is not None
    assert chosen.inner is not None
    assert chosen.outer.capacity == Capacity(6, 10, "some active expert has a nonzero gate and a nonzero hidden vector")
    assert [(step.path, step.reads) for step in chosen.outer.steps] == [((1, 1, 3), "h")]
    (inner,) = chosen.inner.steps
    assert (inner.path, inner.demand, inner.reads, inner.anchor) == ((1, 1, 1), MATCH, "z", (1, 1))


REFUSED: dict[str, tuple[Expression, int, list[str]]] = {
    "too many positions": (
        LLAMA, 17,
        [f"- {NOT_EVERY}",
         f"  - {fixed('x')}", f"  - {matrix('o_proj', 8)}", f"  - {fixed('a')}", f"  - {BEFORE}a is given",
         f"- {NOT_EVERY}", f"  - {SKIP}", f"  - {matrix('down_proj', 16)}",
         "  - silu has no parameter; steer a map before it to match, or after it to reach",
         f"  - {BEFORE}silu is not known to reach every value", f"  - {matrix('up_proj', 8)}",
         f"  - {BEFORE}a wanted output is not traced back through branches side by side"],
    ),
    "mixed later": (
        V >> Affine("w", 4, 4) >> Sum.of(Skip(), Given("late")), 1,
        [f"- {fixed('v')}", "- what matches here is mixed with late later, which does not", f"- {matrix('w', 4)}",
         f"- {NOT_EVERY}", f"  - {SKIP}", f"  - {fixed('late')}"],
    ),
    "a zero": (
        V >> (Skip() + Chain.of(Multiplier(0.0), Affine("w", 4, 4))), 1,
        [f"- {fixed('v')}", f"- {NOT_EVERY}", f"  - {SKIP}",
         "  - a fixed multiplier has no parameter; steer what it multiplies",
         "  - a weight reads a vector that is always 0; edit a bias, or another site",
         f"  - {BEFORE}a multiplier of 0 lets nothing through"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_gives_its_chain_of_reasons(name: str) -> None:
    expression, positions, lines = REFUSED[name]
    with pytest.raises(NoWay) as refused:
        plan(expression, positions)
    noun = "position" if positions == 1 else "positions"
    assert refused.value.asked == f"{formula(expression)} cannot absorb a context at {positions} {noun}"
    assert list(refused.value.reasons) == lines


def test_a_refusal_of_a_rule_says_what_is_possible() -> None:
    asked = [Service(REACH, Kind.BIAS), Service(REACH, Kind.EXPERTS, shared=True)]
    with pytest.raises(NoWay) as refused:
        plan(LLAMA, 1, asked)
    first = "- asked for reach by bias, reach by experts, one of them always active; possible here: weight"
    assert refused.value.reasons[0] == first
    with pytest.raises(NoWay) as refused:
        plan(LLAMA, 17, [Service(REACH, Kind.WEIGHT)])
    assert refused.value.reasons[0] == "- asked for reach by weight; possible here: nothing"
    with pytest.raises(NoWay) as refused:
        plan(POST, 1, [Service(REACH, Kind.WEIGHT)])
    assert refused.value.reasons[0].endswith("possible here: bias and scale, scale, weight and scale")


def test_the_plan_lists_what_else_was_possible() -> None:
    chosen = plan(LLAMA)
    assert [way.steps[0].path for way in chosen.outer_ways] == [(2, 1, 5), (2, 1, 3, 1), (0, 1, 1)]
    assert [(way.kind, [step.path for step in way.steps]) for way in chosen.inner_ways] == [
        (Kind.WEIGHT, [(2, 1, 3, 0, 0), (2, 1, 3, 1)]),
        (Kind.SCALE, [(2, 1, 1)]),
    ]
    assert chosen.inner is not None
    assert all(step.anchor == (2, 1) for way in chosen.inner_ways for step in way.steps)
    assert all(way.before is None for way in chosen.inner_ways)
    assert (chosen.decisive, chosen.positions, chosen.expression) == (chosen.outer, 1, LLAMA)
    assert chosen.without_inner().inner is None
    assert chosen.without_inner().outer == chosen.outer
    assert [way.steps[0].path for way in plan(LLAMA, 9).outer_ways] == [(2, 1, 5)]
    assert plan(LLAMA, 9).inner_ways == ()
    assert plan(LLAMA, 2).inner_ways == chosen.inner_ways[:1]


def test_a_plan_without_a_skip_has_no_outer_way() -> None:
    expression = V >> Normalise() >> Scale("s", 4) >> Affine("w", 4, 4)
    chosen = plan(expression)
    assert chosen.outer is None
    assert chosen.decisive is chosen.inner
    assert chosen.without_inner() is chosen
    assert [way.kind for way in chosen.inner_ways] == [Kind.WEIGHT, Kind.SCALE]
    assert [way.kind for way in plan(expression, 2).inner_ways] == [Kind.WEIGHT]
    with pytest.raises(ValueError, match="at least one position, met 0"):
        plan(expression, 0)


def test_an_inner_way_that_is_not_needed_is_left_out() -> None:
    untouched = Given("x", changes=False) >> Affine("w", 4, 4) >> Mark("h") >> Affine("out", 4, 4)
    chosen = plan(Sum.of(Given("a", after=True), untouched))
    assert (chosen.inner, chosen.inner_ways) == (None, ())


def test_services_cover_what_they_say() -> None:
    outer, _, attention = answer(LLAMA, MATCH).ways
    assert Service(REACH, Kind.WEIGHT).covers(outer)
    assert not Service(MATCH, Kind.WEIGHT).covers(outer)
    assert not Service(REACH, Kind.BIAS).covers(outer)
    assert Service(REACH, Kind.WEIGHT, reads="a").covers(attention)
    assert not Service(REACH, Kind.WEIGHT, reads="a").covers(outer)
    assert not Service(REACH, Kind.WEIGHT, beside=True).covers(outer)
    assert not Service(REACH, Kind.WEIGHT, shared=True).covers(outer)
    for shared in (True, False):
        branch = Chain.of(Experts("m", 8, 2, 6, 5), Mark("h"), ExpertOutputs("m", 2, 5, 6, shared=shared))
        (way,) = answer(V >> (Skip() + branch), MATCH).ways
        assert Service(REACH, Kind.EXPERTS, shared=True).covers(way) is shared
    nothing = answer(Given("x", changes=False), MATCH).ways[0]
    assert not Service(MATCH, Kind.MIXED).covers(nothing)


def test_rules_that_leave_the_inner_function_alone() -> None:
    alone = choose(LLAMA, names=["output weight alone"])
    assert (alone.inner, alone.outer, alone.reference) == ((), (OutputAlone,), None)
    assert choose(LLAMA, names=["output weight"]).outer == (OutputWeight,)
    through = choose(POST, names=["floored"])
    assert through.reference is not None
    assert through.reference.name == "floored"
    assert through.names == ("input weight", "output weight through a norm: floored")
    assert choose(POST).names == ("input weight", "output weight through a norm: balanced")
    assert choose(POST, names=["output bias through a norm", "flat"]).names[-1] == "output bias through a norm: flat"
    assert choose(LLAMA, names=["floored"]).reference is None
    with pytest.raises(InputError) as refused:
        choose(POST, names=["bent"])
    assert str(refused.value).startswith("rule 'bent' is unknown; choose one of input weight, input bias, input scale")
    assert str(refused.value).endswith("balanced, floored, theorem, appendix, scalar, flat")
    inner = Affine("a", 4, 4) + Bias("b", 4)
    mixed = choose(V >> (Skip() + (inner >> Pointwise("f") >> Affine("out", 4, 4))))
    assert mixed.names == ("input weight", "input bias", "output weight")


def test_formulas_in_the_letters_of_the_sheet() -> None:
    assert definitions(LLAMA) == (
        ("y", "v + W_down h"),
        ("h", "silu(W_gate z) ⊙ W_up z"),
        ("z", "m_norm ⊙ Norm(v)"),
        ("v", "x + W_o a"),
    )
    assert formula(POST) == "y = v + m_post ⊙ u; u = Norm(p); p = W_out h + b_out; h = gelu(W_in v)"


def test_given_values_are_listed_once_and_parts_are_found_by_their_path() -> None:
    a, b = Given("a"), Given("b", module="m", after=True)
    expression = Sum.of(a, b >> Skip(), a >> Affine("w", 2, 2))
    assert givens(expression) == (a, b)
    assert expression.at(()) is expression
    assert expression.at((2, 1)) == Affine("w", 2, 2)
    assert (Skip() + (Bias("b", 1) + Skip())).inside == (Skip(), Bias("b", 1), Skip())
    assert (Skip() * (Bias("b", 1) * Skip())).inside == (Skip(), Bias("b", 1), Skip())


def test_the_verdict_of_an_answer_is_its_best() -> None:
    found = answer(LLAMA, MATCH)
    assert [found.at(n) for n in (1, 8, 9, 16, 17)] == [
        Verdict.YES, Verdict.YES, Verdict.ASK, Verdict.ASK, Verdict.NO,
    ]  # fmt: skip
    assert answer(V, REACH).at(1) is Verdict.NO
    assert answer(Given("x", changes=False), MATCH).at(10**9) is Verdict.YES
