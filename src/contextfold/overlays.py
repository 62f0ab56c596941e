"""Three ways of lending edits to a model, one interface; each gives the model back exactly as it was.

A `Written` overlay stores all edited weights and lets the unmodified forward run; `InTurn` does the same one module
call at a time, so that no more than one edited weight exists at once; an `Action` adds a low-rank term beside the
weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from contextfold.anatomy import first_tensor
from contextfold.anatomy.block import is_plain
from contextfold.anatomy.wrapped import is_offloaded
from contextfold.errors import NotControllable, UnsupportedModel
from contextfold.lowrank import LowRank
from contextfold.outcomes import Finding, Outcome
from contextfold.patch import BiasEdit, Edit, MatrixEdit, ScaleEdit, Site

__all__ = ["Action", "InTurn", "Overlay", "Written", "is_plain_map", "lending"]


class Overlay(ABC):
    """Edits lent to a model for the duration of a `with`; `put` may be called while a forward runs.

    An edit that is put in a pre-forward hook of the module that owns its site takes effect in that very call, as
    long as the hook was registered before the overlay was entered.
    """

    def __init__(self, model: nn.Module, sites: Iterable[Site]) -> None:
        self._model = model
        self._sites = tuple(sites)
        self._edits: dict[Site, Edit] = {}
        self._originals: dict[Site, tuple[nn.Parameter, Tensor]] = {}
        self._stack = ExitStack()

    @property
    def edits(self) -> Mapping[Site, Edit]:
        """What was put so far."""
        return self._edits

    def put(self, site: Site, edit: Edit) -> None:
        """Lend `edit` at `site`, in place of what was lent there before.

        Raises `NotControllable` when the edited value does not fit into the storage dtype.
        """
        self._edits[site] = edit
        self._lend(site, edit)

    def __enter__(self) -> Overlay:
        with ExitStack() as stack:
            for site in self._sites:
                owner = self._model.get_submodule(site.module)
                stored = owner._parameters.get(site.parameter)
                if stored is None or not is_plain(stored):
                    self._prepare_beside(stack, site, owner)
                    continue
                self._originals[site] = (stored, stored.data)
                stack.callback(_set_data, stored, stored.data)
                self._prepare(stack, site, owner)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _write(self, site: Site, edit: Edit) -> None:
        """Store the edited weight. Slices of one parameter are written one by one, into a copy made for the first."""
        parameter, original = self._originals[site]
        if not (isinstance(edit, MatrixEdit) and site.expert is not None):
            parameter.data = _merged(site, edit, original)
            return
        if parameter.data.data_ptr() == original.data_ptr():
            parameter.data = original.clone()
        part = site.matrix(parameter.data)
        edit.write(part, site.matrix(original))
        _check_finite(site, part)

    def _prepare_beside(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        """The same where the weight is stored in another form, or elsewhere.

        Raises `UnsupportedModel` unless it can stay as it is.
        """
        met = "offloaded" if is_offloaded(owner) else "quantised or wrapped"
        raise UnsupportedModel(
            f"{site.name} of a {type(owner).__name__} is {met}, so no edit can be written into it; let the patch act "
            "beside it (fold with written=False, then `applied`), or load the model plain"
        )

    @abstractmethod
    def _prepare(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        """Get ready to lend at `site`; push onto `stack` what has to be undone besides the stored weight."""

    @abstractmethod
    def _lend(self, site: Site, edit: Edit) -> None:
        """Make `edit` act from now on."""


class Written(Overlay):
    """Edited weights are stored, rounded to their dtype; on exit the original tensors take their place again.

    The originals are kept and put back, not recomputed, so restoring is exact by construction.
    """

    def _prepare(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        pass

    def _lend(self, site: Site, edit: Edit) -> None:
        self._write(site, edit)


class InTurn(Overlay):
    """Edited weights are stored, as `Written` does, when the module that owns them is called, and the original tensor
    takes its place again when the call is over.

    A parameter is read in a call of its owner and nowhere else, so a forward gives what it gives over `Written`, bit
    for bit, and no more than one edited weight exists at a time. Maps of experts share a stacked parameter, which may
    be read by another module than the one that owns it; so that stays for as long as the overlay lasts.
    """

    def __init__(self, model: nn.Module, sites: Iterable[Site]) -> None:
        super().__init__(model, sites)
        self._scales: dict[Site, Tensor] = {}

    def _prepare(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        if site.expert is not None:
            return
        parameter, original = self._originals[site]

        def write(module: nn.Module, args: tuple[Any, ...]) -> None:
            if site in self._scales:
                parameter.data = self._scales[site]
            elif site in self._edits:
                self._write(site, self._edits[site])

        def take_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            parameter.data = original

        stack.callback(owner.register_forward_pre_hook(write).remove)
        stack.callback(owner.register_forward_hook(take_back, always_call=True).remove)

    def _lend(self, site: Site, edit: Edit) -> None:
        """Slices are lent at once; for the rest the hooks read the edit when the module is called."""
        if isinstance(edit, MatrixEdit) and site.expert is not None:
            self._write(site, edit)
        elif isinstance(edit, ScaleEdit):
            # Vectors are small enough to be kept, and need not be made anew for every token.
            self._scales[site] = _merged(site, edit, self._originals[site][1])


class Action(InTurn):
    """Edits of linear maps act beside the module, whose weight stays, quantised or not; the rest is written in turn."""

    def _prepare(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        if site.expert is not None or not is_plain_map(owner):
            super()._prepare(stack, site, owner)
        else:
            self._prepare_beside(stack, site, owner)

    def _prepare_beside(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        if is_offloaded(owner) and not is_plain_map(owner):
            raise UnsupportedModel(
                f"{site.name} of a {type(owner).__name__} is offloaded, and an edit of it has to be written; give that "
                "module a device in device_map, or load the model without offloading"
            )
        stack.callback(owner.register_forward_hook(partial(self._act, site), with_kwargs=True).remove)

    def _act(
        self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        match self._edits.get(site):
            case MatrixEdit(delta):
                wide = delta.B.dtype
                return _beside(output.to(wide), first_tensor(args, kwargs).to(wide), delta).to(output.dtype)
            case BiasEdit(delta):
                return (output.to(delta.dtype) + delta).to(output.dtype)
            case _:
                return output


@contextmanager
def lending(kind: type[Overlay], model: nn.Module, edits: Mapping[Site, Edit]) -> Iterator[nn.Module]:
    """The model with `edits` lent to it, in the way of `kind`."""
    with kind(model, edits) as overlay:
        for site, edit in edits.items():
            overlay.put(site, edit)
        yield model


def _beside(output: Tensor, x: Tensor, delta: LowRank) -> Tensor:
    """`output + B A x` for rows `(…, in)`, in as few operations as may be: for one token they are what it costs."""
    inner = linear(x, delta.A)
    if delta.rank == 1:
        return torch.addcmul(output, inner, delta.B.T)
    return output + linear(inner, delta.B)


def is_plain_map(module: nn.Module) -> bool:
    """Whether the module gives `W x + b` and nothing else; GPT-2's transposed `Conv1D` has no common base class."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return type(module).__name__ == "Conv1D"


def _merged(site: Site, edit: Edit, stored: Tensor) -> Tensor:
    value = edit.merged(stored, site)
    if not (isinstance(edit, MatrixEdit) and cannot_overflow(edit.delta, stored.dtype)):
        _check_finite(site, value)
    return value


def cannot_overflow(delta: LowRank, dtype: torch.dtype) -> bool:
    """Whether no finite weight of `dtype` can be carried beyond its range, told from the factors alone.

    `|dW_ij| <= Σ_k max|B_k| max|A_k|`; below half a step of the largest number, even that number stays where it is.
    """
    info = torch.finfo(dtype)
    return float((delta.B.abs().amax(0) * delta.A.abs().amax(1)).sum()) < info.max * info.eps / 4


def _check_finite(site: Site, value: Tensor) -> None:
    # One pass when all is well: infinities and NaN survive a sum, and a weight's sum is far from overflow in float32.
    if not bool(torch.isfinite(value.sum(dtype=torch.promote_types(value.dtype, torch.float32)))):
        bad = int((~torch.isfinite(value)).sum())
        raise NotControllable([Finding(Outcome.OVERFLOW, site.name, f"entries beyond {value.dtype}", bad, 0)])


def _set_data(parameter: nn.Parameter, data: Tensor) -> None:
    parameter.data = data
