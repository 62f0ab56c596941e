"""From a model to a proven family: find its layers, propose a record for each kind, prove them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy.bind import check_in_memory, check_state
from contextfold.anatomy.discover.depth import has_numbers, joined
from contextfold.anatomy.discover.propose import propose
from contextfold.anatomy.discover.tape import LayerCall
from contextfold.anatomy.discover.wiring import wired
from contextfold.anatomy.layer import names_in, required
from contextfold.anatomy.probe import bind, plain_arguments
from contextfold.anatomy.record import Family, Sites
from contextfold.anatomy.wrapped import bare
from contextfold.errors import UnsupportedModel

__all__ = ["discover"]

TOKENS = 6


def discover(model: nn.Module) -> Family:
    """A record for `model`, found without knowing its type, and proven.

    One forward is listened to; each kind of layer is then called again, operator by operator, with disturbed inputs.
    What is proposed has to pass the same proof as a record written by hand.

    Raises `InputError` when `model` is no module, `UnsupportedModel` when it cannot be listened to or no record fits,
    `ProbeFailed` when one was proposed and does not hold.
    """
    model = bare(model)
    check_state(model)
    check_in_memory(model)
    config: Any = model.config
    listened = _listen(model)
    path, layers = _stack(model, listened)
    family = Family(
        name=f"discovered {config.model_type}",
        model_types=(config.model_type,),
        layers=path,
        sites=_kinds(path, layers, listened),
        quirks="Found by discovery.",
        idle=_idle(layers, listened),
    )
    bind(model, family)
    return family


def _kinds(path: str, layers: Sequence[nn.Module], listened: Calls) -> tuple[Sites, ...]:
    """The records of all kinds of layer. A layer takes the first whose names it has, so the rarest stand first.

    Layers with parameters of the same names and shapes are of one kind, and only the first of them is searched.
    """
    found: dict[int, Sites] = {}
    kinds: dict[frozenset[str], Sites] = {}
    limit = 0.0
    for index, layer in enumerate(layers):
        if id(layer) not in listened:
            continue
        args, kwargs = listened[id(layer)][0]
        call = LayerCall(layer, args, kwargs, _tokens(args, kwargs))
        kind = frozenset(f"{name} {tuple(p.shape)}" for name, p in layer.named_parameters())
        try:
            known = kinds.get(kind)
            if known is None:
                found[index] = kinds[kind] = propose(call)
            else:
                found[index] = wired(call, call.play(), known) if has_numbers(known) else known
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}.{index}: {error}") from error
        limit = max(limit, call.limit)
    names = [names_in(layers[index]) for index in found]
    return tuple(sorted(joined(found, limit), key=lambda sites: sum(required(sites) <= has for has in names)))


def _idle(layers: list[nn.Module], calls: Calls) -> str | None:
    """A submodule that only layers have which text does not run."""
    running = {name for layer in layers if id(layer) in calls for name, _ in layer.named_children()}
    idle = [{name for name, _ in layer.named_children()} - running for layer in layers if id(layer) not in calls]
    return min(set.intersection(*idle), default=None) if idle else None


Calls = dict[int, list[tuple[tuple[Any, ...], Mapping[str, Any]]]]


def _ids(model: nn.Module, seed: int) -> Tensor:
    config: Any = model.config
    size = config.get_text_config(decoder=True).vocab_size
    return torch.randint(0, size, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def _run(model: nn.Module, ids: Tensor) -> Any:
    with torch.no_grad():
        return model(**plain_arguments(model, ids.to(next(model.parameters()).device)))


def _listen(model: nn.Module) -> Calls:
    """The arguments of every call of every member of a list of modules."""
    calls: Calls = {}
    handles = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(id(module), []).append((args, kwargs))

    for parent in model.modules():
        if isinstance(parent, nn.ModuleList):
            handles += [child.register_forward_pre_hook(keep, with_kwargs=True) for child in parent]
    try:
        _run(model, _ids(model, 0))
    finally:
        for handle in handles:
            handle.remove()
    return calls


@dataclass(frozen=True)
class _Stack:
    path: str
    layers: list[nn.Module]
    size: int


def _stack(model: nn.Module, calls: Calls) -> tuple[str, list[nn.Module]]:
    """The list of modules that run, with most parameters; its members must run on one vector per token."""
    stacks = []
    for path, parent in model.named_modules():
        if isinstance(parent, nn.ModuleList) and any(id(child) in calls for child in parent):
            size = sum(p.numel() for p in parent.parameters())
            stacks.append(_Stack(path, list(parent), size))
    if not stacks:
        raise UnsupportedModel(f"{type(model).__name__} has no list of layers that run")
    chosen = max(stacks, key=lambda stack: stack.size)
    if not any(_is_layer(calls.get(id(layer), [])) for layer in chosen.layers):
        raise UnsupportedModel(
            f"layers of {chosen.path} do not run on one vector per token (several streams, or another layout)"
        )
    often = max(len(calls.get(id(layer), [])) for layer in chosen.layers)
    if often > 1:
        raise UnsupportedModel(
            f"layers of {chosen.path} run {often} times in one forward; one edit cannot serve several depths"
        )
    return chosen.path, chosen.layers


def _is_layer(calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> bool:
    return bool(calls) and _tokens(*calls[0]) >= TOKENS


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Rows of the stream `(1, T, d)` that a layer is called on; more than the text has where a prompt is built in."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.shape[1] if value.dim() == 3 and value.shape[0] == 1 else 0
    return 0
