"""Comparing a loaded folder with our own run of the patch, in units of what rounding does to that run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound
from contextfold.lowrank import LowRank
from contextfold.patch import MatrixEdit, Patch, Site
from contextfold.runtime import Run, applied, run

__all__ = ["gap", "logits", "probe_of", "rounding_gap"]

PROBE = 16
"""Tokens of the run on which a folder is compared."""

DRAWS = 4
"""How often the roundings are drawn; the largest effect counts."""


def probe_of(bound: Bound) -> Run:
    """Pseudo-random tokens, the same each time: what is loaded must equal ours on any text."""
    ids = torch.randint(0, bound.vocabulary, (PROBE,), generator=torch.Generator().manual_seed(0))
    return Run(ids, torch.arange(PROBE))


def logits(model: nn.Module, probe: Run) -> Tensor:
    """`(n, V)`, float64: of every position."""
    return run(model, probe, last=probe.ids.numel()).double()


def gap(first: Tensor, second: Tensor) -> float:
    """Largest absolute difference, in logits."""
    return float((first - second).abs().max())


def rounding_gap(bound: Bound, patch: Patch, probe: Run, rounded: Collection[Site] = ()) -> float:
    """How far single roundings move the logits of the applied patch, the bound for any other way of applying it.

    Two right ways of applying one patch differ in where they round. So what every edited module and the embedding
    give is moved by one rounding of the model's dtype, at random, and so are weights and factors at the sites
    `rounded`, where a loader rounds factors and sum anew. The largest effect of `DRAWS` draws is what one way may be
    away from the exact logits; two ways may be twice that away from each other.
    """
    parameters = {f"{site.module}.{site.parameter}" for site in rounded}
    with applied(bound, patch) as model:
        exact = logits(model, probe)
    found = []
    for seed in range(DRAWS):
        noise = _Noise(bound.dtype, seed)
        edits = {s: noise.edit(e) if s in rounded else e for s, e in patch.edits.items()}
        changed = replace(patch, edits=edits)
        with applied(bound, changed) as model, noise.on(_modules(bound, patch)), noise.within(model, parameters):
            found.append(gap(logits(model, probe), exact))
    return 2 * max(found)


def _modules(bound: Bound, patch: Patch) -> list[nn.Module]:
    embedding: Any = bound.model
    names = dict.fromkeys(site.module for site in patch.edits)
    return [embedding.get_input_embeddings(), *(bound.model.get_submodule(name) for name in names)]


class _Noise:
    """Relative noise of one rounding."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._eps = torch.finfo(dtype).eps
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=self._generator, dtype=torch.float64).to(value.device)
        return (value.double() * (1 + self._eps * drawn)).to(value.dtype)

    def edit(self, edit: Any) -> Any:
        if not isinstance(edit, MatrixEdit):
            return edit
        return MatrixEdit(LowRank(self(edit.delta.B), self(edit.delta.A)))

    @contextmanager
    def on(self, modules: Collection[nn.Module]) -> Iterator[None]:
        def shake(_module: nn.Module, _args: Any, output: Any) -> Any:
            return self(output) if isinstance(output, Tensor) and output.is_floating_point() else output

        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_hook(shake).remove)
            yield

    @contextmanager
    def within(self, model: nn.Module, names: Collection[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for name in sorted(names):
                parameter = model.get_parameter(name)
                stack.callback(setattr, parameter, "data", parameter.data)
                parameter.data = self(parameter.data)
            yield
