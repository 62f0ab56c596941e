"""A patch: a header that says what it is for, and one edit per site.

An edit is data. Whether it acts beside the weight or is written into it is the business of `runtime`; where it
stands in a file, of `patchfile`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from types import MappingProxyType

import torch
from torch import Tensor

from contextfold.errors import InputError, PatchMismatch
from contextfold.lowrank import LowRank
from contextfold.notebook import card, short

__all__ = ["BiasEdit", "Edit", "Header", "MatrixEdit", "Patch", "ScaleEdit", "Site", "combine", "factor_dtype"]


@dataclass(frozen=True, order=True)
class Site:
    """One parameter of the model that an edit changes.

    `module` is the dotted name of the module that owns it, `parameter` its name there. `transposed` says that
    the matrix is stored (in, out), as GPT-2 does; edits are always in (out, in) order.
    """

    layer: int
    module: str
    parameter: str = "weight"
    transposed: bool = False
    expert: int | None = None
    """Which slice of a parameter that stacks the maps of several experts; None for a parameter of its own."""
    experts: int = 1
    """How many maps the parameter stacks."""

    @property
    def name(self) -> str:
        """Full dotted name of the parameter, with the slice where it is one."""
        whole = f"{self.module}.{self.parameter}"
        return whole if self.expert is None else f"{whole}[{self.expert}]"

    def matrix(self, stored: Tensor) -> Tensor:
        """The map `(out, in)` inside the stored parameter, as a view."""
        part = stored
        if self.expert is not None:
            part = stored.view(self.experts, -1, stored.shape[-1])[self.expert]
        return part.T if self.transposed else part


@dataclass(frozen=True, eq=False)
class MatrixEdit:
    """`W + delta`, in (out, in) order."""

    delta: LowRank

    def merged(self, stored: Tensor, site: Site) -> Tensor:
        """The edited parameter: summed in the wider dtype of weight and factors, then rounded to that of `stored`."""
        if site.expert is not None:
            whole = stored.clone()
            self.write(site.matrix(whole), site.matrix(stored))
            return whole
        wide = torch.promote_types(stored.dtype, self.delta.B.dtype)
        delta = self.delta.to(wide, stored.device)
        left, right = (delta.A.T, delta.B.T) if site.transposed else (delta.B, delta.A)
        if delta.rank == 1:  # in one pass over the weight
            return torch.addcmul(stored.to(wide), left, right).to(stored.dtype)
        return torch.addmm(stored.to(wide), left, right).to(stored.dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.delta.B, self.delta.A

    @property
    def device(self) -> torch.device:
        return self.delta.B.device

    def to(self, device: torch.device) -> MatrixEdit:
        return MatrixEdit(self.delta.to(self.delta.B.dtype, device))

    def write(self, target: Tensor, original: Tensor) -> None:
        """Put the edited `original (out, in)` into `target`, a view of one slice of a stacked parameter."""
        wide = torch.promote_types(original.dtype, self.delta.B.dtype)
        delta = self.delta.to(wide, original.device)
        target.copy_(torch.addmm(original.to(wide), delta.B, delta.A))

    def scaled(self, factor: float) -> MatrixEdit:
        return MatrixEdit(self.delta * factor)

    def size(self) -> float:
        """Frobenius norm of the change."""
        return self.delta.norm()


@dataclass(frozen=True, eq=False)
class BiasEdit:
    """`b + delta`, delta `(out,)`."""

    delta: Tensor

    def merged(self, stored: Tensor, site: Site) -> Tensor:
        return (stored.double() + self.delta.to(stored.device).double()).to(stored.dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.delta,)

    @property
    def device(self) -> torch.device:
        return self.delta.device

    def to(self, device: torch.device) -> BiasEdit:
        return BiasEdit(self.delta.to(device))

    def scaled(self, factor: float) -> BiasEdit:
        return BiasEdit(self.delta * factor)

    def size(self) -> float:
        """Euclidean norm of the change."""
        return float(self.delta.double().norm())


@dataclass(frozen=True, eq=False)
class ScaleEdit:
    """The *effective* scale of a norm, before and after: `base (d,)` becomes `value (d,)`.

    The parameter holds `value − offset`; offset is 1 for norms that multiply by `1 + w` (Gemma 1 to 3), else 0.
    Kept as values and not as a difference: a scale belongs to one base, and two scale edits do not add.
    """

    base: Tensor
    value: Tensor
    offset: int

    def merged(self, stored: Tensor, site: Site) -> Tensor:
        return (self.value.to(stored.device).double() - self.offset).to(stored.dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.base, self.value

    @property
    def device(self) -> torch.device:
        return self.value.device

    def to(self, device: torch.device) -> ScaleEdit:
        return ScaleEdit(self.base.to(device), self.value.to(device), self.offset)

    def scaled(self, factor: float) -> ScaleEdit:
        """Between without (0) and with (1) the edit, linearly in the scale."""
        return ScaleEdit(self.base, self.base + factor * (self.value - self.base), self.offset)

    def size(self) -> float:
        """Euclidean norm of the change."""
        return float((self.value.double() - self.base.double()).norm())


Edit = MatrixEdit | BiasEdit | ScaleEdit


def factor_dtype(stored: torch.dtype) -> torch.dtype:
    """In what the tensors of an edit are kept: the dtype of the weight, but never half precision."""
    return torch.promote_types(stored, torch.float32)


@dataclass(frozen=True)
class Header:
    """What a patch is for, and the receipt of how it was made."""

    kind: str
    """`token`: exact at the last kept position of one token sequence; `sequence`: at all that `exact_at` names.
    `scaled`, `sum` and `recompressed` are exact nowhere."""
    model_type: str
    fingerprint: str
    """SHA-256 over all weights of the model that it was solved on."""
    positions: tuple[int, ...]
    """Absolute positions of the tokens of the reduced run."""
    exact_at: tuple[int, ...]
    """Those of them where the patched model equals the in-context one."""
    tokens_digest: str
    """SHA-256 of the token ids and positions of the reduced run."""
    context_digest: str
    """SHA-256 of the token ids of the full run. The ids themselves are not stored."""
    model_dtype: str
    factor_dtype: str
    attention: str
    """Attention implementation of the run that was measured, e.g. `sdpa`."""
    materialised: bool
    """Measured on weights that were really written (and rounded), not on a low-rank action."""
    plan: tuple[str, ...]
    """Names of the rules, in the order in which they act inside a block."""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Patch:
    """A header and `{site: edit}`. Immutable."""

    header: Header
    edits: Mapping[Site, Edit]

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", MappingProxyType(dict(self.edits)))

    def __repr__(self) -> str:
        layers = len({site.layer for site in self.edits})
        return f"Patch({self.header.kind}, {len(self.edits)} edits in {layers} layers, {self.nbytes} bytes)"

    def _repr_html_(self) -> str:
        """By layer, how many edits and how large, for a notebook."""
        layers = sorted({site.layer for site in self.edits})
        rows = []
        for layer in layers:
            mine = self.select([layer])
            kinds = {MatrixEdit: "matrix", BiasEdit: "bias", ScaleEdit: "scale"}
            sizes = [
                math.sqrt(sum(e.size() ** 2 for e in mine.edits.values() if isinstance(e, kind))) for kind in kinds
            ]
            rows.append((str(layer), str(len(mine.edits)), *(short(size) if size else "–" for size in sizes)))
        exact = f"exact at {len(self.header.exact_at)} positions" if self.header.exact_at else "exact nowhere"
        made = f"for {self.header.model_type}, {exact}, plan {' → '.join(self.header.plan)}"
        return card(repr(self), made, ("layer", "edits", "‖dW‖", "‖db‖", "‖dm‖"), rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for edit in self.edits.values() for tensor in edit.tensors)

    @property
    def max_abs_dm(self) -> float:
        """Largest change of an effective norm scale, 0 when no scale is edited."""
        changes = (e.value.double() - e.base.double() for e in self.edits.values() if isinstance(e, ScaleEdit))
        return max((float(c.abs().max()) for c in changes), default=0.0)

    def select(self, layers: Collection[int]) -> Patch:
        """The edits of some layers only; exact nowhere unless they are all there are."""
        edits = {s: e for s, e in self.edits.items() if s.layer in layers}
        return self if len(edits) == len(self.edits) else Patch(replace(self.header, exact_at=()), edits)

    def recompress(self, tol: float) -> Patch:
        """Every matrix edit in as few factors as a relative Frobenius error of `tol` allows; exact only for 0.

        What a dropped singular value costs depends on what the map reads, and is measured in `docs/numerics.md`.
        """
        edits = {
            site: MatrixEdit(edit.delta.to(torch.float64).recompress(tol).to(edit.delta.B.dtype))
            if isinstance(edit, MatrixEdit)
            else edit
            for site, edit in self.edits.items()
        }
        return Patch(self.header if tol == 0 else replace(self.header, kind="recompressed", exact_at=()), edits)

    def __mul__(self, factor: float) -> Patch:
        """`patch * 0.5` lies half-way between without and with the context; exact only at 0 and 1.

        Once is the patch itself, bit for bit: `base + 1 · (value − base)` need not be `value`.
        """
        if factor == 1:
            return self
        header = replace(self.header, kind="scaled", exact_at=())
        return Patch(header, {s: e.scaled(factor) for s, e in self.edits.items()})

    __rmul__ = __mul__

    def __neg__(self) -> Patch:
        return self * -1.0

    def __sub__(self, other: Patch) -> Patch:
        """What the first changes and the second does not: `dP − dQ` at every site, under the rules of a sum."""
        return self + -other

    def __add__(self, other: Patch) -> Patch:
        """Both edits at every site; matrices and biases add, two edits of one scale are refused."""
        if self.header.fingerprint != other.header.fingerprint:
            raise PatchMismatch(
                "the patches were made for different models or weights, so they cannot be added; fold both contexts on "
                "one model"
            )
        edits = dict(self.edits)
        for site, edit in other.edits.items():
            edits[site] = _sum(site, edits[site], edit) if site in edits else edit
        return Patch(_joined(self.header, other.header), edits)


def combine(patches: Sequence[Patch], weights: Sequence[float]) -> Patch:
    """`Σ weight · patch`, site by site, for matrices and biases; one patch once is that patch, bit for bit.

    The sum acts on weights, not on contexts: it is exact for no context, and says so in its header. Two patches that
    set the same norm scale are refused, because a scale belongs to one base and two of them do not add.

    Raises `InputError` for that, for no patches, and for weights that are missing or not finite, and `PatchMismatch`
    for patches of different models or weights.
    """
    if not patches or len(patches) != len(weights):
        raise InputError(f"{len(patches)} patches and {len(weights)} weights; give one weight for each patch")
    if not all(math.isfinite(weight) for weight in weights):
        raise InputError(f"the weights {list(weights)} are not all finite numbers")
    return reduce(add, (patch * weight for patch, weight in zip(patches, weights, strict=True)))


def _joined(first: Header, second: Header) -> Header:
    """The header of a sum: exact nowhere, and about a run only where both patches are about that run."""
    same_run = first.tokens_digest == second.tokens_digest
    return replace(
        first,
        kind="sum",
        positions=first.positions if same_run else (),
        exact_at=(),
        tokens_digest=first.tokens_digest if same_run else "",
        context_digest=first.context_digest if first.context_digest == second.context_digest else "",
        attention=first.attention if first.attention == second.attention else "mixed",
        materialised=first.materialised and second.materialised,
        plan=tuple(dict.fromkeys((*first.plan, *second.plan))),
    )


def _sum(site: Site, first: Edit, second: Edit) -> Edit:
    match first, second:
        case MatrixEdit(a), MatrixEdit(b):
            return MatrixEdit(a + b)
        case BiasEdit(a), BiasEdit(b):
            return BiasEdit(a + b)
        case _:
            raise InputError(
                f"both patches set the norm scale {site.name}; scales do not add: fold the two contexts together, "
                "or select disjoint layers"
            )
