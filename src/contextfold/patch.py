"""A patch: a header that says what it is for, and one edit per site.

An edit is data. Whether it acts beside the weight or is written into it is the business of `runtime`; where it
stands in a file, of `patchfile`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from contextfold.errors import InputError, PatchMismatch
from contextfold.lowrank import LowRank

__all__ = ["BiasEdit", "Edit", "Header", "MatrixEdit", "Patch", "ScaleEdit", "Site"]


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
        wide = torch.promote_types(stored.dtype, self.delta.B.dtype)
        delta = self.delta.to(wide, stored.device)
        if site.expert is not None:
            whole = stored.clone()
            part = site.matrix(whole)
            part.copy_(torch.addmm(part.to(wide), delta.B, delta.A))
            return whole
        left, right = (delta.A.T, delta.B.T) if site.transposed else (delta.B, delta.A)
        return torch.addmm(stored.to(wide), left, right).to(stored.dtype)

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

    def scaled(self, factor: float) -> ScaleEdit:
        """Between without (0) and with (1) the edit, linearly in the scale."""
        return ScaleEdit(self.base, self.base + factor * (self.value - self.base), self.offset)

    def size(self) -> float:
        """Euclidean norm of the change."""
        return float((self.value.double() - self.base.double()).norm())


Edit = MatrixEdit | BiasEdit | ScaleEdit


@dataclass(frozen=True)
class Header:
    """What a patch is for, and the receipt of how it was made."""

    kind: str
    """`token`: exact at the last kept position of one token sequence."""
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

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        total = 0
        for edit in self.edits.values():
            match edit:
                case MatrixEdit(delta):
                    tensors = [delta.B, delta.A]
                case BiasEdit(delta):
                    tensors = [delta]
                case ScaleEdit(base, value, _):
                    tensors = [base, value]
            total += sum(t.numel() * t.element_size() for t in tensors)
        return total

    @property
    def max_abs_dm(self) -> float:
        """Largest change of an effective norm scale, 0 when no scale is edited."""
        changes = (e.value.double() - e.base.double() for e in self.edits.values() if isinstance(e, ScaleEdit))
        return max((float(c.abs().max()) for c in changes), default=0.0)

    def select(self, layers: Collection[int]) -> Patch:
        """The edits of some layers only."""
        return replace(self, edits={s: e for s, e in self.edits.items() if s.layer in layers})

    def __mul__(self, factor: float) -> Patch:
        """`patch * 0.5` lies half-way between without and with the context; exact only at 0 and 1."""
        return replace(self, edits={s: e.scaled(factor) for s, e in self.edits.items()})

    __rmul__ = __mul__

    def __add__(self, other: Patch) -> Patch:
        """Both edits at every site; matrices and biases add, two edits of one scale are refused."""
        if self.header.fingerprint != other.header.fingerprint:
            raise PatchMismatch("the patches were made for different models or weights, so they cannot be added")
        edits = dict(self.edits)
        for site, edit in other.edits.items():
            edits[site] = _sum(site, edits[site], edit) if site in edits else edit
        header = replace(
            self.header,
            kind="sum",
            exact_at=(),
            plan=(*self.header.plan, *other.header.plan),
        )
        return Patch(header, edits)


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
