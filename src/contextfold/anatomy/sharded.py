"""Maps that several processes hold a part of each: tensor parallelism as transformers does it, by its own plan.

A parameter is then a `DTensor`: every process holds some of its rows or of its columns. Vectors that a map reads or
gives may be shared out in the same way while a forward runs. Here they are made whole, for the rules to see, and the
factors of a whole edit are cut to what a process holds. W itself is never gathered.

Whatever a process decides from what it read has to be decided by all of them, or they would wait for each other for
ever. So whatever is made whole has the same bits everywhere: parts are gathered, and added in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import linear

from contextfold.anatomy.block import LinearMap
from contextfold.errors import UnsupportedModel
from contextfold.lowrank import LowRank, times
from contextfold.patch import BiasEdit, Edit, MatrixEdit

__all__ = [
    "ShardedMap",
    "Share",
    "Shares",
    "agree",
    "blocks_of",
    "check_sharded",
    "gathered",
    "held",
    "is_sharded",
    "part_of_output",
    "refuse_sharded",
    "shares_of",
    "weight_shares",
    "whole_input",
    "whole_output",
]


def is_sharded(stored: Any) -> bool:
    """Whether a parameter is a `DTensor`, told by its name so that nothing is imported where there is none."""
    return type(stored).__name__ == "DTensor" and type(stored).__module__.startswith("torch.distributed")


def held(stored: Any) -> Tensor:
    """The part of a parameter that this process holds: the tensor itself, since new `data` given to it is what the
    module reads from then on. A `DTensor` takes none and says nothing, and `to_local` of a parameter gives a view."""
    part: Tensor = stored._local_tensor if is_sharded(stored) else stored
    return part


def gathered(value: Any) -> Tensor:
    """A `DTensor` as the whole that it stands for; anything else as it is. Meant for vectors, never for weights."""
    whole: Tensor = value.full_tensor() if is_sharded(value) else value
    return whole


@dataclass(frozen=True, eq=False)
class Share:
    """How one side of a map is shared out: which of its `size` entries each process holds."""

    size: int
    parts: tuple[tuple[slice, ...], ...]
    """By process, runs of entries, in the order in which it holds them."""
    group: Any
    rank: int

    @classmethod
    def of(cls, size: int, groups: int, mesh: Any) -> Share:
        """`size` entries in so many groups that lie behind each other, every one of them cut like `torch.chunk`."""
        count, width = mesh.size(), -(-size // groups)
        parts: list[tuple[slice, ...]] = []
        for rank in range(count):
            runs = []
            for start in range(0, size, width):
                stop = min(start + width, size)
                step = -(-(stop - start) // count)
                first, last = min(start + rank * step, stop), min(start + (rank + 1) * step, stop)
                runs.append(slice(first, last))
            parts.append(tuple(run for run in runs if run.stop > run.start))
        return cls(size, tuple(parts), mesh.get_group(), mesh.get_local_rank())

    def count(self, rank: int) -> int:
        """How many entries one process holds."""
        return sum(run.stop - run.start for run in self.parts[rank])

    @property
    def widest(self) -> int:
        """The most entries that a process holds."""
        return max(self.count(rank) for rank in range(len(self.parts)))

    def mine(self, whole: Tensor, dim: int = -1) -> Tensor:
        """This process's entries of `whole` along `dim`; a view where they are in one piece."""
        runs = [whole.narrow(dim, run.start, run.stop - run.start) for run in self.parts[self.rank]]
        return runs[0] if len(runs) == 1 else torch.cat(runs or [whole.narrow(dim, 0, 0)], dim)

    def is_part(self, value: Tensor) -> bool:
        """Whether the last side of `value` is this process's part. The same on all: none holds as many as there are."""
        return value.shape[-1] != self.size

    def whole(self, part: Tensor) -> Tensor:
        """`(…, size)` from every process's `(…, count)`, with the same bits on all; what is whole comes back as it is.

        Every process has to call it.
        """
        if not self.is_part(part):
            return part
        padded = part.new_zeros(*part.shape[:-1], self.widest)
        padded[..., : part.shape[-1]] = part
        whole = part.new_empty(*part.shape[:-1], self.size)
        for runs, found in zip(self.parts, self._gathered(padded), strict=True):
            start = 0
            for run in runs:
                width = run.stop - run.start
                whole[..., run] = found[..., start : start + width]
                start += width
        return whole

    def total(self, part: Tensor) -> Tensor:
        """The sum of every process's `part`, with the same bits on all. Every process has to call it."""
        return reduce(torch.add, self._gathered(part.contiguous()))

    def _gathered(self, value: Tensor) -> list[Tensor]:
        found = [torch.empty_like(value) for _ in self.parts]
        dist.all_gather(found, value, group=self.group)
        return found


@dataclass(frozen=True, eq=False)
class Shares:
    """How a map `(out, in)` is shared out: by its rows, by its columns, or not at all (every process holds it)."""

    rows: Share | None
    columns: Share | None

    @property
    def any(self) -> Share | None:
        return self.rows or self.columns

    def mine(self, delta: LowRank) -> LowRank:
        """What a whole edit changes in this process's part."""
        B = delta.B if self.rows is None else self.rows.mine(delta.B, 0)
        return LowRank(B, delta.A if self.columns is None else self.columns.mine(delta.A))

    def edit(self, whole: Edit) -> Edit:
        """What a whole edit of the parameter changes in this process's part."""
        match whole:
            case MatrixEdit(delta):
                return MatrixEdit(self.mine(delta))
            case BiasEdit(delta) if self.rows is not None:
                return BiasEdit(self.rows.mine(delta))
        return whole

    def action(self, delta: LowRank, x: Tensor, output: Tensor) -> Tensor:
        """`B A x`, where `x (…, in)` and `output (…, out)`, beside which it acts, may be parts or whole."""
        if self.columns is None or not self.columns.is_part(x):
            inner = linear(x, delta.A)
        else:
            inner = self.columns.total(linear(x, self.columns.mine(delta.A)))
        return linear(inner, _like(self.rows, delta.B, output))


def shares_of(stored: Any) -> Shares:
    """How a parameter is shared out: a map, a stack of maps, or a bias `(out,)`.

    Raises `UnsupportedModel` where it is laid out over more than one kind of parallelism, or in a way not known here.
    """
    if not is_sharded(stored):
        return Shares(None, None)
    mesh = stored.device_mesh
    placement: Any = stored.placements[0] if len(stored.placements) == 1 else None
    known = {"Replicate": 0, "Shard": 1, "_StridedShard": getattr(placement, "split_factor", 0)}
    groups = known.get(type(placement).__name__)
    if groups is None:
        raise UnsupportedModel(
            f"a parameter of shape {tuple(stored.shape)} is laid out over processes as {stored.placements}; supported "
            "is tensor parallelism over one group of processes, by rows or columns"
        )
    if groups == 0:
        return Shares(None, None)
    dim, rank = placement.dim % stored.dim(), stored.dim()
    share = Share.of(stored.shape[dim], groups, mesh)
    if share.widest == share.size or (rank > 1 and dim < rank - 2):
        raise UnsupportedModel(
            f"a parameter of shape {tuple(stored.shape)} is shared out along its dimension {dim}, so that one process "
            "holds a whole map (expert parallelism, or fewer rows than processes); load it by its tensor-parallel plan "
            "over fewer processes"
        )
    return Shares(None, share) if rank > 1 and dim == rank - 1 else Shares(share, None)


@dataclass(frozen=True, eq=False)
class ShardedMap(LinearMap):
    """A map, or one of a stack of maps, that several processes hold a part of each: computed with, never gathered."""

    shares: Shares

    @property
    def stored(self) -> Tensor:  # type: ignore[override]
        return held(self.module.get_parameter(self.site.parameter))

    @property
    def weight(self) -> Tensor:
        raise UnsupportedModel(
            f"{self.site.name} is shared out over processes, and this needs it whole; load the model in one process"
        )

    @property
    def part(self) -> Tensor:
        """The part of W that this process holds, `(out, in)`."""
        return self.site.matrix(self.stored.data)

    @property
    def like(self) -> Tensor:
        return self.part

    @property
    def shape(self) -> tuple[int, int]:
        out, width = self.part.shape
        rows, columns = self.shares.rows, self.shares.columns
        return (out if rows is None else rows.size, width if columns is None else columns.size)

    @property
    def bias(self) -> Tensor | None:
        """Whole."""
        stored: Any = self.module._parameters.get("bias")
        if stored is None:
            return None
        part, rows = held(stored.detach()), shares_of(stored).rows
        return part if rows is None else rows.whole(part)

    def exact(self, inputs: Tensor) -> Tensor:
        out = self._product(inputs, lambda x: times(self.part, x))
        return out if self.bias is None else out + self.bias.double()

    def after(self, delta: LowRank) -> LowRank:
        part = self.part.to(delta.B.dtype)
        return LowRank(self._product(delta.B.T, lambda x: linear(x, part)).T, delta.A)

    def norm(self, dtype: torch.dtype) -> float:
        square = torch.linalg.vector_norm(self.part, dtype=dtype).square()
        share = self.shares.any
        return float((square if share is None else share.total(square)).sqrt())

    def _product(self, whole: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """`W x` for whole rows `(n, in) -> (n, out)`."""
        rows, columns = self.shares.rows, self.shares.columns
        out = multiply(whole if columns is None else columns.mine(whole))
        if columns is not None:
            out = columns.total(out)
        return out if rows is None else rows.whole(out)


def weight_shares(module: nn.Module) -> Shares | None:
    """Of a linear map that is shared out; None for every other module."""
    stored: Any = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
    return shares_of(stored) if is_sharded(stored) else None


def part_of_output(module: nn.Module, output: Tensor, whole: Tensor) -> Tensor:
    """Of a vector `(out,)`, what concerns the part of its output that `module` gives to this process."""
    shares = weight_shares(module)
    return whole if shares is None else _like(shares.rows, whole, output)


def _like(share: Share | None, whole: Tensor, output: Tensor) -> Tensor:
    return whole if share is None or not share.is_part(output) else share.mine(whole, 0)


def whole_input(module: nn.Module, value: Tensor) -> Tensor:
    """What `module` is called on, whole, from what this process calls it on."""
    shares = weight_shares(module)
    return value if shares is None or shares.columns is None else shares.columns.whole(value)


def whole_output(module: nn.Module, value: Tensor) -> Tensor:
    """What `module` gives, whole, from what it gives to this process."""
    shares = weight_shares(module)
    return value if shares is None or shares.rows is None else shares.rows.whole(value)


def agree(model: nn.Module, said: str) -> list[str]:
    """What every process that holds a part of `model` said, in their order. Every one of them has to call it."""
    share = next((s for s in (shares_of(p).any for p in model.parameters() if is_sharded(p)) if s is not None), None)
    if share is None:
        return [said]
    found: list[str] = [""] * len(share.parts)
    dist.all_gather_object(found, said, group=share.group)
    return found


def refuse_sharded(model: nn.Module, what: str) -> None:
    """Raises `UnsupportedModel` where processes share the model, for what needs it in one piece."""
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise UnsupportedModel(f"{what} needs the model in one process, and this one is shared out over several")


BLOCK = 1 << 22
"""Entries of a shared parameter that are brought together at once, to be hashed in the order of the whole."""


def blocks_of(stored: Any) -> Iterator[Tensor]:
    """A parameter in the order of its entries, in blocks of rows; no more than a block of it is ever whole."""
    shares, part = shares_of(stored), held(stored)
    flat = part.reshape(-1, part.shape[-1]) if part.dim() > 1 else part[None]
    if shares.any is None:
        yield part
    elif shares.rows is None or part.dim() == 1:
        share = shares.any
        rows = max(1, BLOCK // share.size)
        for start in range(0, flat.shape[0], rows):
            yield share.whole(flat[start : start + rows])
    else:
        # The same for rows, which are turned to be columns; one map of a stack after the other.
        share = shares.rows
        for one in part.reshape(-1, *part.shape[-2:]):
            yield from _rows_of(share, one)


def _rows_of(share: Share, part: Tensor) -> Iterator[Tensor]:
    step = max(1, BLOCK // part.shape[-1])
    for start in range(0, share.size, step):
        stop = min(start + step, share.size)
        block = part.new_zeros(stop - start, part.shape[-1])
        offset = 0
        for run in share.parts[share.rank]:
            first, last = max(run.start, start), min(run.stop, stop)
            if last > first:
                at = offset + first - run.start
                block[first - start : last - start] = part[at : at + last - first]
            offset += run.stop - run.start
        # Every row is held by one process, and zeros are added to its bytes.
        bits = block.contiguous().view(torch.uint8)
        yield share.total(bits).view(part.dtype)


def check_sharded(model: nn.Module) -> None:
    """Raises `UnsupportedModel` where a model is spread over processes in another way than by tensor parallelism."""
    config: Any = vars(model.config).get("distributed_config") if "config" in vars(model) else None
    settings = {} if config is None else vars(config)
    other = [word for word in ("pp_size", "fsdp_size", "dp_replicate_size", "ep_size") if settings.get(word, 1) > 1]
    plan: Any = vars(model).get("_tp_plan") or {}
    other += sorted(
        {style for style in plan.values() if "sequence_parallel" in style and settings.get("tp_size", 1) > 1}
    )
    if other:
        raise UnsupportedModel(
            f"the model is spread over processes by {', '.join(other)}; supported is tensor parallelism by rows and "
            "columns: load it with DistributedConfig(tp_plan='auto') and nothing else"
        )
    for name, parameter in model.named_parameters():
        try:
            shares_of(parameter)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{name}: {error}") from None
