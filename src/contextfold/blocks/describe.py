"""Describe a block: stages whose widths, conventions and parameters are read off its named submodules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from contextfold.calculus import Affine, Bias, Chain, Expression, Given, Normalise, Scale, Stage, givens
from contextfold.errors import InputError

__all__ = ["Parts", "UserBlock", "leaves"]


@dataclass(frozen=True, eq=False)
class Parts:
    """Makes stages from the submodules of `block`, by dotted name. For parameters that stand in no `nn.Linear` or
    norm, write the stage out: `Affine("mixer", inputs, outputs, parameter="mix")`."""

    block: nn.Module

    def _module(self, name: str) -> nn.Module:
        try:
            return self.block.get_submodule(name)
        except AttributeError as error:
            known = ", ".join(known for known, _ in self.block.named_modules() if known)
            raise InputError(f"{type(self.block).__name__} has no submodule {name!r}; it has {known}") from error

    def linear(self, name: str) -> Chain:
        """`W z + b`, or `W z`, from an `nn.Linear`."""
        module = self._module(name)
        if not isinstance(module, nn.Linear):
            raise InputError(f"{name} is a {type(module).__name__}, not an nn.Linear; write its stages out")
        weight = Affine(name, module.in_features, module.out_features)
        return Chain.of(weight) if module.bias is None else Chain.of(weight, Bias(name, module.out_features))

    def norm(self, name: str) -> Chain:
        """Normalisation, then scale and bias if any, from an `nn.LayerNorm` or `nn.RMSNorm` over one axis."""
        module = self._module(name)
        if not isinstance(module, nn.LayerNorm | nn.RMSNorm) or len(module.normalized_shape) != 1:
            raise InputError(
                f"{name} is a {type(module).__name__}; only nn.LayerNorm and nn.RMSNorm over one axis are read, "
                "write others out as Normalise(eps) >> Scale(name, width)"
            )
        (width,) = module.normalized_shape
        if module.eps is None:
            raise InputError(f"{name} has no fixed eps (it depends on the dtype); give it one")
        chain = Chain.of(Normalise(module.eps, isinstance(module, nn.LayerNorm)))
        chain = chain if module.weight is None else chain >> Scale(name, width)
        bias = module._parameters.get("bias")
        return chain if bias is None else chain >> Bias(name, width)

    def read_by(self, name: str, letter: str) -> Given:
        """What the submodule is called on."""
        self._module(name)
        return Given(letter, name)

    def given_by(self, name: str, letter: str) -> Given:
        """What the submodule gives: of a contextual layer, say."""
        self._module(name)
        return Given(letter, name, after=True)


def leaves(expression: Expression) -> Iterator[Stage]:
    """All stages of an expression, from left to right."""
    if isinstance(expression, Stage):
        yield expression
    for part in expression.inside:
        yield from leaves(part)


@dataclass(frozen=True, eq=False)
class UserBlock:
    """A block and the expression of its output, in which module names are relative to the block.

    The expression starts from given values (`Given`): what a submodule, or the block itself, reads or gives. Those
    are measured; everything behind them is described. Nothing is believed: `fold_blocks` rebuilds the output from
    the description in both runs and refuses a block that does not give it.
    """

    block: nn.Module
    expression: Expression

    def __post_init__(self) -> None:
        if not self.given:
            raise InputError("an expression must start from a given value: what a submodule reads, or gives")
        for stage in leaves(self.expression):
            if stage.address is not None:
                self._check(*stage.address)

    @property
    def given(self) -> tuple[Given, ...]:
        """Every given value, once."""
        return givens(self.expression)

    def _check(self, module: str, parameter: str) -> None:
        try:
            self.block.get_submodule(module).get_parameter(parameter)
        except AttributeError as error:
            raise InputError(f"the description names {module}.{parameter}, which the block does not have") from error
