"""`contextfold export`: a patch as something that other programs load, proven by loading it."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from contextfold.cli.common import (
    Dtype,
    DtypeOption,
    JsonOption,
    MaxMemoryOption,
    Model,
    bind_model,
    load_model,
    out,
    waiting,
)
from contextfold.cli.common import show_or_json as show
from contextfold.errors import InputError


class Target(StrEnum):
    """The targets of `contextfold.export.EXPORTERS`, listed here so that the help costs no import."""

    peft = "peft"
    checkpoint = "checkpoint"
    gguf = "gguf"


def export(
    model: Model,
    patch: Annotated[Path, typer.Argument(help="A patch file that was made on this model.")],
    to: Annotated[Target, typer.Option(help="What the folder is for.")],
    out_folder: Annotated[Path, typer.Option("--out", help="The folder to write; an earlier export is replaced.")],
    lora_only: Annotated[
        bool, typer.Option("--lora-only", help="peft: LoRA pairs and nothing else, as servers want; or refuse.")
    ] = False,
    uniform_rank: Annotated[
        str | None, typer.Option(help="peft: one rank for all pairs: auto, or one that vLLM allows.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
    max_memory: MaxMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a patch for PEFT, as a checkpoint or for llama.cpp; load it back, and keep it only if it is proven."""
    from contextfold import patchfile
    from contextfold.export import Source
    from contextfold.export import export as export_patch
    from contextfold.export.folder import check_target
    from contextfold.exportview import export_view

    exporter = _exporter(to, lora_only, uniform_rank)
    check_target(out_folder)
    stored = patchfile.load(patch)
    loaded = load_model(model, dtype, max_memory)
    bound = bind_model(loaded)
    source = Source(
        bound, stored, name=model, save_tokenizer=loaded.tokenizer.save_pretrained, command=_command(sys.argv)
    )
    with waiting("writing, loading back, comparing"):
        proof = export_patch(source, exporter, out_folder)
    written = str(out_folder) if proof.proven else None
    show(as_json, {"model": model, **proof.to_json(), "folder": written}, lambda: export_view(proof), loaded)
    if not as_json:
        out.print(f"Wrote {written}." if written else "Not proven, so nothing was written.")
    raise typer.Exit(0 if proof.proven else 1)


def _exporter(to: Target, lora_only: bool, uniform_rank: str | None) -> Any:
    from contextfold.export import EXPORTERS, PeftFolder

    if to is Target.peft:
        return PeftFolder(lora_only, _rank(uniform_rank))
    if lora_only or uniform_rank is not None:
        raise InputError(f"--lora-only and --uniform-rank are for --to peft, not for {to.value}")
    return next(kind for kind in EXPORTERS if kind.name == to.value)()


def _rank(text: str | None) -> int | Literal["auto"] | None:
    if text is None or text == "auto":
        return "auto" if text == "auto" else None
    if not text.isascii() or not text.isdigit():
        raise InputError(f"--uniform-rank {text!r} is neither auto nor a number")
    return int(text)


def _command(arguments: list[str]) -> str:
    return shlex.join(["contextfold", *arguments[1:]])
