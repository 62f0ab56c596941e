"""A model as somebody else left it, looked at before transformers reads it.

transformers follows what a folder says: it opens whatever lies under a name that it looks for, imports the modules that
an adapter names, fetches the kernel that a configuration names, lays out as many layers as are asked for, and fills
what no file holds with random numbers before it says so. What is refused here costs a look at names and sizes.
"""

from __future__ import annotations

import json
import stat
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn

from contextfold.errors import InputError, one_line
from contextfold.files import read_regular

__all__ = [
    "ATTENTIONS",
    "UNREADABLE",
    "check_configuration",
    "check_folder",
    "check_size",
    "laid_out",
    "reason",
    "refuse_adapter",
]

UNREADABLE = (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError,
              RuntimeError, ImportError, struct.error, SafetensorError, StrictDataclassError)  # fmt: skip
"""What transformers, gguf and safetensors were seen to raise on files that they cannot read, and on configurations that
say something else than what they believe: they check little of what they are told.

Anything else is a bug of ours or of theirs and keeps its traceback.
"""

ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2")
"""The attention back ends that may be asked for by name; none of them is fetched from the hub."""

ATTENTION = "attn_implementation"

LARGEST = 2**28
"""Bytes of a configuration, a tokenizer or a template: ten times the largest vocabulary."""

READ_WHOLE = (".json", ".jinja", ".txt", ".model")
"""Endings of what is read as a whole. Weights are mapped: their size is that of the model."""

COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "num_encoder_layers",
          "num_nextn_predict_layers", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts",
          "moe_num_experts")  # fmt: skip
"""What a configuration counts, and transformers builds one by one."""

MOST = 2000
"""Of each of them; models have some hundreds."""

LARGER = 4
"""Times as many numbers as the files hold may be laid out: a tied matrix stands in them once, or not at all."""

LEVELS = 8
"""Configurations in configurations."""


def check_folder(path: Path) -> None:
    """A folder with a `config.json`.

    Raises `InputError` for what lies in it and is neither a file nor a folder, for texts that no model has, for an
    adapter, and as `check_configuration`.
    """
    try:
        for each in sorted(path.iterdir()):
            about = each.stat()  # of what a link leads to: the cache of the hub is made of links
            if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
                raise InputError(f"{_shown(each)} is neither a file nor a folder; take it away, or give another model")
            if each.suffix in READ_WHOLE and about.st_size > LARGEST:
                raise InputError(
                    f"{_shown(each)} has {about.st_size} bytes, and what is read as a whole has {LARGEST} at most; "
                    "give a complete folder written by save_pretrained"
                )
    except OSError as error:
        raise InputError(f"the folder {path} cannot be read ({one_line(error)}); check what lies in it") from error
    if (path / "adapter_config.json").exists():
        refuse_adapter(str(path))
    try:
        found = json.loads(read_regular(path / "config.json", LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path / 'config.json'} is no JSON ({one_line(error)}); give a complete folder") from error
    check_configuration(found, str(path))


def refuse_adapter(name: str) -> None:
    """Raises `InputError`, always: a model that comes with a PEFT adapter would be loaded with it, modules and all."""
    raise InputError(
        f"the model '{name}' holds a PEFT adapter (adapter_config.json), which loading would put into it unseen; give "
        "the model without it, or merge the adapter (merge_and_unload) and give what save_pretrained writes"
    )


def reason(error: Exception) -> str:
    """Why transformers cannot read it, in one line. Its own advice, `trust_remote_code=True`, is none here."""
    if "trust_remote_code" in str(error):
        return "it needs code that comes with it, and no such code is run here: there is no option for that"
    return one_line(error)


def check_configuration(found: Any, name: str) -> None:
    """A configuration as plain data. Raises `InputError` where it names an attention back end that would be fetched, or
    counts more layers or experts than any model has."""
    for key, value in _settings(found, LEVELS):
        if key == ATTENTION:
            named = value.values() if isinstance(value, dict) else (value,)
            other = next((each for each in named if each is not None and each not in ATTENTIONS), None)
            if other is not None:
                raise InputError(
                    f"the configuration of '{name}' asks for the attention {one_line(repr(other))}, which may be code "
                    f"from elsewhere; supported are {', '.join(ATTENTIONS)}: change {ATTENTION} in its config.json"
                )
        if key in COUNTS and isinstance(value, int | float) and not abs(value) <= MOST:
            raise InputError(
                f"the configuration of '{name}' has {key} of {one_line(value, 40)}, and {MOST} is the most that is "
                "built; give a complete folder written by save_pretrained"
            )


def check_size(path: Path) -> None:
    """Refuse a configuration that lays out more than the weights of its folder hold.

    Quantised weights are packed, and not counted. Raises `InputError`, and what `UNREADABLE` lists.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    files = sorted(path.glob("*.safetensors"))
    if not files or getattr(config, "quantization_config", None) is not None:
        return
    held = 0
    for each in files:
        with safe_open(each, framework="pt") as file:
            held += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (no mapping)
    laid = sum(parameter.numel() for parameter in laid_out(config).parameters())
    if laid > LARGER * held:
        raise InputError(
            f"the configuration of '{path}' lays out {laid} numbers, and its weights hold {held}; give a complete "
            "folder written by save_pretrained"
        )


def laid_out(config: Any, **options: Any) -> nn.Module:
    """The causal language model of a configuration, on the meta device: shapes without weights.

    Raises what `UNREADABLE` lists.
    """
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = factory.from_config(config, trust_remote_code=False, **options)
    return model


def _settings(found: Any, levels: int) -> Iterator[tuple[str, Any]]:
    if isinstance(found, dict) and levels:
        for key, value in found.items():
            yield key, value
            yield from _settings(value, levels - 1)


def _shown(path: Path) -> str:
    return one_line(repr(path.name)) + f" in {path.parent}"
