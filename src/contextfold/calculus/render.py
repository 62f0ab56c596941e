"""An expression of stages as formulas in the letters of the equation sheet."""

from __future__ import annotations

from math import isnan

from contextfold.calculus.expression import Chain, Expression, Given, Product, Sum
from contextfold.calculus.stages import (
    Affine,
    Bias,
    ExpertOutputs,
    Experts,
    Mark,
    Multiplier,
    Normalise,
    Pointwise,
    Scale,
    Skip,
)

__all__ = ["definitions", "formula"]


def formula(expression: Expression) -> str:
    """One line per marked letter, from the output inwards, joined by `;`."""
    return "; ".join(f"{letter} = {text}" for letter, text in definitions(expression))


def definitions(expression: Expression) -> tuple[tuple[str, str], ...]:
    """`(letter, formula)` pairs: y first, then every letter that the expression marks."""
    found: dict[str, str] = {}
    text = _text(expression, "x", found)
    return (("y", text), *reversed(tuple(found.items())))


def _text(part: Expression, argument: str, found: dict[str, str]) -> str:
    match part:
        case Chain(parts):
            for inner in parts:
                argument = _text(inner, argument, found)
            return argument
        case Sum(parts):
            return " + ".join(_text(inner, argument, found) for inner in parts)
        case Product(parts):
            return " ⊙ ".join(_factor(_text(inner, argument, found)) for inner in parts)
        case Mark(letter):
            if argument != letter:
                found.setdefault(letter, argument)
            return letter
        case _:
            return _leaf(part, argument)


def _leaf(part: Expression, argument: str) -> str:
    match part:
        case Given(name=name):
            return name
        case Skip():
            return argument
        case Affine():
            return f"W_{part.subscript} {_bracketed(argument, '+⊙·')}"
        case Bias():
            return f"{argument} + b_{part.subscript}"
        case Scale():
            return f"m_{part.subscript} ⊙ {_factor(argument)}"
        case Normalise(centred=centred):
            return f"{'LayerNorm' if centred else 'Norm'}({argument})"
        case Pointwise(name=name):
            return f"{name}({argument})"
        case Multiplier(alpha):
            return f"{'alpha' if isnan(alpha) else f'{alpha:g}'} · {_factor(argument)}"
        case Experts(active=active, count=count, shared=shared):
            return f"experts({argument}), {active} of {count}{' and a shared one' if shared else ''}"
        case ExpertOutputs():
            return f"Σ_e s_e W_out,e {argument}_e"
        case _:
            raise TypeError(f"{type(part).__name__} is no expression of stages")


def _factor(text: str) -> str:
    """Brackets around a sum that becomes a factor."""
    return _bracketed(text, "+")


def _bracketed(text: str, signs: str) -> str:
    """In brackets when one of `signs` stands outside all brackets of `text`."""
    depth, plain = 0, True
    for character in text:
        depth += (character == "(") - (character == ")")
        plain = plain and not (depth == 0 and character in signs)
    return text if plain else f"({text})"
