"""Mixtures of experts: known by parameters that hold the maps of several experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from contextfold.anatomy.discover.tape import LayerCall, Passing, Step, Tape
from contextfold.anatomy.discover.values import by_token, same
from contextfold.anatomy.discover.wiring import wired
from contextfold.anatomy.record import Experts, Wiring
from contextfold.errors import UnsupportedModel

__all__ = ["propose_mixture", "stacked_groups"]


def stacked_groups(layer: nn.Module, tape: Tape) -> list[list[Step]]:
    """Steps that read a slice of a parameter, or a stack of matrices, by the part of the layer that they are in."""
    groups: dict[str, list[Step]] = {}
    for step in tape.steps:
        name = step.parameters[0]
        if _is_stacked(layer, step):
            groups.setdefault(name.partition(".")[0], []).append(step)
    return list(groups.values())


def _is_stacked(layer: nn.Module, step: Step) -> bool:
    """A convolution's weight has three axes too, but one of them is not a width."""
    name = step.parameters[0]
    stored = layer.get_parameter(name)
    if isinstance(layer.get_submodule(name.rpartition(".")[0]), nn.Conv1d):
        return False
    return stored.dim() == 3 or (stored.dim() == 2 and step.weight.numel() < stored.numel())


def propose_mixture(call: LayerCall, tape: Tape, stacked: Sequence[Step]) -> Experts:
    """Raises `UnsupportedModel` when no module gives the branch from z alone."""
    layer, width = call.layer, tape.result.shape[-1]
    names = list(dict.fromkeys(step.parameters[0] for step in stacked))
    last = stacked[-1]
    if last.result.shape[-1] != width and last.result.shape[-2:] != (width, 1):
        raise UnsupportedModel("experts were found whose result has another width than the stream")
    inputs = [name for name in names if name != last.parameters[0]]
    first = next((step for step in stacked if step.parameters[0] in inputs), None)
    if first is None:
        raise UnsupportedModel("experts were found that have one map only")
    passing = _branch(call, tape, names)
    z = by_token(passing.given, call.tokens)
    assert z is not None
    base = Experts(
        branch=(passing.module, *_beside(call, tape, passing, z)),
        input_maps=(),
        stacked_inputs=tuple(inputs),
        outputs=(last.parameters[0],),
        wiring=Wiring(),
        transposed=_transposed(layer, first),
        output_transposed=_transposed(layer, last),
        packed=_packed(layer, first),
    )
    return _with_plain_maps(wired(call, tape, base), call, tape, z)


def _with_plain_maps(base: Experts, call: LayerCall, tape: Tape, z: Tensor) -> Experts:
    """Maps inside the branch that read z (routers, gates, shared experts), and shared experts' output maps."""
    width = tape.result.shape[-1]
    known = {*base.stacked_inputs, *base.outputs}
    inside = [s for s in tape.steps if s.parameters[0] not in known and any(_within(s, m) for m in base.branch)]
    reading = [_owner(s) for s in inside if same(by_token(s.read, call.tokens), z, call.limit)]
    giving = [_owner(s) for s in inside if _owner(s) not in reading and s.result.shape[-1] == width]
    return replace(base, input_maps=tuple(dict.fromkeys(reading)), outputs=(*base.outputs, *dict.fromkeys(giving)))


def _owner(step: Step) -> str:
    return step.parameters[0].rpartition(".")[0]


def _within(step: Step, module: str) -> bool:
    return step.parameters[0].startswith(f"{module}.")


def _branch(call: LayerCall, tape: Tape, names: Sequence[str]) -> Passing:
    """The smallest module around the experts that is called on one row per token and nothing but numbers."""
    fitting = [p for p in tape.passings if p.plain and _is_branch(call, p)]
    fitting = [p for p in fitting if all(name.startswith(f"{p.module}.") for name in names) and _routes(tape, p, names)]
    if not fitting:
        raise UnsupportedModel("experts were found, but no module that gives their sum from one vector per token")
    return max(fitting, key=lambda p: p.module.count("."))


def _routes(tape: Tape, passing: Passing, names: Sequence[str]) -> bool:
    """Whether some other map runs inside: without a router a module of experts cannot choose."""
    return any(step.parameters[0] not in names and _within(step, passing.module) for step in tape.steps)


def _is_branch(call: LayerCall, passing: Passing) -> bool:
    """One vector per token in, one of the same width out."""
    given, result = by_token(passing.given, call.tokens), by_token(passing.result, call.tokens)
    return given is not None and result is not None and given.shape == result.shape


def _beside(call: LayerCall, tape: Tape, passing: Passing, z: Tensor) -> tuple[str, ...]:
    """Modules with maps of their own that read the same z after the experts did: their results are added."""
    found = []
    for p in tape.passings:
        reads = p.plain and _is_branch(call, p) and same(by_token(p.given, call.tokens), z, call.limit)
        apart = p.started > passing.started and not p.module.startswith(f"{passing.module}.")
        if reads and apart and sum(_within(step, p.module) for step in tape.steps) > 1:
            found.append(p.module)
    return tuple(name for name in found if not any(name.startswith(f"{other}.") for other in found))


def _transposed(layer: nn.Module, step: Step) -> bool:
    """Whether what a map reads meets the first axis of its matrix; equal axes are told apart by the proof."""
    stored = layer.get_parameter(step.parameters[0])
    read = step.read.shape[-1] if step.read.shape[-1] != 1 else step.read.shape[-2]
    return stored.shape[-1] != read


def _packed(layer: nn.Module, step: Step) -> str | None:
    """The attribute that says how many maps are packed into one matrix."""
    stored = layer.get_parameter(step.parameters[0])
    if stored.dim() == 3:
        return None
    count = stored.numel() // step.weight.numel()
    path = step.parameters[0].rpartition(".")[0]
    while path:
        for name, value in vars(layer.get_submodule(path)).items():
            if type(value) is int and value == count:
                return f"{path}.{name}"
        path = path.rpartition(".")[0]
    raise UnsupportedModel(f"{step.parameters[0]} packs {count} maps, but no attribute of the layer says so")
