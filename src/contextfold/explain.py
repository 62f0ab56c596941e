"""Per block: its expression, the plan with its equations, how many positions it takes, and what would break it.

Nothing is run and no value of a weight is looked at. A configuration is enough: its model is laid out on the meta
device, where a parameter has a shape and no memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from contextfold.anatomy import Bound, Family, family_of
from contextfold.calculus import Demand, Verdict, answer, definitions
from contextfold.errors import InputError, NoWay, UnsupportedModel, one_line
from contextfold.forms import expression_of, kind_of, sites_of
from contextfold.incoming import UNREADABLE, check_folder, laid_out, reason
from contextfold.rules import REFERENCES, Choice, UpdateRule, choose, rules_for

__all__ = ["BlockExplanation", "Explanation", "PlannedRule", "explain", "explanation_view"]


@dataclass(frozen=True)
class PlannedRule:
    """One rule of a plan, in words."""

    part: str
    """`inner` or `outer`."""
    name: str
    equation: str
    source: str
    condition: str
    minimal: str
    edits: tuple[str, ...]
    """Dotted names, inside the layer, of the modules whose parameters move."""


@dataclass(frozen=True)
class BlockExplanation:
    """What the calculus says about one block."""

    layer: int
    kind: str
    """`dense`, `experts` or `mixer`."""
    expression: str
    definitions: tuple[tuple[str, str], ...]
    """Letter and formula, y first."""
    plan: tuple[PlannedRule, ...]
    """In the order in which they act; empty when the calculus says no."""
    verdict: str
    """`yes`, `ask` or `no` for the number of positions asked about."""
    capacity: str
    positions_sure: int
    positions_possible: int
    conditions: tuple[str, ...]
    breaks: tuple[tuple[str, str], ...]
    """Outcome and diagnosis of everything that the data can do to the plan."""
    alternatives: tuple[str, ...]
    """Names of the other rules that this block allows."""
    refusal: tuple[str, ...]
    """The chain of reasons, when the calculus says no."""

    @property
    def equations(self) -> tuple[str, ...]:
        """Of the plan's rules."""
        return tuple(rule.equation for rule in self.plan)


@dataclass(frozen=True)
class Explanation:
    """What the calculus says about a model."""

    model_type: str
    family: str
    quirks: str
    weights: str
    """`none` (a configuration, or the meta device), `not loaded` (they lie beside the configuration) or `present`; they
    are never looked at."""
    parameters: int
    positions: int
    blocks: tuple[BlockExplanation, ...]

    @property
    def controllable(self) -> bool:
        """Whether no block was refused."""
        return all(block.verdict != Verdict.NO.value for block in self.blocks)

    def to_json(self) -> dict[str, Any]:
        """Plain data; keys are the names of the fields."""
        blocks = [{**asdict(block), "equations": list(block.equations)} for block in self.blocks]
        for block in blocks:
            block["definitions"] = dict(block["definitions"])
            block["breaks"] = dict(block["breaks"])
        return {**asdict(self), "controllable": self.controllable, "blocks": blocks}


def explain(source: Bound | nn.Module | Any, positions: int = 1, rules: Sequence[str] = ()) -> Explanation:
    """Say for every block how it absorbs a context, or why it cannot.

    Arguments:
        source: a transformers model (bound or not, on any device, the meta device included), a configuration, the
            path of a folder that holds a `config.json`, or a hub id, of which only the configuration is fetched.
        positions: how many positions one patch must meet at once.
        rules: rules, or members of the post-norm class, asked for by name; checked by the calculus.

    Raises `InputError` for an unknown rule, a rule that no block allows, or a folder without a configuration, and
    `UnsupportedModel` when no anatomy is known. A block that cannot absorb a context is no error: its `refusal`
    says why.
    """
    if positions < 1:
        raise InputError(f"positions must be at least 1, met {positions}")
    whole = source.model if isinstance(source, Bound) else source
    model = whole if isinstance(whole, nn.Module) else _skeleton(_configuration(whole))
    config: Any = model.config
    family = family_of(config.model_type)
    text = config.get_text_config(decoder=True)
    blocks = tuple(_block(family, i, layer, text, positions, rules) for i, layer in _layers(model, family))
    _check_used(blocks, rules)
    sizes = sum(p.numel() for p in model.parameters())
    return Explanation(config.model_type, family.name, family.quirks, _weights(source, model), sizes, positions, blocks)


def _weights(source: Any, model: nn.Module) -> str:
    if isinstance(source, str | Path) and any(Path(source).glob("*.safetensors")):
        return "not loaded"
    return "none" if any(p.device.type == "meta" for p in model.parameters()) else "present"


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def _configuration(source: Any) -> Any:
    """The configuration that `source` is, or that lies at it. Weights are not read."""
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(source, PreTrainedConfig):
        return source
    if not isinstance(source, str | Path):
        raise InputError(f"expected a model, a configuration, a folder or a hub id, met {type(source).__name__}")
    remote = not Path(source).exists() and HUB_ID.fullmatch(str(source)) is not None
    if not remote and not (Path(source) / "config.json").is_file():
        raise InputError(f"there is no config.json in {source}; give a folder that holds one, or a configuration")
    if not remote:
        check_folder(Path(source))
    try:
        return AutoConfig.from_pretrained(str(source), trust_remote_code=False, local_files_only=not remote)
    except UNREADABLE as error:
        raise InputError(f"no configuration that is known here at {source}: {reason(error)}") from error


def _skeleton(config: Any) -> nn.Module:
    """The model of a configuration, on the meta device: shapes without weights."""
    family_of(config.model_type)
    try:
        return laid_out(config)
    except UNREADABLE as error:
        raise UnsupportedModel(
            f"no causal language model is laid out from this configuration: {one_line(error)}"
        ) from error


def _layers(model: nn.Module, family: Family) -> Iterator[tuple[int, nn.Module]]:
    try:
        layers = list(model.get_submodule(family.layers).children())
    except AttributeError as error:
        raise UnsupportedModel(
            f"{type(model).__name__} has no {family.layers}, where family {family.name!r} has its layers"
        ) from error
    for index, layer in enumerate(layers):
        if family.idle is None or family.idle not in dict(layer.named_children()):
            yield index, layer


def _block(
    family: Family, index: int, layer: nn.Module, config: Any, positions: int, rules: Sequence[str]
) -> BlockExplanation:
    sites = sites_of(family, layer, config)
    expression = expression_of(sites, layer, config)
    ways = answer(expression, Demand.MATCH).ways
    possible = [r for way in ways if way.capacity.at(positions) is not Verdict.NO for r in rules_for(way)]
    letters = definitions(expression)
    text = "; ".join(f"{letter} = {formula}" for letter, formula in letters)
    try:
        choice = choose(expression, positions, rules)
    except NoWay as refusal:
        others = tuple(dict.fromkeys(rule.name for rule in possible))
        return BlockExplanation(
            index, kind_of(sites), text, letters, (), Verdict.NO.value, "never", 0, 0, (), (), others, refusal.reasons
        )
    used = (*choice.inner, *choice.outer)
    possible += [rule for way in choice.plan.inner_ways for rule in rules_for(way)]
    capacity = choice.plan.capacity
    return BlockExplanation(
        layer=index,
        kind=kind_of(sites),
        expression=text,
        definitions=letters,
        plan=tuple(_planned(choice)),
        verdict=choice.plan.verdict.value,
        capacity=str(capacity),
        positions_sure=capacity.sure,
        positions_possible=capacity.maybe,
        conditions=tuple(dict.fromkeys(rule.condition for rule in _planned(choice))),
        breaks=tuple(dict.fromkeys((o.label, o.diagnosis) for rule in used for o in rule.meets)),
        alternatives=tuple(dict.fromkeys(rule.name for rule in possible if rule not in used)),
        refusal=(),
    )


def _planned(choice: Choice) -> Iterator[PlannedRule]:
    plan = choice.plan
    for part, way, rules in (("inner", plan.inner, choice.inner), ("outer", plan.outer, choice.outer)):
        if way is None:
            continue
        edits = tuple(step.stage.address[0] for step in way.steps if step.stage.address is not None)
        for rule in rules:
            yield _in_words(part, rule, choice, edits)


def _in_words(part: str, rule: type[UpdateRule], choice: Choice, edits: tuple[str, ...]) -> PlannedRule:
    member = choice.reference if part == "outer" else None
    if member is None:
        return PlannedRule(part, rule.name, rule.equation, rule.source, rule.condition, rule.minimal, edits)
    equation = f"{rule.equation}; {member.equation}"
    source = f"{rule.source}; {member.name}: {member.source}"
    condition = f"{member.condition}; one position"
    return PlannedRule(part, f"{rule.name}: {member.name}", equation, source, condition, member.minimal, edits)


def _check_used(blocks: Sequence[BlockExplanation], rules: Sequence[str]) -> None:
    """A member of the post-norm class says nothing where no block has such a norm."""
    members = {member.name for member in REFERENCES} & set(rules)
    planned = [rule.name for block in blocks for rule in block.plan]
    if members and not any(name.endswith(f": {member}") for name in planned for member in members):
        raise InputError(
            f"{', '.join(sorted(members))} chooses the scale of a norm after the MLP, and no block here has one that "
            "the plan goes through; leave it out"
        )


def explanation_view(explanation: Explanation) -> RenderableType:
    """Blocks with the same form and plan as one entry, for the command line."""
    weights = "from shapes alone" if explanation.weights == "none" else f"weights {explanation.weights}, shapes suffice"
    head = Text(
        f"{explanation.model_type} (family {explanation.family}), {explanation.parameters:,} parameters, {weights}; "
        f"{explanation.positions} position(s) per patch"
    )
    entries: list[RenderableType] = [head]
    for _, same in groupby(explanation.blocks, key=lambda block: {**asdict(block), "layer": 0}):
        entries.append(_entry(list(same)))
    return Group(*entries)


def _entry(blocks: Sequence[BlockExplanation]) -> RenderableType:
    first, last = blocks[0], blocks[-1]
    layers = f"layer {first.layer}" if first is last else f"layers {first.layer} to {last.layer}"
    table = Table(title=f"{layers}: {first.kind}", title_justify="left", show_header=False)
    for letter, text in first.definitions:
        table.add_row(letter, Text(text))
    table.add_section()
    for rule in first.plan:
        table.add_row(f"{rule.part} rule", Text(f"{rule.name} on {', '.join(rule.edits)}", style="bold"))
        table.add_row("", Text(f"{rule.equation}   {rule.source}"))
        table.add_row("", Text(f"exact when {rule.condition}; {rule.minimal}"))
    table.add_row("positions", Text(first.capacity if first.plan else "none"))
    for line in first.refusal:
        table.add_row("no way", Text(line, style="red"))
    if first.breaks:
        table.add_row("what would break it", Text(", ".join(label for label, _ in first.breaks)))
    table.add_row("other rules", Text(", ".join(first.alternatives) or "none"))
    return table
