"""Run a model with a patch, and listen to its blocks. Everything happens in hooks of an ordinary forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import Block, Bound, DenseBlock, first_output, first_tensor, weights_digest
from contextfold.anatomy import rows as first_rows
from contextfold.anatomy.block import at_home, stored_shape
from contextfold.anatomy.sharded import whole_input
from contextfold.anatomy.wrapped import bare, device_of
from contextfold.errors import InputError, PatchMismatch
from contextfold.overlays import Action, InTurn, Overlay, Written, is_plain_map, lending
from contextfold.patch import BiasEdit, Edit, MatrixEdit, Patch, ScaleEdit, Site

__all__ = [
    "Action",
    "BlockState",
    "Decoder",
    "InTurn",
    "Overlay",
    "Run",
    "Written",
    "applied",
    "check_match",
    "is_plain_map",
    "keeps_logits",
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
    """Logits `(last, V)` of the last positions, from one ordinary forward without a cache; `last` may be 0.

    Positions are always passed to models that take any. So is a mask of ones: without it transformers takes a gap in
    the positions for the border of a packed sequence, and tokens behind the gap would not see those before it.
    """
    model = bare(model)
    ids = tokens.ids[None].to(device_of(model))
    arguments: dict[str, Any] = {}
    if keeps_logits(model):
        # Positions and not their number: given a number, Gemma 4 drops all other tokens from its late layers.
        arguments["logits_to_keep"] = torch.arange(ids.shape[1], device=ids.device)[ids.shape[1] - last :]
    if takes_positions(model):
        arguments["position_ids"] = tokens.positions[None].to(ids.device)
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **arguments)
    logits: Tensor = output.logits[0]
    return logits[logits.shape[0] - last :]


class Decoder:
    """The model with its own cache, token by token: the path that generation takes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = bare(model)
        self._cache: Any = None
        self._seen = 0

    @torch.no_grad()
    def extend(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Append `ids (n,)` and return the logits `(V,)` after the last; positions go on counting by default."""
        n = ids.numel()
        where = torch.arange(self._seen, self._seen + n) if positions is None else positions
        device = device_of(self._model)
        arguments: dict[str, Any] = {}
        if keeps_logits(self._model):
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


def takes_positions(model: nn.Module) -> bool:
    """Whether positions can be given. Recurrent models have none, and models with ALiBi count tokens themselves."""
    return "position_ids" in inspect.signature(model.forward).parameters


def keeps_logits(model: nn.Module) -> bool:
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
    """Call `listen` with the tensor that `module` is about to be called on, whole where processes share it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listen(at_home(module, whole_input(module, first_tensor(args, kwargs))))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


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
    module = model.model if isinstance(model, Bound) else bare(model)
    fingerprint = model.fingerprint if isinstance(model, Bound) else weights_digest(module)
    check_match(module, fingerprint, patch)
    with lending(kind, module, patch.edits):
        yield model.model if isinstance(model, Bound) else model


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
        stored = torch.Size(stored_shape(model.get_submodule(site.module), site.parameter))
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
