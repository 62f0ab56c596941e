"""Three ways of lending edits to a model, one interface; each gives the model back exactly as it was.

A `Written` overlay stores all edited weights and lets the unmodified forward run; `InTurn` does the same one module
call at a time, so that no more than one edited weight exists at once; an `Action` adds a low-rank term beside the
weight. Weights that accelerate keeps elsewhere are edited when they are brought for a call, one at a time in each way.
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
from contextfold.anatomy.proof import TOLERANCE
from contextfold.anatomy.sharded import agree, held, is_sharded, part_of_output, shares_of, weight_shares
from contextfold.anatomy.wrapped import bringing, in_memory, is_offloaded
from contextfold.errors import NotControllable, UnsupportedModel
from contextfold.lowrank import LowRank
from contextfold.outcomes import Finding, Outcome
from contextfold.patch import BiasEdit, Edit, MatrixEdit, ScaleEdit, Site

__all__ = ["Action", "InTurn", "Overlay", "Written", "is_plain_map", "lending"]


class _Place(ABC):
    """Where one parameter lies, and how it takes an edit and gives it up again."""

    @abstractmethod
    def write(self, site: Site, edit: Edit) -> None:
        """Let `edit` be in the parameter from now on, in place of the one that was. Raises `NotControllable`."""

    @abstractmethod
    def restore(self) -> None:
        """Let the parameter be what it was in the beginning."""


class _InMemory(_Place):
    """A parameter of the model. The original tensor is kept and put back, not recomputed."""

    def __init__(self, stack: ExitStack, parameter: Tensor) -> None:
        self._parameter, self._original = parameter, parameter.data
        self._scale: tuple[ScaleEdit, Tensor] | None = None
        stack.callback(self.restore)

    def write(self, site: Site, edit: Edit) -> None:
        """Slices of one parameter are written one by one, into a copy made for the first."""
        parameter, original = self._parameter, self._original
        if isinstance(edit, ScaleEdit):
            # Vectors are small enough to be kept, and need not be made anew for every token.
            if self._scale is None or self._scale[0] is not edit:
                self._scale = edit, _merged(site, edit, original)
            parameter.data = self._scale[1]
            return
        if not (isinstance(edit, MatrixEdit) and site.expert is not None):
            parameter.data = _merged(site, edit, original)
            return
        if parameter.data.data_ptr() == original.data_ptr():
            parameter.data = original.clone()
        part = site.matrix(parameter.data)
        edit.write(part, site.matrix(original))
        _check_finite(site, part)

    def restore(self) -> None:
        self._parameter.data = self._original


class _Brought(_Place):
    """A parameter that comes for the time of a call: it comes edited, merged anew each time, by the same operations."""

    def __init__(self, stack: ExitStack, owner: nn.Module, name: str) -> None:
        self._owner, self._name = owner, name
        self._checked: Edit | None = None
        self._brought = stack.enter_context(bringing(owner, name))

    def write(self, site: Site, edit: Edit) -> None:
        self.restore()
        if edit is not self._checked and not _is_safe(edit, self._owner.get_parameter(self._name).dtype):
            with in_memory(self._owner):  # now, and not in the middle of a forward
                _merged(site, edit, self._owner.get_parameter(self._name).data)
        self._checked = edit
        self._brought.change = partial(_merged, site, edit)

    def restore(self) -> None:
        self._brought.change = None


class _Shared(_Place):
    """A parameter that several processes hold a part of each: of a whole edit, each takes what concerns its part."""

    def __init__(self, stack: ExitStack, owner: nn.Module, stored: Tensor) -> None:
        self._owner, self._shares = owner, shares_of(stored)
        self._inside = _InMemory(stack, held(stored))

    def write(self, site: Site, edit: Edit) -> None:
        """Raises `NotControllable` on all processes where it does not fit on one: they would wait for it for ever."""
        dtype, bad = held(self._owner.get_parameter(site.parameter)).dtype, 0.0
        try:
            self._inside.write(site, self._shares.edit(edit))
        except NotControllable as error:
            bad = error.findings[0].value
        if _is_safe(edit, dtype):  # the whole edit, so that all come to the same answer
            return
        bad = sum(map(float, agree(self._owner, str(bad))))
        if bad:
            raise NotControllable([Finding(Outcome.OVERFLOW, site.name, f"entries beyond {dtype}", bad, 0)])

    def restore(self) -> None:
        self._inside.restore()


def _place_of(stack: ExitStack, site: Site, owner: nn.Module) -> _Place | None:
    """None where no edit can be written: the parameter is stored in another form."""
    stored = owner._parameters.get(site.parameter)
    if stored is None:
        return None
    if is_plain(stored):
        return _InMemory(stack, stored)
    if is_sharded(stored) and is_plain(held(stored)):
        return _Shared(stack, owner, stored)
    fetched = is_offloaded(owner) and is_plain_map(owner) and stored.dtype in TOLERANCE
    return _Brought(stack, owner, site.parameter) if fetched else None


class Overlay(ABC):
    """Edits lent to a model for the duration of a `with`; `put` may be called while a forward runs.

    An edit that is put in a pre-forward hook of the module that owns its site takes effect in that very call, as
    long as the hook was registered before the overlay was entered.
    """

    def __init__(self, model: nn.Module, sites: Iterable[Site]) -> None:
        self._model = model
        self._sites = tuple(sites)
        self._edits: dict[Site, Edit] = {}
        self._places: dict[Site, _Place] = {}
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
                place = _place_of(stack, site, owner)
                if place is None:
                    self._prepare_beside(stack, site, owner)
                    continue
                self._places[site] = place
                self._prepare(stack, site, owner)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _prepare_beside(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        """The same where the weight is stored in another form, or elsewhere.

        Raises `UnsupportedModel` unless it can stay as it is.
        """
        _refuse_offloaded(site, owner)
        raise UnsupportedModel(
            f"{site.name} of a {type(owner).__name__} is quantised or wrapped, so no edit can be written into it; let "
            "the patch act beside it (fold with written=False, then `applied`), or load the model plain"
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
        self._places[site].write(site, edit)


class InTurn(Overlay):
    """Edited weights are stored, as `Written` does, when the module that owns them is called, and the original tensor
    takes its place again when the call is over.

    A parameter is read in a call of its owner and nowhere else, so a forward gives what it gives over `Written`, bit
    for bit, and no more than one edited weight exists at a time. Maps of experts share a stacked parameter, which may
    be read by another module than the one that owns it; so that stays for as long as the overlay lasts.
    """

    def _prepare(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        if site.expert is not None:
            return
        place = self._places[site]

        def write(module: nn.Module, args: tuple[Any, ...]) -> None:
            if site in self._edits:
                place.write(site, self._edits[site])

        def take_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            place.restore()

        stack.callback(owner.register_forward_pre_hook(write).remove)
        stack.callback(owner.register_forward_hook(take_back, always_call=True).remove)

    def _lend(self, site: Site, edit: Edit) -> None:
        """Slices are lent at once; for the rest the hooks read the edit when the module is called."""
        if isinstance(edit, MatrixEdit) and site.expert is not None:
            self._places[site].write(site, edit)
        elif isinstance(edit, ScaleEdit):
            self._places[site].write(site, edit)  # what does not fit is refused now, and not in a forward
            self._places[site].restore()


class Action(InTurn):
    """Edits of linear maps act beside the module, whose weight stays, quantised or not; the rest is written in turn."""

    def _prepare(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        if site.expert is not None or not is_plain_map(owner):
            super()._prepare(stack, site, owner)
        else:
            self._prepare_beside(stack, site, owner)

    def _prepare_beside(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        _refuse_offloaded(site, owner)
        stack.callback(owner.register_forward_hook(partial(self._act, site), with_kwargs=True).remove)

    def _act(
        self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        edit = self._edits.get(site)
        if edit is not None and edit.device != output.device:
            edit = self._edits[site] = edit.to(output.device)  # from a file, say: factors live with their layer
        match edit:
            case MatrixEdit(delta):
                wide = delta.B.dtype
                x = first_tensor(args, kwargs).to(wide)
                return _beside(module, output.to(wide), x, delta).to(output.dtype)
            case BiasEdit(delta):
                return (output.to(delta.dtype) + part_of_output(module, output, delta)).to(output.dtype)
            case _:
                return output


def _refuse_offloaded(site: Site, owner: nn.Module) -> None:
    """Norms and stacks of experts: their edits are written where they lie, or not at all."""
    if is_offloaded(owner) and not is_plain_map(owner):
        raise UnsupportedModel(
            f"{site.name} of a {type(owner).__name__} is offloaded, and an edit of it has to be written; give that "
            "module a device in device_map, or load the model without offloading"
        )


@contextmanager
def lending(kind: type[Overlay], model: nn.Module, edits: Mapping[Site, Edit]) -> Iterator[nn.Module]:
    """The model with `edits` lent to it, in the way of `kind`."""
    with kind(model, edits) as overlay:
        for site, edit in edits.items():
            overlay.put(site, edit)
        yield model


def _beside(module: nn.Module, output: Tensor, x: Tensor, delta: LowRank) -> Tensor:
    """`output + B A x` for rows `(…, in)`, in as few operations as may be: for one token they are what it costs."""
    shares = weight_shares(module)
    if shares is not None:
        return output + shares.action(delta, x, output)
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
    if not _is_safe(edit, stored.dtype):
        _check_finite(site, value)
    return value


def _is_safe(edit: Edit, dtype: torch.dtype) -> bool:
    return isinstance(edit, MatrixEdit) and cannot_overflow(edit.delta, dtype)


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
