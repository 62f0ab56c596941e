"""Bind a model to its family: resolve the names, prove the form on every block, or refuse by name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy.families import FAMILIES
from contextfold.anatomy.record import Family
from contextfold.errors import InputError, UnsupportedModel
from contextfold.patch import Site

__all__ = ["Block", "Bound", "LinearMap", "Norm", "family_of", "resolve", "weights_digest"]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map of a block; read in (out, in) order whatever the storage."""

    site: Site
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """`W (out, in)`, a view of the stored parameter."""
        W = self.module.get_parameter(self.site.parameter).data
        return W.T if self.site.transposed else W

    @property
    def bias(self) -> Tensor | None:
        """`b (out,)`, or None."""
        bias = self.module._parameters.get("bias")
        return None if bias is None else bias.data

    def exact(self, inputs: Tensor) -> Tensor:
        """`W x + b` for rows `(n, in) -> (n, out)`, in float64 from the stored weights."""
        out = inputs.double() @ self.weight.double().T
        return out if self.bias is None else out + self.bias.double()


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm with a scale: `N(x) = (offset + w) ⊙ x / sqrt(mean(x²) + eps)`."""

    site: Site
    module: nn.Module
    eps: float
    offset: int

    @property
    def scale(self) -> Tensor:
        """Effective scale `m (d,)`, float64."""
        return self.module.get_parameter(self.site.parameter).data.double() + self.offset

    def unscaled(self, inputs: Tensor) -> Tensor:
        """`x / sqrt(mean(x²) + eps)` for rows `(n, d)`, float64."""
        x = inputs.double()
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps)


@dataclass(frozen=True, eq=False)
class Block:
    """One decoder layer: `y = v + alpha · branch`, all modules resolved."""

    index: int
    layer: nn.Module
    input_maps: tuple[LinearMap, ...]
    output_map: LinearMap
    attention_output: LinearMap
    norm_pre: nn.Module
    norm_post: Norm | None
    norm_attention: nn.Module | None
    alpha: float = 1.0

    @property
    def name(self) -> str:
        return f"layer {self.index}"

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every parameter that a fold may edit."""
        post = () if self.norm_post is None else (self.norm_post.site,)
        return (*(m.site for m in self.input_maps), self.output_map.site, *post)


@dataclass(frozen=True, eq=False)
class Bound:
    """A model whose every block was proven to have the form that its family says."""

    model: nn.Module
    family: Family
    model_type: str
    blocks: tuple[Block, ...]
    vocabulary: int
    max_positions: int | None
    _digest: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.blocks[0].output_map.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].output_map.weight.dtype

    @property
    def attention(self) -> str:
        """Attention implementation, e.g. `sdpa`."""
        config: Any = self.model.config
        return str(config._attn_implementation)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, dtypes and bytes of all weights.

        Computed once, and again when a parameter was replaced, changed in place, or differs in a sample of its
        values: a patch solved on edited weights must not carry the digest of the unedited ones.
        """
        state = _state_sample(self.model)
        if self._digest.get("state") != state:
            self._digest.update(state=state, value=weights_digest(self.model))
        return self._digest["value"]


SAMPLE = 16
"""Values per parameter that are looked at before a cached digest is believed."""


def _state_sample(model: nn.Module) -> str:
    parts = []
    for name, p in model.named_parameters():
        flat = p.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // SAMPLE)].float().tolist()
        parts.append(f"{name}|{p.data_ptr()}|{p._version}|{values}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all parameters and stored buffers, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def family_of(model_type: str) -> Family:
    """The family that covers `model_type`. Raises `UnsupportedModel`."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = sorted(t for family in FAMILIES for t in family.model_types)
    raise UnsupportedModel(
        f"model type {model_type!r} has no anatomy here; supported are {', '.join(known)}. "
        "Add a record to contextfold/anatomy/families.py to support it"
    )


def resolve(model: nn.Module) -> Bound:
    """Find the letters of `model`. Nothing is proven yet: `bind` does both.

    Raises `UnsupportedModel` when the model's type, state or modules are not what a family describes.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module with its weights, met {type(model).__name__}")
    _check_state(model)
    config: Any = model.config
    family = family_of(config.model_type)
    try:
        layers = model.get_submodule(family.layers)
        blocks = tuple(_block(family, i, layer) for i, layer in enumerate(layers.children()))
    except AttributeError as error:
        raise UnsupportedModel(
            f"{type(model).__name__} says it is {config.model_type!r}, but lacks what family {family.name!r} "
            f"describes: {error}"
        ) from error
    if not blocks:
        raise UnsupportedModel(f"{type(model).__name__} has no decoder layers, so there is nothing to fold into")
    _check_unshared(model, blocks)
    return Bound(model, family, config.model_type, blocks, config.vocab_size, config.max_position_embeddings)


def _check_state(model: nn.Module) -> None:
    name = type(model).__name__
    config: Any = vars(model).get("config")
    if not isinstance(getattr(config, "model_type", None), str):
        raise UnsupportedModel(f"{name} is not a transformers model: it has no config with a model_type")
    if model.training:
        raise UnsupportedModel(f"{name} is in training mode, where dropout makes runs differ; call model.eval()")
    stray = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    if stray:
        raise UnsupportedModel(f"{stray[0]} has no data (meta device); load the model with its weights")


def _check_unshared(model: nn.Module, blocks: Sequence[Block]) -> None:
    """A parameter that two names share would be edited twice by one edit."""
    edited = {site.name for block in blocks for site in block.sites}
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(parameter.data_ptr(), name)
        if owner != name and edited & {owner, name}:
            raise UnsupportedModel(f"{name} shares its memory with {owner}; editing one would edit both")


def _block(family: Family, index: int, layer: nn.Module) -> Block:
    sites = family.sites
    prefix = f"{family.layers}.{index}"

    def linear(path: str) -> LinearMap:
        module = layer.get_submodule(path)
        if type(module) is not nn.Linear or not module.weight.dtype.is_floating_point:
            raise UnsupportedModel(
                f"{prefix}.{path} is a {type(module).__name__}, not a plain linear map with floating-point weights "
                "(quantised or wrapped?); load the model unquantised and unwrapped"
            )
        return LinearMap(Site(index, f"{prefix}.{path}"), module)

    def norm(path: str) -> Norm:
        module = layer.get_submodule(path)
        eps = float(getattr(module, family.norm_eps))
        return Norm(Site(index, f"{prefix}.{path}"), module, eps, _offset(f"{prefix}.{path}", module, eps))

    return Block(
        index=index,
        layer=layer,
        input_maps=tuple(linear(path) for path in sites.input_maps),
        output_map=linear(sites.output_map),
        attention_output=linear(sites.attention_output),
        norm_pre=layer.get_submodule(sites.norm_pre),
        norm_post=None if sites.norm_post is None else norm(sites.norm_post),
        norm_attention=None if sites.norm_attention is None else layer.get_submodule(sites.norm_attention),
    )


CONVENTION_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative error allowed when a norm is compared with a convention: rounding of its output, with room."""


@torch.no_grad()
def _offset(name: str, module: nn.Module, eps: float) -> int:
    """0 when the norm multiplies by w, 1 when by 1 + w: found by feeding it a vector of RMS one.

    The offset is fitted with weights 1 / (1 + w²), since rounding errs in proportion to w and scales of 100 occur:
    under bfloat16 those say nothing about a one more or less.
    """
    stored = module.get_parameter("weight").data
    x = torch.randn(stored.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(stored)
    unit = x.double() / torch.sqrt(x.double().square().mean() + eps)
    out, w = module(x).double(), stored.double()
    trust = 1 / (1 + w * w)
    fitted = float(((out - w * unit) * unit * trust).sum() / (unit * unit * trust).sum())
    offset = 1 if fitted > 0.5 else 0
    error = float((out - (offset + w) * unit).norm() / out.norm())
    limit = CONVENTION_TOLERANCE.get(stored.dtype, 0.0)
    if not (error <= limit and abs(fitted - offset) < 0.25):
        raise UnsupportedModel(
            f"{name} is neither w ⊙ x/rms nor (1 + w) ⊙ x/rms (fitted offset {fitted:.2g}, relative error {error:.2g}, "
            f"limit {limit:.2g}); a norm of unknown convention cannot be edited"
        )
    return offset
