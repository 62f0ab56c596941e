"""Bind a model to its family: resolve the names, or refuse by name. `probe` proves what was resolved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from contextfold.anatomy.block import Block
from contextfold.anatomy.families import FAMILIES
from contextfold.anatomy.layer import bind_layer
from contextfold.anatomy.record import Family
from contextfold.anatomy.refused import REFUSED
from contextfold.anatomy.sharded import agree, blocks_of, check_sharded, held, is_sharded, refuse_sharded
from contextfold.anatomy.wrapped import adapter_state, bare, is_offloaded, lent_state, repacked, value_of
from contextfold.errors import InputError, UnsupportedModel
from contextfold.patch import Site
from contextfold.solving import has_float64

__all__ = ["Bound", "Weights", "check_in_memory", "check_state", "family_of", "resolve", "weights_digest"]


@dataclass(frozen=True, eq=False)
class Bound:
    """A model whose every block was proven to have the form that its family says."""

    model: nn.Module
    family: Family
    model_type: str
    blocks: tuple[Block, ...]
    vocabulary: int
    max_positions: int | None
    idle: tuple[nn.Module, ...] = ()
    """Layers that text does not run."""
    _weights: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.blocks[0].anchor.device

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].anchor.dtype

    @property
    def attention(self) -> str:
        """Attention implementation, e.g. `sdpa`."""
        config: Any = self.model.config
        return str(config._attn_implementation)

    @property
    def weights(self) -> Weights:
        """What is known of the present weights: the same object until one of them is seen to have changed.

        That is when a parameter was replaced, changed in place, or differs in a sample of its values: a patch solved
        on edited weights must not carry the digest of the unedited ones.
        """
        state = _state_sample(self.model)
        if self._weights.get("state") != state:
            self._weights.update(state=state, known=Weights(self.model, self.blocks))
        known: Weights = self._weights["known"]
        return known

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, dtypes and bytes of all weights."""
        return self.weights.fingerprint


@dataclass(frozen=True, eq=False)
class Weights:
    """Figures of one state of a model's weights, computed when first asked for."""

    model: nn.Module
    blocks: tuple[Block, ...]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, dtypes and bytes of all weights."""
        return weights_digest(self.model)

    @cached_property
    def sizes(self) -> Mapping[Site, float]:
        """Frobenius norm of every map that a fold may edit."""
        maps = [linear for block in self.blocks for linear in block.maps]
        wide = torch.promote_types(self.blocks[0].anchor.dtype, torch.float32)
        return {linear.site: linear.norm(wide) for linear in maps}


SAMPLE = 16
"""Values per parameter that are looked at before a cached digest is believed."""


def _state_sample(model: nn.Module) -> str:
    parts = [adapter_state(model), lent_state(model)]
    samples: dict[torch.device, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        p = held(parameter)
        parts.append(f"{name}|{p.data_ptr()}|{p._version}")
        for part in _parts(p.detach()) if p.device.type != "meta" else ():
            flat = part.reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLE)].to(torch.float32)
            samples.setdefault(sample.device, []).append(sample)
    values = [torch.cat(found).tolist() for found in samples.values()]  # waits once per device
    return "".join(agree(model, hashlib.sha256(f"{parts}{values}".encode()).hexdigest()))


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all parameters and stored buffers, in name order.

    Offloaded ones are fetched one by one, so the digest is that of the same model in memory. Where PEFT has put
    adapters into the model, which of them act and how much counts too.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        if tensor.device.type == "meta":
            with value_of(model, name) as brought:
                _feed(digest, brought)
        else:
            _feed(digest, tensor)
    digest.update(adapter_state(model).encode())
    return digest.hexdigest()


def _feed(digest: Any, tensor: Tensor) -> None:
    """The bytes as they lie there: a copy of a vocabulary's matrix would be the largest thing in the process."""
    for part in blocks_of(tensor) if is_sharded(tensor) else _parts(tensor.detach()):
        digest.update(part.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor itself, or what a quantised one that stands for it keeps: codes, steps, offsets."""
    kept: Any = tensor
    if not is_traceable_wrapper_subclass(kept):
        yield tensor
        return
    names, _ = kept.__tensor_flatten__()
    for name in names:
        yield from _parts(getattr(kept, name))


def family_of(model_type: str) -> Family:
    """The family that covers `model_type`. Raises `UnsupportedModel`, with the reason where it is known."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    if model_type in REFUSED:
        raise UnsupportedModel(f"model type {model_type!r} cannot be folded: {REFUSED[model_type]}")
    known = sorted(t for family in FAMILIES for t in family.model_types)
    raise UnsupportedModel(
        f"model type {model_type!r} has no anatomy here; supported are {', '.join(known)}. "
        "Add a record to contextfold/anatomy/families to support it; `contextfold inspect MODEL --discover` prints one"
    )


def resolve(model: nn.Module, family: Family | None = None) -> Bound:
    """Find the letters of `model`. Nothing is proven yet: `bind` does both.

    `family`: the record to use; None takes the one that covers the model's type.

    Raises `UnsupportedModel` when the model's type, state or modules are not what a family describes.
    """
    model = bare(model)
    check_state(model)
    config: Any = model.config
    chosen = family_of(config.model_type) if family is None else family
    text = config.get_text_config(decoder=True)
    try:
        layers = list(model.get_submodule(chosen.layers).children())
        idle = tuple(layer for layer in layers if chosen.idle in dict(layer.named_children()))
        blocks = tuple(
            bind_layer(chosen, index, layer, f"{chosen.layers}.{index}", text)
            for index, layer in enumerate(layers)
            if layer not in idle
        )
    except AttributeError as error:
        raise UnsupportedModel(
            f"{type(model).__name__} says it is {config.model_type!r}, but lacks what family {chosen.name!r} "
            f"describes: {error}"
        ) from error
    if not blocks:
        raise UnsupportedModel(f"{type(model).__name__} has no decoder layers, so there is nothing to fold into")
    _check_unshared(model, blocks)
    limit = getattr(text, "max_position_embeddings", None)
    return Bound(model, chosen, config.model_type, blocks, text.vocab_size, limit, idle)


def check_state(model: nn.Module) -> None:
    """Raises `InputError` or `UnsupportedModel` when `model` cannot be run and listened to as it is."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module with its weights, met {type(model).__name__}")
    name = type(model).__name__
    compiled = next((path for path, module in model.named_modules() if _is_compiled(module)), None)
    if compiled is not None:
        raise UnsupportedModel(
            f"{compiled or name} is compiled: compiled code does not run the hooks that a fold listens with; pass the "
            "model as it was before torch.compile"
        )
    if "config" not in vars(model) or not isinstance(getattr(model.config, "model_type", None), str):
        raise UnsupportedModel(f"{name} is not a transformers model: it has no config with a model_type")
    if model.training:
        raise UnsupportedModel(f"{name} is in training mode, where dropout makes runs differ; call model.eval()")
    dropping = next((n for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.training and m.p), None)
    if dropping is not None:
        raise UnsupportedModel(f"{dropping} is in training mode, where dropout makes runs differ; call model.eval()")
    _refuse_absent(model, [n for n, p in model.named_parameters() if p.device.type == "meta" and not _held(model, n)])
    _refuse_without_float64(model)
    check_sharded(model)
    packed = repacked(model)
    if packed is not None:
        raise UnsupportedModel(
            f"{packed} is a Linear4bit of bitsandbytes on a CPU where it packs its weights anew in its first forward "
            "and damages them when they are read; set support_avx512bf16_for_cpu = False on such modules before that, "
            "or quantise with another library"
        )


def _refuse_without_float64(model: nn.Module) -> None:
    device = next((p.device for p in model.parameters() if not has_float64(p.device)), None)
    if device is not None:
        raise UnsupportedModel(
            f"the model lies on {device}, which has no float64, and updates are solved in it; call model.to('cpu')"
        )


def check_in_memory(model: nn.Module) -> None:
    """Raises `UnsupportedModel` where weights are offloaded or shared out, for those who need them whole."""
    refuse_sharded(model, "discovery")
    _refuse_absent(model, [n for n, p in model.named_parameters() if p.device.type == "meta"])


def _held(model: nn.Module, name: str) -> bool:
    """Whether the owner of this parameter brings it for a call."""
    return is_offloaded(model.get_submodule(name.rpartition(".")[0]))


def _refuse_absent(model: nn.Module, names: Sequence[str]) -> None:
    if names:
        raise UnsupportedModel(
            f"{names[0]} has no data in the model (meta device): it was offloaded, or never loaded; load the model "
            "with all its weights in memory, without offloading"
        )


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)`, `module.compile()`, or a compiled `forward` put in place of its own."""
    forward = vars(module).get("forward")
    return (
        type(module).__module__.startswith("torch._dynamo")
        or module._compiled_call_impl is not None
        or "_torchdynamo_orig_callable" in getattr(forward, "__dict__", {})
    )


def _check_unshared(model: nn.Module, blocks: Sequence[Block]) -> None:
    """A parameter that two names share would be edited twice by one edit."""
    edited = {f"{site.module}.{site.parameter}" for block in blocks for site in block.sites}
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Offloaded weights and some quantised ones have no address of their own.
        pointer = held(parameter).data_ptr() or id(parameter)
        if pointer in owners and (name in edited or owners[pointer] in edited):
            raise UnsupportedModel(f"{name} shares its memory with {owners[pointer]}; editing one would edit both")
        owners.setdefault(pointer, name)
