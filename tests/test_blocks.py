"""Blocks of one's own: exact where the calculus says so, refused with a reason where description or data fail."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from contextfold import patchfile
from contextfold.blocks import Parts, UserBlock, fold_blocks, patched
from contextfold.calculus import Affine, Expression, Pointwise, Skip
from contextfold.errors import InputError, NotControllable, NoWay, PatchMismatch, ProbeFailed
from contextfold.outcomes import Outcome
from contextfold.patch import BiasEdit, MatrixEdit, ScaleEdit
from stagebook import Block, Case, Node, case

EXAMPLES = Path(__file__).parent.parent / "examples"


def chain(*kinds: str) -> Node:
    return Node("chain", tuple(Node(kind) for kind in kinds))


def fold(one: Case, **options: object) -> tuple[float, float]:
    """Relative error without and with the patch, by a plain forward of the written block."""
    last = int(options.get("last", 1))  # type: ignore[call-overload]
    wanted = one.with_context()[0, -last:]
    before = one.without()[0, -last:]
    folded = fold_blocks(one.block, [one.described], one.with_context, one.without, **options)  # type: ignore[arg-type]
    with patched(one.block, folded.patch):
        after = one.without()[0, -last:]
    assert torch.equal(one.without()[0, -last:], before)
    return tuple(float((y - wanted).norm() / wanted.norm()) for y in (before, after))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["own_block", "own_mixer"])
def test_the_examples_do_what_they_say(name: str, dtype: torch.dtype) -> None:
    figures = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](dtype)
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    if name == "own_block":
        assert figures["unpatched"] > 0.1
        assert figures["silent"] > 0.3
        assert figures["patched"] < limit
    else:
        assert max(figures.values()) < limit


RULES = {
    "input weight, output weight": (chain("layer norm", "up down"), ["input weight", "output weight"], 3),
    "output alone": (chain("layer norm", "up down"), ["output weight alone"], 3),
    "biases": (chain("rms", "linear", "tanh", "linear"), ["input bias", "output bias"], 1),
    "norm's own scale": (chain("scaled rms", "up down"), ["input scale", "output weight"], 1),
    "scale": (chain("linear", "scale"), ["output scale"], 1),
    "through a norm": (chain("plain", "scaled rms"), ["balanced"], 1),
    "theorem": (chain("plain", "scaled rms"), ["theorem"], 1),
    "bias through a norm": (chain("plain", "tanh", "bias", "scaled rms"), ["output bias through a norm"], 1),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_by_name(name: str) -> None:
    node, rules, last = RULES[name]
    before, after = fold(case(node, True, seed=5), rules=rules, last=last)
    assert before > 1e-2
    assert after < 1e-10


def test_a_rectifier_that_is_nearly_always_silent() -> None:
    """Most of h is exactly zero; what is left carries the whole edit."""
    one = case(chain("linear", "relu", "linear"), True, seed=0)
    one.block.f.inner[0].map.bias -= 2.0
    one.block.f.inner[0].map.bias[1] += 4.0
    before, after = fold(one)
    h = torch.relu(one.block.f.inner[0].map(one.block.mean(torch.cat([one.context, one.query])[None])))[0, -1]
    assert int((h == 0).sum()) >= 4
    assert before > 1e-2
    assert after < 1e-12


def test_a_rectifier_that_is_always_silent_is_named() -> None:
    node = Node("chain", (Node("linear"), Node("relu"), Node("plain")))
    one = case(node, True, seed=0)
    one.block.f.inner[0].map.bias -= 100.0
    with pytest.raises(NotControllable) as refused:
        fold(one)
    assert refused.value.findings[0].outcome is Outcome.ZERO_SOURCE


def test_the_theorem_names_a_zero_entry_behind_a_rectifier() -> None:
    one = case(chain("linear", "relu", "scaled rms"), True, seed=0)
    with pytest.raises(NotControllable) as refused:
        fold(one, rules=["output scale"])
    assert refused.value.findings[0].outcome is Outcome.ZERO_ENTRY


def test_a_zero_input_is_skipped_openly_and_the_output_does_it_all() -> None:
    one = case(chain("plain", "linear"), True, seed=0)
    one.block.f.inner[0].map.weight.zero_()
    folded = fold_blocks(
        one.block, [one.described], one.with_context, one.without, rules=["input weight", "output bias"]
    )
    assert folded.blocks[0].relative_error < 1e-12


def test_through_a_norm_one_position_at_a_time() -> None:
    with pytest.raises(InputError, match="pass last=1"):
        fold(case(chain("plain", "scaled rms"), True, seed=0), last=2)


def test_no_way_says_why_before_anything_runs() -> None:
    one = case(chain("linear", "tanh"), True, seed=0)
    with pytest.raises(NoWay, match="tanh is not known to reach every value"):
        fold_blocks(one.block, [one.described], lambda: 1 / 0, lambda: 1 / 0)


def test_a_wrong_description_is_refused() -> None:
    one = case(chain("linear", "tanh", "linear"), True, seed=0)
    parts = Parts(one.block)
    wrong = parts.linear("f.inner.0.map") >> Pointwise("relu", torch.relu) >> parts.linear("f.inner.2.map")
    described = UserBlock(one.block, parts.given_by("mean", "v") >> (Skip() + wrong))
    with pytest.raises(ProbeFailed, match="gives another output than the block"):
        fold_blocks(one.block, [described], one.with_context, one.without)


class Custom(nn.Module):
    """A parameter of the block itself, stored (in, out), and one weight used on both sides of v."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.mixer = nn.GRU(4, 4, batch_first=True)
        self.W = nn.Parameter(torch.randn(4, 4))
        self.tied = tied
        self.read = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        v = x + self.mixer(x)[0]
        v = self.read(v @ self.W if self.tied else v)
        return v + v @ self.W

    def describe(self) -> UserBlock:
        parts = Parts(self)
        weight: Expression = Affine("", 4, 4, transposed=True, parameter="W")
        return UserBlock(self, parts.read_by("read", "v") >> (Skip() + weight))


def test_a_parameter_of_the_block_itself() -> None:
    block = Custom(tied=False).double().eval().requires_grad_(False)
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    folded = fold_blocks(block, [block.describe()], lambda: block(x), lambda: block(x[:, -2:]), last=2)
    (site,) = folded.patch.edits
    assert site.name.endswith("W")
    assert folded.blocks[0].relative_error < 1e-12
    assert folded.blocks[0].unpatched_error > 1e-2


def test_a_given_value_that_moves_with_the_edit_was_not_given() -> None:
    block = Custom(tied=True).double().eval().requires_grad_(False)
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    with pytest.raises(ProbeFailed, match="v changed when the block was edited"):
        fold_blocks(block, [block.describe()], lambda: block(x), lambda: block(x[:, -2:]))


def test_the_model_is_unchanged_and_the_patch_is_for_its_weights_only(tmp_path: Path) -> None:
    one = case(chain("scaled rms", "plain", "tanh", "linear", "scaled rms"), True, seed=2)
    before = {name: p.clone() for name, p in one.block.named_parameters()}
    folded = fold_blocks(one.block, [one.described], one.with_context, one.without)
    kinds = {type(edit) for edit in folded.patch.edits.values()}
    assert kinds == {MatrixEdit, ScaleEdit}
    again = patchfile.load(patchfile.save(folded.patch, tmp_path / "p.safetensors"))
    with patched(one.block, again):
        assert not all(torch.equal(p, before[name]) for name, p in one.block.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in one.block.named_parameters())
    one.block.f.inner[1].map.weight += 1e-3
    with pytest.raises(PatchMismatch), patched(one.block, folded.patch):
        pass


def test_every_kind_of_edit_is_made() -> None:
    one = case(chain("rms", "linear", "tanh", "linear"), True, seed=5)
    folded = fold_blocks(one.block, [one.described], one.with_context, one.without, rules=["input bias", "output bias"])
    assert {type(edit) for edit in folded.patch.edits.values()} == {BiasEdit}
    assert folded.patch.header.plan == ("input bias", "output bias")


def test_what_cannot_be_read_off_is_refused() -> None:
    block = nn.Sequential(nn.Conv1d(3, 3, 1), nn.LayerNorm((2, 3)), nn.RMSNorm(3))
    parts = Parts(block)
    with pytest.raises(InputError, match=r"Conv1d, not an nn\.Linear"):
        parts.linear("0")
    with pytest.raises(InputError, match="over one axis"):
        parts.norm("1")
    with pytest.raises(InputError, match="no fixed eps"):
        parts.norm("2")
    with pytest.raises(InputError, match="has no submodule 'mlp'; it has 0, 1, 2"):
        parts.linear("mlp")
    with pytest.raises(InputError, match="start from a given value"):
        UserBlock(block, Affine("0", 3, 3))
    with pytest.raises(InputError, match=r"names 0\.weigth"):
        UserBlock(block, parts.read_by("0", "v") >> Affine("0", 3, 3, parameter="weigth"))


def test_runs_that_do_not_fit_are_refused() -> None:
    one = case(chain("linear"), True, seed=0)
    with pytest.raises(InputError, match="was not seen"):
        fold_blocks(one.block, [one.described], lambda: None, one.without)
    with pytest.raises(InputError, match="expected"):
        fold_blocks(one.block, [one.described], lambda: one.block(torch.zeros(2, 5, 6).double()), one.without)
    with pytest.raises(InputError, match="n >= 5"):
        fold_blocks(one.block, [one.described], one.with_context, one.without, last=5)
    with pytest.raises(InputError, match="is not part of"):
        fold_blocks(nn.Linear(2, 2), [one.described], one.with_context, one.without)
    with pytest.raises(InputError, match="no block was described"):
        fold_blocks(one.block, [], one.with_context, one.without)
    parts = Parts(one.block)
    nameless = UserBlock(
        one.block, parts.given_by("mean", "v") >> (Skip() + Pointwise("tanh")) >> parts.linear("f.inner.0.map")
    )
    with pytest.raises(InputError, match="the function of 'tanh' is not given"):
        fold_blocks(one.block, [nameless], one.with_context, one.without)


def test_a_stack_of_blocks_is_corrected_layer_by_layer() -> None:
    cases = [case(chain("layer norm", "up down"), True, seed=s) for s in (1, 2, 3)]
    model = nn.Sequential(*(one.block for one in cases))
    tokens, query = torch.cat([cases[0].context, cases[0].query])[None], cases[0].query[None]
    folded = fold_blocks(model, [one.described for one in cases], lambda: model(tokens), lambda: model(query), last=2)
    wanted, before = model(tokens)[0, -2:], model(query)[0, -2:]
    with patched(model, folded.patch):
        after = model(query)[0, -2:]
    assert float((before - wanted).norm() / wanted.norm()) > 0.1
    assert float((after - wanted).norm() / wanted.norm()) < 1e-12
    assert sorted({site.layer for site in folded.patch.edits}) == [0, 1, 2]


def test_the_suite_can_fail() -> None:
    one = case(chain("linear"), True, seed=0)
    wanted = one.with_context()[0, -1]
    folded = fold_blocks(one.block, [one.described], one.with_context, one.without)
    with patched(one.block, folded.patch * -1.0):
        assert float((one.without()[0, -1] - wanted).norm() / wanted.norm()) > 1e-2
    assert isinstance(one.block, Block)
