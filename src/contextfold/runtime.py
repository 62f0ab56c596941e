"""Run a model with a patch, and listen to its blocks. Everything happens in hooks of an ordinary forward.

Two ways of applying, one interface: an `Action` adds a low-rank term beside the weight; a `Written` overlay stores
edited weights and lets the unmodified forward run. Both give the model back exactly as it was.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import Block, Bound, DenseBlock, first_output, first_tensor, weights_digest
from contextfold.anatomy import rows as first_rows
from contextfold.errors import InputError, NotControllable, PatchMismatch
from contextfold.outcomes import Finding, Outcome
from contextfold.patch import BiasEdit, Edit, MatrixEdit, Patch, ScaleEdit, Site

__all__ = [
    "Action",
    "BlockState",
    "Decoder",
    "Overlay",
    "Run",
    "Written",
    "applied",
    "materialised",
    "recording",
    "run",
    "takes_positions",
]


@dataclass(frozen=True, eq=False)
class Run:
    """The tokens of one forward and where they stand: `ids (n,)`, `positions (n,)`, both int64."""

    ids: Tensor
    positions: Tensor

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.ids.shape != self.positions.shape or self.ids.numel() == 0:
            raise InputError(f"token ids {tuple(self.ids.shape)} and positions {tuple(self.positions.shape)} differ")


@torch.no_grad()
def run(model: nn.Module, tokens: Run, last: int = 1) -> Tensor:
    """Logits `(last, V)` of the last positions, from one ordinary forward without a cache.

    Positions are always passed to models that take any. So is a mask of ones: without it transformers takes a gap in
    the positions for the border of a packed sequence, and tokens behind the gap would not see those before it.
    """
    ids = tokens.ids[None].to(_device(model))
    arguments: dict[str, Any] = {}
    if _keeps_logits(model):
        # Positions and not their number: given a number, Gemma 4 drops all other tokens from its late layers.
        arguments["logits_to_keep"] = torch.arange(ids.shape[1], device=ids.device)[-last:]
    if takes_positions(model):
        arguments["position_ids"] = tokens.positions[None].to(ids.device)
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **arguments)
    logits: Tensor = output.logits[0, -last:]
    return logits


class Decoder:
    """The model with its own cache, token by token: the path that generation takes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._cache: Any = None
        self._seen = 0

    @torch.no_grad()
    def extend(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Append `ids (n,)` and return the logits `(V,)` after the last; positions go on counting by default."""
        n = ids.numel()
        where = torch.arange(self._seen, self._seen + n) if positions is None else positions
        device = _device(self._model)
        arguments: dict[str, Any] = {}
        if _keeps_logits(self._model):
            arguments["logits_to_keep"] = torch.arange(n, device=device)[-1:]
        if takes_positions(self._model):
            arguments["position_ids"] = where[None].to(device)
        output = self._model(
            input_ids=ids[None].to(device),
            attention_mask=torch.ones((1, self._seen + n), dtype=torch.int64, device=device),
            cache=self._cache,
            use_cache=True,
            **arguments,
        )
        self._cache = output.cache
        self._seen += n
        logits: Tensor = output.logits[0, -1]
        return logits


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def takes_positions(model: nn.Module) -> bool:
    """Whether positions can be given. Recurrent models have none, and models with ALiBi count tokens themselves."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _keeps_logits(model: nn.Module) -> bool:
    """Whether the model can compute the logits of the last positions only (a vocabulary is wide)."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@dataclass(eq=False)
class BlockState:
    """What one block did at the recorded rows, by letter: `x, v, z, h, y, t (n, ·)` in the model's dtype."""

    letters: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, letter: str) -> Tensor:
        return self.letters[letter]


@contextmanager
def recording(blocks: Sequence[Block], rows: slice | Sequence[int], letters: str) -> Iterator[list[BlockState]]:
    """Listen to `blocks` during the forwards inside the `with`; a later forward overwrites an earlier one.

    `rows` picks positions of the first batch row. `letters` is any of `xvzhyt`, t being the finished sum, which is y
    itself unless a norm over the sum follows. Blocks without a token-wise branch have no z, mixtures no single h, and
    parallel blocks no v in one place.
    """
    states = [BlockState() for _ in blocks]
    with ExitStack() as stack:
        for block, state in zip(blocks, states, strict=True):
            for handle in _listeners(block, state, rows, letters):
                stack.callback(handle.remove)
        yield states


def _listeners(
    block: Block, state: BlockState, rows: slice | Sequence[int], letters: str
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    def keep(letter: str, value: Tensor) -> None:
        state.letters[letter] = first_rows(value)[rows].detach().clone()

    if "z" in letters and block.reads_z is not None:
        yield before(block.reads_z, partial(keep, "z"))
    if "x" in letters:
        yield before(block.layer, partial(keep, "x"))
    if "y" in letters:
        yield block.layer.register_forward_hook(lambda _m, _a, output: keep("y", first_output(output)))
    if "h" in letters and isinstance(block, DenseBlock):
        yield before(block.output_map.module, partial(keep, "h"))
    if "v" in letters and len(block.residual) == 1:
        yield block.residual[0].listen(partial(keep, "v"))
    if "t" in letters:
        yield block.total.listen(partial(keep, "t"))


def before(module: nn.Module, listen: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """Call `listen` with the tensor that `module` is about to be called on."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listen(first_tensor(args, kwargs))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


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
                self._prepare(stack, site, self._model.get_submodule(site.module))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _lend_slice(self, site: Site, edit: MatrixEdit) -> None:
        """Slices of one parameter are lent one by one, into a copy made for the first of them."""
        parameter, original = self._originals[site]
        if parameter.data.data_ptr() == original.data_ptr():
            parameter.data = original.clone()
        part = site.matrix(parameter.data)
        edit.write(part, site.matrix(original))
        _check_finite(site, part)

    @abstractmethod
    def _prepare(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        """Get ready to lend at `site`; push onto `stack` what gives the model back."""

    @abstractmethod
    def _lend(self, site: Site, edit: Edit) -> None:
        """Make `edit` act from now on."""


class Written(Overlay):
    """Edited weights are stored, rounded to their dtype; on exit the original tensors take their place again.

    The originals are kept and put back, not recomputed, so restoring is exact by construction.
    """

    def _prepare(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        parameter = owner.get_parameter(site.parameter)
        self._originals[site] = (parameter, parameter.data)
        stack.callback(_set_data, parameter, parameter.data)

    def _lend(self, site: Site, edit: Edit) -> None:
        parameter, original = self._originals[site]
        if isinstance(edit, MatrixEdit) and site.expert is not None:
            self._lend_slice(site, edit)
        else:
            parameter.data = _merged(site, edit, original)


class Action(Overlay):
    """Edits of plain linear maps act beside the module; norms and routers are lent another parameter for each call.

    Maps of experts share a stacked parameter, which may be read by another module than the one that owns it; so that
    is lent for as long as the overlay lasts.
    """

    def _prepare(self, stack: ExitStack, site: Site, owner: nn.Module) -> None:
        parameter = owner.get_parameter(site.parameter)
        original = parameter.data
        self._originals[site] = (parameter, original)
        stack.callback(_set_data, parameter, original)
        if site.expert is not None:
            return

        def act(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            match self._edits.get(site):
                case MatrixEdit(delta):
                    x = first_tensor(args, kwargs)
                    return (output.to(delta.B.dtype) + delta(x.to(delta.B.dtype))).to(output.dtype)
                case BiasEdit(delta):
                    return (output.to(delta.dtype) + delta).to(output.dtype)
                case _:
                    return output

        def lend(module: nn.Module, args: tuple[Any, ...]) -> None:
            edit = self._edits.get(site)
            if edit is not None:
                parameter.data = _merged(site, edit, original)

        def take_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            parameter.data = original

        if _is_plain_map(owner):
            stack.callback(owner.register_forward_hook(act, with_kwargs=True).remove)
        else:
            stack.callback(owner.register_forward_pre_hook(lend).remove)
            stack.callback(owner.register_forward_hook(take_back, always_call=True).remove)

    def _lend(self, site: Site, edit: Edit) -> None:
        """Slices are lent at once; for the rest the hooks read the edit when the module is called."""
        if isinstance(edit, MatrixEdit) and site.expert is not None:
            self._lend_slice(site, edit)


def _is_plain_map(module: nn.Module) -> bool:
    """Whether the module gives `W x + b` and nothing else; GPT-2's transposed `Conv1D` has no common base class."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return type(module).__name__ == "Conv1D"


def _merged(site: Site, edit: Edit, stored: Tensor) -> Tensor:
    value = edit.merged(stored, site)
    _check_finite(site, value)
    return value


def _check_finite(site: Site, value: Tensor) -> None:
    # One pass when all is well: infinities and NaN survive a sum, and a weight's sum is far from overflow in float32.
    if not bool(torch.isfinite(value.sum(dtype=torch.promote_types(value.dtype, torch.float32)))):
        bad = int((~torch.isfinite(value)).sum())
        raise NotControllable([Finding(Outcome.OVERFLOW, site.name, f"entries beyond {value.dtype}", bad, 0)])


def _set_data(parameter: nn.Parameter, data: Tensor) -> None:
    parameter.data = data


@contextmanager
def applied(model: Bound | nn.Module, patch: Patch) -> Iterator[nn.Module]:
    """The model with `patch` acting beside its weights, which stay bit-identical.

    Raises `PatchMismatch` when the patch was made for another model or other weights.
    """
    with _with_patch(Action, model, patch) as patched:
        yield patched


@contextmanager
def materialised(model: Bound | nn.Module, patch: Patch) -> Iterator[nn.Module]:
    """The model with `patch` written into its stored weights; on exit the originals are back, bit for bit.

    Raises `PatchMismatch` when the patch was made for another model or other weights, and `NotControllable` when
    an edited value does not fit into the storage dtype.
    """
    with _with_patch(Written, model, patch) as patched:
        yield patched


@contextmanager
def _with_patch(kind: type[Overlay], model: Bound | nn.Module, patch: Patch) -> Iterator[nn.Module]:
    module = model.model if isinstance(model, Bound) else model
    fingerprint = model.fingerprint if isinstance(model, Bound) else weights_digest(model)
    check_match(module, fingerprint, patch)
    overlay = kind(module, patch.edits)
    with overlay:
        for site, edit in patch.edits.items():
            overlay.put(site, edit)
        yield module


def check_match(model: nn.Module, fingerprint: str, patch: Patch) -> None:
    """Refuse a patch for another model (by type) or for other weights (by digest)."""
    config: Any = model.config
    met = str(config.model_type)
    if met != patch.header.model_type:
        raise PatchMismatch(f"the patch was made for a {patch.header.model_type!r} model, this one is {met!r}")
    if fingerprint != patch.header.fingerprint:
        raise PatchMismatch(
            f"the patch was made for weights {patch.header.fingerprint[:12]}…, this model has {fingerprint[:12]}…; "
            "a patch is exact on the weights that it was solved on and on no others: fold again on this model"
        )
    for site, edit in patch.edits.items():
        _check_shape(model, site, edit)


def _check_shape(model: nn.Module, site: Site, edit: Edit) -> None:
    try:
        stored = model.get_submodule(site.module).get_parameter(site.parameter).shape
    except AttributeError as error:
        raise PatchMismatch(f"the patch edits {site.name}, which this model does not have") from error
    wanted: tuple[int, ...]
    match edit:
        case MatrixEdit(delta):
            if site.expert is not None:
                _check_slice(site, stored, delta.shape)
                return
            wanted = delta.shape[::-1] if site.transposed else delta.shape
        case BiasEdit(delta):
            wanted = tuple(delta.shape)
        case ScaleEdit(_, value, _):
            wanted = tuple(value.shape)
    if tuple(stored) != tuple(wanted):
        raise PatchMismatch(f"the patch edits {site.name} of shape {tuple(wanted)}, here it is {tuple(stored)}")


def _check_slice(site: Site, stored: torch.Size, wanted: tuple[int, int]) -> None:
    rows, inner = wanted[::-1] if site.transposed else wanted
    fits = site.expert is not None and 0 <= site.expert < site.experts
    if not fits or stored[-1] != inner or stored.numel() != site.experts * rows * inner:
        raise PatchMismatch(f"the patch edits {site.name} of shape {wanted}, here the stack is {tuple(stored)}")
