"""How PEFT keeps the edits of a patch: pairs for modules, pairs for parameters, and modules saved whole.

PEFT adds `scaling · B A` beside a linear module. Where the edited parameter is not the weight of such a module (maps of
experts stacked in one parameter, routers with a forward of their own), it targets the parameter itself and adds the
product to it for the duration of a call. What is no matrix at all (scales of norms) is a module saved whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound, DenseBlock
from contextfold.errors import NotExportable, PatchMismatch
from contextfold.export.ranks import padded
from contextfold.lowrank import LowRank
from contextfold.patch import BiasEdit, Edit, MatrixEdit, Patch, ScaleEdit, Site
from contextfold.runtime import is_plain_map

__all__ = ["Layout", "Pair", "lay_out", "refuse_scales"]


@dataclass(frozen=True, eq=False)
class Pair:
    """One LoRA pair: `A (r·E, in)`, `B (out, r·E)`, E experts side by side (1 for a map of its own)."""

    module: str
    A: Tensor
    B: Tensor
    rank: int
    parameter: str | None = None
    """The parameter that is targeted; None when the module is."""
    bias: Tensor | None = None
    """`(out,)`, added besides."""

    @property
    def key(self) -> str:
        """By which patterns and targets know it."""
        return self.module if self.parameter is None else f"{self.module}.{self.parameter}"


@dataclass(frozen=True, eq=False)
class Layout:
    """All of a patch, as PEFT keeps it."""

    pairs: tuple[Pair, ...]
    saved: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Whole modules, by dotted name: their edited state."""
    turned: bool = False
    """Some module stores its weight (in, out)."""

    @property
    def biased(self) -> bool:
        return any(pair.bias is not None for pair in self.pairs)


def lay_out(bound: Bound, patch: Patch, rank: int | None = None) -> Layout:
    """Where each edit goes. `rank`: the width that all pairs get; None leaves each its own.

    Raises `PatchMismatch` for sites that the model does not have, and `NotExportable`, by name, for edits that PEFT
    cannot hold.
    """
    by_module: dict[str, dict[Site, Edit]] = {}
    for site, edit in sorted(patch.edits.items(), key=lambda item: (item[0].layer, item[0].name)):
        by_module.setdefault(site.module, {})[site] = edit
    names = dict(bound.model.named_modules())
    # Routed experts count even where no edit is in them: PEFT renames by the type of the model.
    by_parameter = any(name.rpartition(".")[2] == "experts" for name in names)
    pairs: list[Pair] = []
    saved: dict[str, Mapping[str, Tensor]] = {}
    for name, edits in by_module.items():
        if name not in names or any(site.parameter not in names[name]._parameters for site in edits):
            raise PatchMismatch(f"the patch edits {next(iter(edits)).name}, which this model does not have")
        owner = names[name]
        if not any(isinstance(edit, MatrixEdit) for edit in edits.values()) and not is_plain_map(owner):
            saved[name] = _whole(name, owner, edits)
        elif is_plain_map(owner):
            pairs.append(_of_module(name, owner, edits, by_parameter))
        else:
            pairs.extend(_of_parameters(name, owner, edits))
    pairs.extend(_companions(bound, pairs, by_parameter))
    turned = any(site.transposed and site.expert is None for site in patch.edits)
    return Layout(tuple(_widened(pair, rank) for pair in pairs), saved, turned)


def _of_module(name: str, owner: nn.Module, edits: Mapping[Site, Edit], by_parameter: bool) -> Pair:
    """A linear module: one matrix, and one bias where there is one.

    In models with stacked experts PEFT renames targeted modules after their older layout, in which shared experts look
    like routed ones; there the weight is targeted as a parameter.
    """
    turned = not isinstance(owner, nn.Linear)
    weight = owner.get_parameter("weight")
    delta = LowRank(*_nothing(weight.T if turned else weight))
    bias = None
    for site, edit in edits.items():
        match edit:
            case MatrixEdit(found) if site.parameter == "weight" and site.transposed == turned and site.expert is None:
                delta = found
            case BiasEdit(found) if site.parameter == "bias":
                bias = found
            case _:
                raise PatchMismatch(f"the patch edits {site.name} in a way in which {type(owner).__name__} cannot be")
    if not by_parameter:
        return Pair(name, delta.A, delta.B, delta.rank, None, bias)
    if bias is not None:
        raise NotExportable(
            f"{name}.bias is edited: PEFT keeps no bias beside targeted parameters, which a mixture of experts needs; "
            "export a checkpoint"
        )
    return Pair(name, delta.A, delta.B, delta.rank, "weight")


def _nothing(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Factors `(out, 1)`, `(1, in)` of an edit that changes nothing."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.new_zeros(weight.shape[0], 1, dtype=wide), weight.new_zeros(1, weight.shape[1], dtype=wide)


def _of_parameters(name: str, owner: nn.Module, edits: Mapping[Site, Edit]) -> Iterator[Pair]:
    """One pair per parameter, in the order in which the module registers them: PEFT nests them so."""
    for parameter, stored in owner.named_parameters(recurse=False):
        here = {site: edit for site, edit in edits.items() if site.parameter == parameter}
        if not here:
            continue
        matrices = {site: edit.delta for site, edit in here.items() if isinstance(edit, MatrixEdit)}
        if len(matrices) < len(here) or stored.dim() not in (2, 3):
            raise NotExportable(
                f"{name}.{parameter} of a {type(owner).__name__} is edited: PEFT targets matrices and stacks of "
                "matrices only; export a checkpoint"
            )
        if stored.dim() == 3:
            yield _stack(name, parameter, owner, stored, matrices)
        else:
            yield _matrix(name, parameter, stored, matrices)


def _stored(site: Site, delta: LowRank) -> LowRank:
    """The edit in the order in which the parameter is stored."""
    return LowRank(delta.A.T, delta.B.T) if site.transposed else delta


def _matrix(name: str, parameter: str, stored: Tensor, edits: Mapping[Site, LowRank]) -> Pair:
    """A matrix, or several maps packed into one matrix of stacked rows: each edit moves its own rows."""
    parts = []
    for site, delta in edits.items():
        part = _stored(site, delta)
        left = part.B.new_zeros(stored.shape[0], part.rank)
        rows = stored.shape[0] // site.experts
        left[(site.expert or 0) * rows :][:rows] = part.B
        parts.append(LowRank(left, part.A))
    whole = LowRank(torch.cat([part.B for part in parts], 1), torch.cat([part.A for part in parts], 0))
    return Pair(name, whole.A, whole.B, whole.rank, parameter)


def _stack(name: str, parameter: str, owner: nn.Module, stored: Tensor, edits: Mapping[Site, LowRank]) -> Pair:
    """Stacked experts `(E, p, q)`: A has the ranks of one expert side by side, B the experts of one rank.

    PEFT takes q for the input side, or p where the module says of itself that it is transposed.
    """
    E, p, q = stored.shape
    rank = max(1, *(delta.rank for delta in edits.values()))
    like = next(iter(edits.values())).A
    swapped = bool(getattr(owner, "is_transposed", False))
    A = like.new_zeros(E, rank, p if swapped else q)
    B = like.new_zeros(q if swapped else p, rank, E)
    for site, delta in edits.items():
        if site.experts != E or site.expert is None:
            raise PatchMismatch(f"the patch edits {site.name} of {site.experts} experts, here are {E}")
        part = padded(_stored(site, delta), rank)
        A[site.expert] = part.B.T if swapped else part.A
        B[:, :, site.expert] = part.A.T if swapped else part.B
    return Pair(name, A.flatten(0, 1), B.flatten(1, 2), rank, parameter)


def _whole(name: str, owner: nn.Module, edits: Mapping[Site, Edit]) -> Mapping[str, Tensor]:
    """A module with a scale, edited and rounded to its storage dtype."""
    if list(owner.children()):
        raise NotExportable(f"{name} is edited, a {type(owner).__name__} with modules inside; export a checkpoint")
    state = {key: value.detach() for key, value in owner.state_dict().items()}
    for site, edit in edits.items():
        state[site.parameter] = edit.merged(state[site.parameter], site)
    return state


def _companions(bound: Bound, pairs: Sequence[Pair], by_parameter: bool) -> Iterator[Pair]:
    """Pairs of zeros for the input maps that stand beside an edited one.

    Servers pack gate and up into one matrix and refuse an adapter for half of it.
    """
    there = {pair.module for pair in pairs}
    for block in bound.blocks:
        if not isinstance(block, DenseBlock) or by_parameter:
            continue
        names = {linear.site.module: linear for linear in block.input_maps if is_plain_map(linear.module)}
        if there & names.keys():
            for name in sorted(names.keys() - there):
                B, A = _nothing(names[name].weight)
                yield Pair(name, A, B, 1)


def _widened(pair: Pair, rank: int | None) -> Pair:
    """At least rank 1, since PEFT knows no less, and `rank` where all must be alike."""
    wanted = max(pair.rank, 1) if rank is None else rank
    if wanted == pair.rank:
        return pair
    if wanted < pair.rank:  # each edit fits by now, but these share one matrix
        raise NotExportable(
            f"{pair.key} holds several experts in one matrix, whose edits together need rank {pair.rank} and not "
            f"{wanted}; export without --uniform-rank"
        )
    E = pair.A.shape[0] // pair.rank if pair.rank else 1
    A = pair.A.reshape(E, pair.rank, pair.A.shape[1])
    B = pair.B.reshape(pair.B.shape[0], pair.rank, E)
    A = torch.cat([A, A.new_zeros(E, wanted - pair.rank, A.shape[2])], 1)
    B = torch.cat([B, B.new_zeros(B.shape[0], wanted - pair.rank, E)], 1)
    return replace(pair, A=A.flatten(0, 1), B=B.flatten(1, 2), rank=wanted)


def refuse_scales(patch: Patch) -> None:
    """Raises `NotExportable` where something else than matrices is edited."""
    scales = [site for site, edit in patch.edits.items() if isinstance(edit, ScaleEdit)]
    if scales:
        raise NotExportable(
            f"the patch edits {len(scales)} norm scales, {scales[0].name} among them, and LoRA pairs alone cannot do "
            "that: the norm brings whatever the matrix before it gives to one length, so a matrix reaches only "
            "directions, and the wanted branch has another length; export a checkpoint, or PEFT without --lora-only"
        )
    biases = [site for site, edit in patch.edits.items() if isinstance(edit, BiasEdit)]
    if biases:
        raise NotExportable(
            f"the patch edits {len(biases)} biases, {biases[0].name} among them, and LoRA pairs alone hold no bias; "
            "export a checkpoint, or PEFT without --lora-only"
        )
