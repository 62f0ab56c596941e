"""Models that other libraries have wrapped: adapters of PEFT around maps, hooks of accelerate around weights.

PEFT's classes are told by their names, so that nothing has to import it. accelerate is imported where a model carries
its hooks, which is where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.errors import UnsupportedModel

__all__ = [
    "Bringing",
    "adapter_state",
    "adapters",
    "bare",
    "bringing",
    "device_of",
    "execution_device",
    "in_memory",
    "inside",
    "is_adapted",
    "is_offloaded",
    "lent_state",
    "repacked",
    "value_of",
    "with_adapters",
]


def _is(module: object, *names: str) -> bool:
    """Whether `module` is of one of these classes of PEFT, or of one derived from them."""
    return any(kind.__name__ in names and kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def bare(model: Any) -> Any:
    """The transformers model inside a `PeftModel`, with the adapters in its modules; anything else as it is.

    Raises `UnsupportedModel` for an adapter that acts in the call of the `PeftModel` and not in modules: the model
    inside would run without it.
    """
    if not _is(model, "PeftModel"):
        return model
    for name in model.active_adapters:
        settings = vars(model.peft_config[name])
        kind = str(getattr(settings["peft_type"], "value", settings["peft_type"]))
        if model.peft_config[name].is_prompt_learning or kind == "XLORA" or settings.get("alora_invocation_tokens"):
            raise UnsupportedModel(
                f"adapter {name!r} is of type {kind} and acts in the call of the {type(model).__name__}, not in the "
                "model's maps; supported are adapters that PEFT puts into linear layers, such as LoRA"
            )
    return model.get_base_model()


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put this module in the place of another one."""
    return _is(module, "BaseTunerLayer", "AuxiliaryTrainingWrapper")


def adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every module that PEFT has put in the place of another one, with its name."""
    return ((name, module) for name, module in model.named_modules() if is_adapted(module))


def adapter_state(model: nn.Module) -> str:
    """Which adapters act and how much, which no weight tells; empty without adapters."""
    parts = []
    for name, module in adapters(model):
        scaling = sorted(vars(module).get("scaling", {}).items())
        active = "" if module.disable_adapters else ",".join(module.active_adapters)
        parts.append(f"{name}|{active}|{','.join(module.merged_adapters)}|{scaling}")
    return "\n".join(parts)


def inside(module: Any) -> tuple[str, nn.Module]:
    """The module whose parameters an edit belongs to, and its dotted name inside `module`; ("", module) if it is that.

    A LoRA layer gives `base(x) + s B A x`, so an edit of its base layer's weight adds up with the adapter. Other
    adapters (DoRA, IA3) act on the weight or on what it gives; their own module stays, and edits act beside it.
    """
    if _is(module, "ModulesToSaveWrapper"):
        active = [] if module.disable_adapters else module.active_adapters
        name = f"modules_to_save.{active[0]}" if active else "original_module"
        return name, module.get_submodule(name)
    plain = _is(module, "LoraLayer") and type(module).__name__ == "Linear"
    if plain and not any(name in module.lora_variant for name in module.active_adapters):
        return "base_layer", module.base_layer
    return "", module


def with_adapters(module: Any, stored: Tensor) -> Tensor:
    """`W + s B A` in the storage order of `stored`, its base layer's weight, in float32 or wider."""
    whole = stored.to(torch.promote_types(stored.dtype, torch.float32))
    if module.disable_adapters or module.merged:
        return whole
    for name in module.active_adapters:
        if name in module.lora_A:
            whole = whole + module.get_delta_weight(name).to(whole)
    return whole


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps this module's weights elsewhere and brings them for the time of a call."""
    hook = vars(module).get("_hf_hook")
    return hook is not None and vars(hook).get("offload") is True


def repacked(model: nn.Module) -> str | None:
    """Name of a map whose weights change when they are read, if there is one.

    bitsandbytes repacks 4-bit weights in a forward where the CPU has AVX512-BF16, and unpacks them to be saved; its
    steps per block do not come back from that in their order (0.50.2).
    """
    names: Iterator[str] = (name for name, module in model.named_modules() if _repacks(module))
    return next(names, None)


def _repacks(module: nn.Module) -> bool:
    if type(module).__name__ != "Linear4bit" or not type(module).__module__.startswith("bitsandbytes."):
        return False
    weight: Any = module.get_parameter("weight")
    done = vars(weight.quant_state).get("packing_format_for_cpu", False)
    return weight.device.type == "cpu" and bool(done or vars(module).get("support_avx512bf16_for_cpu", False))


def execution_device(module: nn.Module) -> torch.device:
    """Where an offloaded module computes."""
    hook: Any = vars(module)["_hf_hook"]
    return torch.device(hook.execution_device)


def device_of(model: nn.Module) -> torch.device:
    """Where its first weight lies; offloaded ones lie nowhere, and their hooks move what they read."""
    found = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(found, torch.device("cpu"))


Change = Callable[[Tensor], Tensor]
"""Of a stored value, what is to be brought in its place."""


class Bringing(Mapping[str, Tensor]):
    """What a hook of accelerate brings, one parameter of it changed on the way for as long as there is a `change`."""

    def __init__(self, stored: Mapping[str, Tensor], name: str) -> None:
        self.stored, self.name = stored, name
        self.change: Change | None = None

    def __getitem__(self, name: str) -> Tensor:
        value = self.stored[name]
        return value if self.change is None or name != self.name else self.change(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


@contextmanager
def bringing(module: nn.Module, name: str) -> Iterator[Bringing]:
    """What brings the weights of an offloaded module, so that a change of its parameter `name` can be given to it.

    What lies on the disk, or in the memory of another device, stays as it is.
    """
    hook: Any = vars(module)["_hf_hook"]
    stored = hook.weights_map
    hook.weights_map = Bringing(stored, name)
    try:
        yield hook.weights_map
    finally:
        hook.weights_map = stored


def lent_state(model: nn.Module) -> str:
    """Which offloaded weights are brought otherwise than they are stored; empty where none is."""
    parts = []
    for name, module in model.named_modules():
        brought = vars(module)["_hf_hook"].weights_map if is_offloaded(module) else None
        while isinstance(brought, Bringing):
            parts += [] if brought.change is None else [f"{name}|{brought.name}|{id(brought.change)}"]
            brought = brought.stored
    return "\n".join(parts)


@contextmanager
def in_memory(module: nn.Module) -> Iterator[None]:
    """An offloaded module with its weights, as its own hook brings them for a call; others as they are."""
    if not is_offloaded(module):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield


@contextmanager
def value_of(model: nn.Module, name: str) -> Iterator[Tensor]:
    """A parameter or buffer by its dotted name, brought for as long as the `with` lasts where it is offloaded."""
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    with in_memory(module):
        yield getattr(module, own)
