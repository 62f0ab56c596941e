"""Bind one decoder layer: names of its record become modules and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import mul
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from contextfold.anatomy.block import (
    AdaptedMap,
    Block,
    DenseBlock,
    ExpertBlock,
    LinearMap,
    Norm,
    OffloadedMap,
    QuantisedMap,
    Reading,
    is_plain,
)
from contextfold.anatomy.proof import TOLERANCE
from contextfold.anatomy.record import Dense, Experts, Factor, Family, Mixer, Sites, Tap, Wiring, given_by, read_by
from contextfold.anatomy.sharded import ShardedMap, held, is_sharded, shares_of
from contextfold.anatomy.wrapped import adapters, execution_device, inside, is_offloaded
from contextfold.errors import UnsupportedModel
from contextfold.patch import Site

__all__ = ["bind_layer", "holds", "names_in", "norm_at", "required"]


def bind_layer(family: Family, index: int, layer: nn.Module, path: str, config: Any) -> Block:
    """The block of the first of the family's kinds that `layer` can be. Raises `UnsupportedModel`, `AttributeError`."""
    names = names_in(layer)
    fitting = [sites for sites in family.sites if holds(sites.wiring, config)]
    if not fitting:
        conditions = [dict(sites.wiring.when) for sites in family.sites]
        raise UnsupportedModel(
            f"{path}: family {family.name!r} has records for {conditions}, and the configuration says otherwise; "
            "load a model of a supported form, or add a record"
        )
    present = [sites for sites in fitting if required(sites) <= names]
    if not present:
        _lacking(family, path, fitting, names, any(adapters(layer)))
    return _Binder(layer, index, path).block(present[0])


def holds(wiring: Wiring, config: Any) -> bool:
    """Whether the configuration is the one under which this wiring was recorded."""
    return all(getattr(config, name) == value for name, value in wiring.when.items())


def names_in(layer: nn.Module) -> set[str]:
    """Of all modules and parameters."""
    return {name for name, _ in layer.named_modules()} | {name for name, _ in layer.named_parameters()}


def required(sites: Sites) -> set[str]:
    """Every name inside the layer that the record speaks of."""
    wiring = sites.wiring
    norms = (wiring.norm_pre, wiring.norm_post, wiring.norm_attention, wiring.norm_outer, wiring.attention_output)
    taps = (*wiring.residual, *((wiring.total,) if wiring.total else ()))
    names = {name for name in norms if name is not None} | {tap.module for tap in taps}
    match sites:
        case Dense(input_maps, output_map):
            return {*names, *input_maps, output_map}
        case Experts(branch, input_maps, stacked, outputs):
            return {*names, *branch, *input_maps, *stacked, *outputs}
        case Mixer(output_map):
            return {*names, output_map}


def _lacking(family: Family, path: str, fitting: Sequence[Sites], names: set[str], wrapped: bool) -> NoReturn:
    """Name what is missing for the kind that comes nearest."""
    missing = min((required(sites) - names for sites in fitting), key=len)
    hint = (
        "; PEFT has wrapped modules of it: merge the adapter (merge_and_unload) and take that model" if wrapped else ""
    )
    raise UnsupportedModel(f"{path} has no {', '.join(sorted(missing))}, which family {family.name!r} describes{hint}")


class _Binder:
    """Looks names up in one layer."""

    def __init__(self, layer: nn.Module, index: int, path: str) -> None:
        self.layer = layer
        self.index = index
        self.path = path

    def block(self, sites: Sites) -> Block:
        match sites:
            case Dense(input_maps, output_map, wiring):
                maps = tuple(self.linear(name) for name in input_maps)
                common = self.common(wiring, input_maps[0])
                return DenseBlock(input_maps=maps, output_map=self.linear(output_map), **common)
            case Mixer(output_map, wiring):
                return DenseBlock(input_maps=(), output_map=self.linear(output_map), **self.common(wiring, output_map))
            case Experts():
                return self.experts(sites)

    def experts(self, sites: Experts) -> ExpertBlock:
        turned = sites.transposed if sites.output_transposed is None else sites.output_transposed
        maps = tuple(m for name in sites.input_maps for m in self.maps(name, sites.packed, sites.transposed))
        stacked = tuple(m for name in sites.stacked_inputs for m in self.maps(name, sites.packed, sites.transposed))
        outputs = tuple(m for name in sites.outputs for m in self.maps(name, sites.packed, turned))
        return ExpertBlock(
            branch=tuple(self.layer.get_submodule(name) for name in sites.branch),
            input_maps=maps,
            stacked_inputs=stacked,
            outputs=outputs,
            **self.common(sites.wiring, sites.branch[0]),
        )

    def common(self, wiring: Wiring, reads_z: str) -> dict[str, Any]:
        source = wiring.norm_pre if wiring.norm_pre is not None else reads_z
        residual = wiring.residual or (read_by(source),)
        default = given_by("") if wiring.norm_outer is None else read_by(wiring.norm_outer)
        total = wiring.total or default
        return {
            "index": self.index,
            "layer": self.layer,
            "residual": tuple(self.reading(tap) for tap in residual),
            "total": self.reading(total),
            "alpha": self.factor(wiring.alpha),
            "shift": self.shift(wiring.shift),
            "norm_pre": self.optional(wiring.norm_pre),
            "norm_post": None if wiring.norm_post is None else self.norm(wiring.norm_post),
            "norm_attention": self.optional(wiring.norm_attention),
            "norm_outer": self.optional(wiring.norm_outer),
            "attention_output": None if wiring.attention_output is None else self.linear(wiring.attention_output),
        }

    def optional(self, name: str | None) -> nn.Module | None:
        return None if name is None else self.layer.get_submodule(name)

    def reading(self, tap: Tap) -> Reading:
        return Reading(self.layer.get_submodule(tap.module), tap.side, self.factor(tap.factor), tap.calls)

    def factor(self, factor: Factor) -> Tensor:
        value: Any = factor
        if callable(factor):
            value = factor(self.layer)
        elif isinstance(factor, str):
            owner, _, name = factor.rpartition(".")
            value = getattr(self.layer.get_submodule(owner), name)
        elif isinstance(factor, Mapping):
            value = factor.get(self.index)
            if value is None:
                raise UnsupportedModel(
                    f"{self.path}: a multiplier depends on the depth, and the record knows it for layers "
                    f"{', '.join(str(index) for index in sorted(factor))} only; discover this model anew"
                )
        if isinstance(value, Tensor):
            if value.device.type == "meta":
                raise UnsupportedModel(
                    f"{self.path}: a multiplier is offloaded, and a fold has to read it; load this layer into memory"
                )
            return value.detach().double().reshape(-1).squeeze()
        return torch.tensor(float(value), dtype=torch.float64)

    def shift(self, terms: Sequence[Sequence[str]]) -> Tensor:
        products = [reduce(mul, [self.factor(name) for name in names]) for names in terms]
        return sum(products, torch.zeros((), dtype=torch.float64))

    def linear(self, name: str) -> LinearMap:
        """A map with its own module: `weight (out, in)`, or (in, out) in a `Conv1D`; or one that tells its sizes."""
        module = self.layer.get_submodule(name)
        within, owner = inside(module)
        weight = owner._parameters.get("weight")
        if within and is_plain(weight):
            site = Site(self.index, f"{self.path}.{name}.{within}", transposed=isinstance(owner, Conv1D))
            return AdaptedMap(site, module, owner) if within == "base_layer" else LinearMap(site, owner)
        site = Site(self.index, f"{self.path}.{name}", transposed=isinstance(module, Conv1D))
        if weight is not None and is_plain(weight) and weight.dim() == 2:
            return LinearMap(site, module)
        if is_sharded(weight) and isinstance(module, nn.Linear) and is_plain(held(weight)):
            return ShardedMap(site, module, shares_of(weight))
        if is_offloaded(module) and isinstance(module, nn.Linear | Conv1D) and module.weight.dtype in TOLERANCE:
            return OffloadedMap(
                site, module, torch.empty(0, dtype=module.weight.dtype, device=execution_device(module))
            )
        if is_offloaded(module):
            _check_plain(site.module, module, weight)
        if not is_plain(weight) and {"in_features", "out_features"} <= vars(module).keys():
            return QuantisedMap(site, module, self.beside)
        raise UnsupportedModel(
            f"{site.module} is a {type(module).__name__}, not a plain linear map with a weight, nor a quantised one "
            "that tells its in_features and out_features (wrapped?); load the model unwrapped"
        )

    @property
    def beside(self) -> Tensor:
        """A parameter that is not quantised; norms never are."""
        plain = [p.data for p in self.layer.parameters() if is_plain(p)]
        if not plain:
            raise UnsupportedModel(f"{self.path} has no weight that tells in which dtype quantised maps compute")
        return plain[0]

    def maps(self, name: str, packed: str | None, transposed: bool) -> tuple[LinearMap, ...]:
        """Maps by the name of a module, or all slices of a stacked parameter by the name of the parameter."""
        owner, _, parameter = name.rpartition(".")
        module = self.layer.get_submodule(owner)
        stored = module._parameters.get(parameter)
        if stored is None:
            linear = self.linear(name)
            _check_plain(linear.site.name, linear.module, held(linear.module._parameters.get("weight")))
            return (linear,)
        where = f"{self.path}.{owner}"
        _check_plain(f"{where}.{parameter}", module, held(stored))
        if stored.dim() == 2 and packed is None:
            return (self.slice(Site(self.index, where, parameter), module),)
        count = stored.shape[0] if packed is None else int(self.factor(packed))
        sites = (Site(self.index, where, parameter, transposed, expert, count) for expert in range(count))
        return tuple(self.slice(site, module) for site in sites)

    def slice(self, site: Site, module: nn.Module) -> LinearMap:
        """A map that is a parameter, or a slice of one, of a module that does more than to apply it."""
        stored = module.get_parameter(site.parameter)
        if not is_sharded(stored):
            return LinearMap(site, module)
        if site.transposed or stored.dim() != (2 if site.expert is None else 3):
            raise UnsupportedModel(
                f"{site.name} is shared out over processes and stored otherwise than as (experts, out, in); load the "
                "model in one process"
            )
        return ShardedMap(site, module, shares_of(stored))

    def norm(self, name: str) -> Norm:
        within, owner = inside(self.layer.get_submodule(name))
        return norm_at(Site(self.index, ".".join(filter(None, (self.path, name, within)))), owner)


def norm_at(site: Site, module: nn.Module) -> Norm:
    """The norm of which `site` is the scale, its convention measured. Raises `UnsupportedModel`."""
    known = [vars(module)[word] for word in EPS_NAMES if word in vars(module)]
    if "weight" not in module._parameters or not known:
        raise UnsupportedModel(
            f"{site.module} is a {type(module).__name__} without a weight or an eps ({', '.join(EPS_NAMES)}); a norm "
            "of unknown convention cannot be edited"
        )
    if is_offloaded(module):
        raise UnsupportedModel(
            f"{site.module} is offloaded, and its scale has to be edited, which only weights in memory can be; give it "
            "a device in device_map, or load the model without offloading"
        )
    eps = float(known[0])
    return Norm(site, module, eps, _offset(site.module, module, eps))


def _check_plain(where: str, module: nn.Module, stored: Tensor | None) -> None:
    """Edits of experts and routers are lent by writing them: no module gives what their parameter alone computes."""
    if not is_plain(stored):
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in TOLERANCE)
        raise UnsupportedModel(
            f"{where} of a {type(module).__name__} is quantised, wrapped or offloaded, and its edits have to be "
            f"written; load the model plain, in memory, in one of {known}"
        )


EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
"""Attributes in which norms keep their eps."""

CONVENTION_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative error allowed when a norm is compared with a convention: rounding of its output, with room."""


@torch.no_grad()
def _offset(name: str, module: nn.Module, eps: float) -> int:
    """0 when the norm multiplies by w, 1 when by 1 + w: found by feeding it a vector of RMS one.

    The offset is fitted with weights 1 / (1 + w²), since rounding errs in proportion to w and scales of 100 occur:
    under bfloat16 those say nothing about a one more or less.
    """
    w = module.get_parameter("weight").data
    x = torch.randn(w.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(w)
    unit = x.double() / torch.sqrt(x.double().square().mean() + eps)
    out, w = module(x).double(), w.double()
    trust = unit.square() / (1 + w * w)
    fitted = float(((out - w * unit) * unit / (1 + w * w)).sum() / trust.sum())
    offset = 1 if fitted > 0.5 else 0
    error = float((out - (offset + w) * unit).norm() / out.norm())
    limit = CONVENTION_TOLERANCE.get(module.get_parameter("weight").dtype, 0.0)
    if not (error <= limit and abs(fitted - offset) < 0.25):
        raise UnsupportedModel(
            f"{name} is neither w ⊙ x/rms nor (1 + w) ⊙ x/rms (fitted offset {fitted:.2g}, relative error {error:.2g}, "
            f"limit {limit:.2g}); a norm of unknown convention cannot be edited"
        )
    return offset
