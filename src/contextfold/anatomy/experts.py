"""Look into a mixture of experts: one token, one extra call, every linear map seen.

The hidden vector of a single expert never crosses a module's border. So the branch is called once more on one token
while every linear operation that reads a known parameter is watched: what it read is h, and how much of its result
reaches the branch, the share s, is measured by differentiating the branch by it. No activation and no routing rule is
known here; that the branch answers by one number per map is checked, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from contextfold.anatomy.block import ExpertBlock, LinearMap, first_output, first_tensor
from contextfold.anatomy.sharded import ShardedMap, gathered, held
from contextfold.errors import ProbeFailed
from contextfold.lowrank import LowRank
from contextfold.patch import MatrixEdit

__all__ = ["Call", "Observation", "lent", "observe", "split_columns"]

LINEAR = frozenset(
    {
        torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm,
        Tensor.mm,
    }
)  # fmt: skip
"""Functions that multiply an activation by a weight, weight second."""

UNIFORM = 1e-3
"""Relative deviation above which a response is not one number; rounding stays far below, other forms far above."""


@dataclass(frozen=True, eq=False)
class Observation:
    """One token's way through a mixture, all float64."""

    branch: Tensor
    """`(d,)`."""
    inputs: frozenset[int]
    """Which of the stacked input maps read something that is not zero."""
    hidden: Mapping[int, Tensor]
    """By index of the output map, what it reads times its share in the branch: `s h (f,)`, where that is not zero."""
    shares: Mapping[int, float]
    """By the same index, the share s."""

    def row(self, columns: Sequence[tuple[int, int]]) -> Tensor:
        """`(1, F)`: the scaled hidden vectors side by side; zeros for maps that this token does not use.

        With `[W_1 W_2 …]` the maps side by side, the branch is their product with this row, up to biases. So one
        solve of the output map's edit for this row is the least-norm edit of all experts together (section 7).
        """
        parts = [self.hidden.get(k, self.branch.new_zeros(width)) for k, width in columns]
        return torch.cat(parts)[None] if parts else self.branch.new_zeros(1, 1)

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """Index and width of every output map in use."""
        return tuple((k, self.hidden[k].numel()) for k in sorted(self.hidden))


@dataclass(frozen=True, eq=False)
class Call:
    """What a branch was called with besides z: some routers also read what the router below them computed."""

    extras: tuple[Any, ...] = ()

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return cls((*args, *kwargs.values())[1:])

    def at(self, row: int) -> tuple[Any, ...]:
        """The same for one token: `(1, n, ·)` becomes `(1, 1, ·)`."""
        return tuple(extra[:1, row : row + 1] if isinstance(extra, Tensor) else extra for extra in self.extras)


def split_columns(delta: LowRank, columns: Sequence[tuple[int, int]]) -> Iterator[tuple[int, LowRank]]:
    """The edit of maps side by side, as one edit per map."""
    start = 0
    for k, width in columns:
        yield k, LowRank(delta.B, delta.A[:, start : start + width])
        start += width


@contextmanager
def lent(edits: Sequence[tuple[LinearMap, LowRank]]) -> Iterator[None]:
    """Edit maps for the duration of a `with`; the stored tensors come back as they were."""
    with ExitStack() as stack:
        for linear, delta in edits:
            parameter = linear.stored
            stack.callback(setattr, parameter, "data", parameter.data)
            edited = parameter.data.clone()
            part = linear.shares.mine(delta) if isinstance(linear, ShardedMap) else delta
            MatrixEdit(part).write(linear.site.matrix(edited), linear.site.matrix(parameter.data))
            parameter.data = edited
        yield


@contextmanager
def eager_experts(model: Any) -> Iterator[None]:
    """Let experts run one by one, since fused implementations gather weights and hide the operations.

    What is chosen for the model comes back at the end. The results agree to rounding.
    """
    chosen = model.get_experts_implementation()
    if all(name in (None, "eager") for name in chosen.values()):
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(chosen)


def observe(model: nn.Module, block: ExpertBlock, z: Tensor, extras: tuple[Any, ...] = ()) -> Observation:
    """Call the branch once more on one token `z (d,)` of the model's dtype, and look.

    `extras`: what else it was called with, for this token.

    Raises `ProbeFailed` when no output map is seen to run, or the branch does not answer by one number per map.
    """
    watch = _Watch(block)
    caught: list[Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(eager_experts(model))
        stack.enter_context(torch.enable_grad())
        if block.norm_post is not None:
            # The norm may stand inside the branch; then the branch ends where the norm reads.
            handle = block.norm_post.module.register_forward_pre_hook(
                lambda _m, args, kwargs: caught.append(first_tensor(args, kwargs)), with_kwargs=True
            )
            stack.callback(handle.remove)
        stack.enter_context(watch)
        given = [first_output(module(z.reshape(1, 1, -1), *extras)).reshape(-1) for module in block.branch]
        branch = caught[0].reshape(-1) if caught else torch.stack(given).sum(0)
        return watch.observation(branch)


class _Watch(TorchFunctionMode):
    """Keeps what known weights are multiplied with, and adds a zero to each result to differentiate by."""

    def __init__(self, block: ExpertBlock) -> None:
        super().__init__()
        self.block = block
        self.name = block.name
        self.inputs = _by_storage(block.stacked_inputs)
        self.outputs = _by_storage(block.outputs)
        self.read: set[int] = set()
        self.found: list[tuple[int, Tensor, Tensor, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in LINEAR or len(args) < 2 or not isinstance(args[1], Tensor):
            return out
        x, weight = gathered(args[0].detach()), held(args[1])
        key = weight.untyped_storage().data_ptr()
        if key in self.inputs:
            for k, row in _pairs(self.inputs[key], weight, x):
                if _used(row):
                    self.read.add(k)
        if key in self.outputs and out.numel():
            leaf = torch.zeros_like(out, requires_grad=True)
            for place, (k, row) in enumerate(_pairs(self.outputs[key], weight, x)):
                self.found.append((k, self._whole(k, row).double(), leaf, place))
            return out + leaf
        return out

    def observation(self, branch: Tensor) -> Observation:
        if not self.found:
            raise ProbeFailed(
                f"{self.name}: no output map was seen to run (a kernel that bypasses the modules?); switch kernels off"
            )
        # Signs pass any chain of multiplications without rounding, so the answers can be compared in every dtype.
        coins = torch.randint(0, 2, branch.shape, generator=torch.Generator().manual_seed(0))
        probe = (2 * coins - 1).to(branch)
        leaves = [leaf for _, _, leaf, _ in self.found]
        grads = torch.autograd.grad((branch * probe).sum(), leaves, allow_unused=True)
        hidden: dict[int, Tensor] = {}
        shares: dict[int, float] = {}
        for (k, row, leaf, place), grad in zip(self.found, grads, strict=True):
            if grad is not None:
                share = self._share(gathered(grad).reshape(-1, leaf.shape[-1])[place].double(), probe.double())
                if share != 0 and _used(row):
                    hidden[k], shares[k] = share * row, share
        return Observation(branch.detach().double(), frozenset(self.read), hidden, shares)

    def _whole(self, k: int, row: Tensor) -> Tensor:
        """What an output map reads, of which a process may have a part."""
        linear = self.block.outputs[k]
        columns = linear.shares.columns if isinstance(linear, ShardedMap) else None
        return row if columns is None else columns.whole(row)

    def _share(self, grad: Tensor, probe: Tensor) -> float:
        share = float(grad @ probe / (probe @ probe))
        if not float((grad - share * probe).norm()) <= UNIFORM * float(grad.norm()):
            raise ProbeFailed(
                f"{self.name}: the branch does not answer to an output map by one number; such a mixture is "
                "not supported"
            )
        return share


def _used(row: Tensor) -> bool:
    """Whether an expert that was computed for all tokens was really given this one."""
    return bool((row.detach() != 0).any())


def _by_storage(maps: Sequence[LinearMap]) -> dict[int, dict[int, int]]:
    """Storage of the parameter -> (slice of it -> index of the map)."""
    found: dict[int, dict[int, int]] = {}
    for k, linear in enumerate(maps):
        found.setdefault(linear.stored.untyped_storage().data_ptr(), {})[linear.site.expert or 0] = k
    return found


def _pairs(slices: Mapping[int, int], weight: Tensor, x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Index of the map and the row that it reads, for a weight that is one slice, or the whole stack."""
    rows = x.reshape(-1, x.shape[-1])
    if weight.dim() == 3 and weight.shape[0] == len(slices):
        yield from ((slices[e], rows[e]) for e in range(len(slices)))
    elif rows.shape[0] == 1:
        size = weight.untyped_storage().nbytes() // weight.element_size() // len(slices)
        yield slices[weight.storage_offset() // size], rows[0]
    elif rows.shape[0] > 1:
        raise ProbeFailed("an expert read one token several times; such a mixture is not supported")
