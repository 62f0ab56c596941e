"""The processes that `torchrun` started together, told by the variables that it sets in each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from contextfold.errors import InputError

__all__ = ["count", "leave", "plan", "rank"]


def count() -> int:
    """How many there are; 1 for a process of its own."""
    return int(os.environ.get("WORLD_SIZE", "1")) if {"RANK", "LOCAL_RANK"} <= os.environ.keys() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ["RANK"]) if count() > 1 else 0


def plan(name: str, source: str, **options: Any) -> Any:
    """How transformers is to share out the model in `source` over them: by the tensor-parallel plan of its type.

    Raises `InputError` where there are no processes, no plan, or more of them than heads can be dealt out to, and what
    `AutoConfig.from_pretrained` raises.
    """
    from transformers import AutoConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    if count() == 1:
        raise InputError(f"there is one process, and '{name}' was to be shared out over several; start it by torchrun")
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options).get_text_config(decoder=True)
    styles: Mapping[str, str] = config.base_model_tp_plan or {}
    if not styles:
        raise InputError(
            f"transformers has no tensor-parallel plan for the type {config.model_type!r} of '{name}'; run it in one "
            "process"
        )
    dealt = any(style == "colwise" and "attn" in key for key, style in styles.items())
    heads = [vars(config).get(word) for word in ("num_attention_heads", "num_key_value_heads")]
    if dealt and any(isinstance(number, int) and number % count() for number in heads):
        raise InputError(
            f"{count()} processes cannot share the {heads[0]} attention heads of '{name}', or its {heads[1]} of keys "
            "and values, evenly; take a number that divides both"
        )
    return DistributedConfig(tp_plan="auto")


def leave() -> None:
    """Say goodbye to the others, when all of them have come to the end."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
