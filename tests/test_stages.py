"""What each stage of the calculus declares, in words and numbers, and how a formula is spelled."""

from __future__ import annotations

import pytest

from contextfold.calculus import (
    ALWAYS,
    NEVER,
    Affine,
    Bias,
    Capacity,
    ExpertOutputs,
    Experts,
    Expression,
    Given,
    Mark,
    Multiplier,
    Normalise,
    Pointwise,
    Product,
    Scale,
    Skip,
    Stage,
    Sum,
    Verdict,
    answer,
    formula,
)
from contextfold.calculus.spread import UNBOUNDED, Spread
from words import MATCH, NOT_ZERO, ONE_SCALE, REACH, SKIP, fixed, matrix


def shift(name: str) -> str:
    return (
        f"the bias of {name} adds the same vector at every position, so several positions are met only if all want the "
        "same shift; edit a weight, or fold one position"
    )


Entry = tuple[Capacity, Capacity, Verdict, str, str]
STAGES: dict[str, tuple[Stage, Entry]] = {
    "given": (Given("a"), (NEVER, NEVER, Verdict.NO, "a is given", fixed("a"))),
    "given, not changed": (Given("a", changes=False), (ALWAYS, NEVER, Verdict.NO, "a is given", fixed("a"))),
    "narrow": (
        Affine("f.up_proj", 3, 5),
        (Capacity(3, 3, NOT_ZERO), Capacity(3, 3, NOT_ZERO), Verdict.NO,
         "f.up_proj reaches only 3 of 5 dimensions as it stands", matrix("f.up_proj", 3)),
    ),
    "square": (
        Affine("w", 4, 4),
        (Capacity(4, 4, NOT_ZERO), Capacity(4, 4, NOT_ZERO), Verdict.ASK, "w has full row rank", matrix("w", 4)),
    ),
    "bias": (Bias("w", 4), (Capacity(1, 1), Capacity(1, 1), Verdict.YES, "", shift("w"))),
    "scale": (
        Scale("n", 4),
        (Capacity(1, 1, ONE_SCALE), Capacity(1, 1, ONE_SCALE), Verdict.ASK, "no entry of the scale of n is 0",
         "the scale of n is one number per coordinate for all positions, so alone it steers one position; edit the "
         "weight before it as well, or fold one position"),
    ),
    "norm": (
        Normalise(1e-6),
        (NEVER, NEVER, Verdict.NO, "a normalisation reaches only vectors of one length",
         "a normalisation has no parameter, and its output has one length whatever goes in; give it a scale, or add an "
         "output bias after it"),
    ),
    "pointwise": (
        Pointwise("silu"),
        (NEVER, NEVER, Verdict.NO, "silu is not known to reach every value",
         "silu has no parameter; steer a map before it to match, or after it to reach"),
    ),
    "multiplier": (
        Multiplier(0.5),
        (NEVER, NEVER, Verdict.YES, "", "a fixed multiplier has no parameter; steer what it multiplies"),
    ),
    "multiplier of 0": (
        Multiplier(0.0),
        (NEVER, NEVER, Verdict.NO, "a multiplier of 0 lets nothing through",
         "a fixed multiplier has no parameter; steer what it multiplies"),
    ),
    "experts": (
        Experts("mlp", 8, 2, 6, 5),
        (Capacity(6, 6, "its input is not 0; no tie at the border of the selection, lest rounding flips an expert"),
         NEVER, Verdict.NO, "what experts give is not known to reach every value",
         "mlp reads 6 numbers, so it matches at most 6 positions; fold fewer"),
    ),
    "outputs of experts": (
        ExpertOutputs("mlp", 2, 5, 6),
        (NEVER, Capacity(10, 10, "some active expert has a nonzero gate and a nonzero hidden vector"), Verdict.NO,
         "output maps of experts are not known to reach every value as they stand",
         "mlp: 2 active experts read 10 numbers and steer as many positions"),
    ),
    "skip": (Skip(), (NEVER, NEVER, Verdict.YES, "", SKIP)),
    "mark": (Mark("h"), (NEVER, NEVER, Verdict.YES, "", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_what_a_stage_declares(name: str) -> None:
    stage, (matches, reaches, verdict, why, stuck) = STAGES[name]
    assert (stage.steers(MATCH), stage.steers(REACH)) == (matches, reaches)
    assert (stage.passes().verdict, stage.passes().why) == (verdict, why)
    assert stage.stuck == stuck
    assert stage.inside == ()


def test_addresses_and_subscripts() -> None:
    assert Affine("layers.0.mlp.up_proj", 1, 1).address == ("layers.0.mlp.up_proj", "weight")
    assert Affine("mlp", 1, 1, parameter="w1").address == ("mlp", "w1")
    assert Bias("mlp", 1).address == ("mlp", "bias")
    assert Skip().address is None
    names = ("layers.0.mlp.up_proj", "h.0.c_proj", "dense", "a.b_proj.c")
    assert [Affine(name, 1, 1).subscript for name in names] == ["up", "c_proj", "dense", "c"]


def test_capacities_in_words() -> None:
    assert [str(c) for c in (NEVER, ALWAYS, Capacity(3, 3), Capacity(0, 4), Capacity(2, 4))] == [
        "never", "any number", "up to 3", "up to 4 if the data allow", "2 sure, up to 4 if the data allow",
    ]  # fmt: skip
    for low, high in ((-1, 2), (3, 2), (0, -1)):
        with pytest.raises(ValueError, match=f"needs 0 <= sure <= maybe, met {low} and {high}"):
            Capacity(low, high)
    both = Capacity(2, 9, "p; q").together(Capacity(3, 5, "q; r"))
    assert both == Capacity(2, 5, "p; q; r")
    assert both.asking("s; q") == Capacity(0, 5, "p; q; r; s")
    assert Capacity(1, 1).asking("p") == Capacity(0, 1, "p")


def test_how_many_independent_vectors_stand_behind_a_stage() -> None:
    two = Spread(2, 3)
    wide = UNBOUNDED.maybe
    assert [two.behind(stage) for stage in (
        Given("x"), Affine("w", 9, 1), Affine("w", 1, 9), Affine("w", 9, 9), Bias("b", 4), Multiplier(2.0),
        Multiplier(0.0), Experts("m", 8, 2, 1, 5), Experts("m", 8, 2, 6, 5), Pointwise("f"),
        ExpertOutputs("m", 2, 5, 6), Normalise(), Scale("s", 4), Skip(), Mark("h"),
    )] == [
        UNBOUNDED, Spread(1, 1), Spread(1, 1), two, Spread(2, 4), two,
        Spread(0, 0), Spread(1, wide), Spread(2, wide), Spread(2, wide),
        Spread(2, wide), two, two, two, two,
    ]  # fmt: skip
    assert Spread(0, 0).behind(Bias("b", 4)) == Spread(1, 1)
    narrow = Affine("w", 9, 1) >> Affine("u", 1, 9)
    assert two.through(narrow) == Spread(1, 1)
    assert two.behind(Sum.of(narrow, Skip())) == Spread(2, wide)
    assert two.behind(Product.of(narrow, narrow)) == Spread(1, wide)
    assert (UNBOUNDED.sure, UNBOUNDED.maybe) == (2**31 - 1, 2**31 - 1)


def test_formulas_are_spelled_with_the_brackets_that_they_need() -> None:
    tail = [
        (Normalise(centred=True), "LayerNorm(x)"),
        (Multiplier(0.25), "0.25 · x"),
        (Multiplier(float("nan")), "alpha · x"),
        (Experts("m", 8, 2, 6, 5), "experts(x), 2 of 8"),
        (Experts("m", 8, 2, 6, 5, shared=True), "experts(x), 2 of 8 and a shared one"),
        (Mark("h") >> ExpertOutputs("m", 2, 5, 6), "Σ_e s_e W_out,e h_e; h = x"),
        (Bias("m", 4) >> Affine("w", 4, 4), "W_w (x + b_m)"),
        (Bias("m", 4) >> Scale("s", 4), "m_s ⊙ (x + b_m)"),
        (Bias("m", 4) >> Multiplier(2.0), "2 · (x + b_m)"),
        (Bias("m", 4) * Affine("w", 4, 4), "(x + b_m) ⊙ W_w x"),
        (Multiplier(2.0) >> Affine("w", 4, 4), "W_w (2 · x)"),
        (Scale("s", 4) >> Affine("w", 4, 4), "W_w (m_s ⊙ x)"),
        (Bias("m", 4) >> Pointwise("f") >> Affine("w", 4, 4), "W_w f(x + b_m)"),
        (Pointwise("f") >> Bias("m", 4) >> Affine("w", 4, 4), "W_w (f(x) + b_m)"),
        (Scale("s", 4) >> Scale("t", 4), "m_t ⊙ m_s ⊙ x"),
        (Given("XY") >> Scale("s", 4), "m_s ⊙ XY"),
        (Mark("x") >> Skip(), "x"),
        (Mark("p") >> Bias("b", 4) >> Mark("p"), "p; p = x"),
    ]
    assert [formula(part) for part, _ in tail] == [f"y = {text}" for _, text in tail]


def test_what_is_no_expression_is_refused_by_its_name() -> None:
    class Odd(Expression):
        inside = ()

    for refuse in (lambda: answer(Odd(), MATCH), lambda: formula(Odd())):
        with pytest.raises(TypeError, match="Odd is no expression of stages"):
            refuse()
