"""What every command shares: options, the two consoles, loading, and the one-line errors' side conditions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from contextfold.errors import ContextfoldError, InputError, NotWritten
from contextfold.files import plain

out = Console()
err = Console(stderr=True)


class Dtype(StrEnum):
    """Dtypes that a model can be loaded in."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[str, typer.Argument(help="A folder, a hub id, a .gguf file, or smollm2 | gemma3-270m.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype to load and run the model in.")]
MaxMemoryOption = Annotated[
    str | None,
    typer.Option(help="Most memory the process may take, like 8GiB or 500MB; weights beyond it stay in their files."),
]
RuleOption = Annotated[str, typer.Option(help="Post-norm rule: balanced, floored, theorem, appendix, scalar, flat.")]
FallbackOption = Annotated[
    str | None, typer.Option(help="Rule for layers where --rule is undefined; refused without it.")
]
ContextOption = Annotated[str, typer.Option(help="Text to fold into the weights, or @file.")]
QueryOption = Annotated[str, typer.Option(help="Text that follows it, or @file.")]
KeepOption = Annotated[
    str, typer.Option(help="Context tokens that stay: sink (the first), none, or spans like 0:1,5:9.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def load_model(name: str, dtype: Dtype, max_memory: str | None = None) -> Any:
    import torch

    from contextfold import models, processes
    from contextfold.ceiling import read_size

    ceiling = None if max_memory is None else read_size(max_memory)
    with waiting(f"loading {name}"):
        loaded = models.load(name, dtype=getattr(torch, dtype.value), max_memory=ceiling, shared=processes.count() > 1)
    if loaded.notice:
        err.print(f"[dim]{escape(loaded.notice)}[/]")
    return loaded


def bind_model(loaded: Any) -> Any:
    from contextfold.anatomy import bind

    with waiting("proving the anatomy"):
        return bind(loaded.model)


def read_prompt(tokenizer: Any, context: str, query: str, keep: str) -> Any:
    from contextfold import prompts
    from contextfold.verify import Prompt

    ids = prompts.encode(tokenizer, prompts.read_argument(context), prompts.read_argument(query))
    return Prompt(ids.context, ids.query, read_spans(keep, ids.context.numel()))


def as_read(context: str, query: str) -> dict[str, str]:
    """The two texts, as they stand in the JSON of a command."""
    from contextfold import prompts

    return {"context": prompts.read_argument(context), "query": prompts.read_argument(query)}


def protocol(prompt: Any, folded: str = "One token folded") -> str:
    kept = sum(stop - start for start, stop in prompt.keep)
    return (
        f"{folded}; the patched model saw {kept} of {prompt.context.numel()} context tokens and the "
        f"{prompt.query.numel()} of the query."
    )


def other_context(loaded: Any) -> Any:
    from contextfold import prompts, suites

    return prompts.encode_text(loaded.tokenizer, suites.OTHER_CONTEXT)


def read_spans(keep: str, length: int | None) -> tuple[tuple[int, int], ...]:
    from contextfold import prompts
    from contextfold.fold import SINK

    if keep == "none":
        return ()
    return tuple(SINK) if keep == "sink" else prompts.parse_spans(keep, sys.maxsize if length is None else length)


def check_writable(path: Path | None, option: str = "--out") -> None:
    """Before minutes of work, not after."""
    if path is None:
        return
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise InputError(f"cannot write {path}: its folder does not exist, or it is a folder; choose another {option}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write to {path.parent}: permission denied; choose another {option}")


def check_page(path: Path | None, option: str) -> None:
    """Whether a report can be made and written there, before the work."""
    from contextfold.report import check_extra

    if path is None:
        return
    check_writable(path, option)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{option} {path} would hold HTML; give it a name that ends in .html")
    check_extra()


@contextmanager
def working(path: Path | None) -> Iterator[Path | None]:
    """A folder beside the patch that is to be written at `path`, for what is solved until it stands.

    It is gone when the work is done or refused, and stays when it was stopped, by a full disk too: the same command
    then goes on. Several processes have none, since they might not find the same places solved.
    """
    from contextfold import processes
    from contextfold.store import clear

    folder = None if path is None or processes.count() > 1 else path.with_name(f".{path.name}.work")
    try:
        yield folder
    except ContextfoldError as error:
        if folder is not None and not isinstance(error, NotWritten):
            clear(folder)
        raise
    if folder is not None:
        clear(folder)


def written_patch(patch: Any, path: Path | None, proven: bool) -> Path | None:
    """Where the patch was written, if it is proven: by the first process, since all have the same."""
    from contextfold import patchfile, processes

    if path is None or not proven:
        return None
    return path if processes.rank() else patchfile.save(patch, path)


SPELLED = ("token", "in_context", "unpatched", "patched", "answer", "without", "chosen", "question")
"""Keys under which a row holds a token id, or several."""


def spelled(rows: list[dict[str, Any]], decode: Callable[[Any], str]) -> list[dict[str, Any]]:
    """The rows with their tokens in letters besides, under `texts`."""

    def text(found: Any) -> str | None:
        return None if found is None else decode(found if isinstance(found, list) else [found])

    return [{**row, "texts": {key: text(row[key]) for key in SPELLED if key in row}} for row in rows]


def show_or_json(as_json: bool, payload: Any, view: Callable[[], Any], loaded: Any = None) -> None:
    """`loaded`: a model that was asked for with a ceiling on memory, or could have been: the peak is told besides."""
    if as_json and out.quiet:  # of several processes, one speaks
        return
    if as_json:
        told = payload if loaded is None else {**payload, **_memory(loaded)}
        sys.stdout.write(json.dumps(plain(told), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        return
    out.print(view())  # all of them look, since what is looked at may be shared
    if loaded is not None and loaded.placement is not None:
        out.print(_memory_line(loaded.placement), highlight=False)


def _memory(loaded: Any) -> dict[str, Any]:
    from contextfold.ceiling import peak_memory

    placement = loaded.placement
    return {
        "peak_bytes": peak_memory(),
        "max_memory": None if placement is None else placement.ceiling,
        "resident_bytes": None if placement is None else placement.resident,
        "streamed_bytes": None if placement is None else placement.streamed,
    }


def _memory_line(placement: Any) -> str:
    from contextfold.ceiling import peak_memory, size_text

    peak = peak_memory() or 0
    kept = "within" if peak <= placement.ceiling else "above"
    return (
        f"Peak memory {size_text(peak)}, {kept} the ceiling of {size_text(placement.ceiling)}; "
        f"{size_text(placement.resident)} of weights stayed in memory, {size_text(placement.streamed)} in their files."
    )


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr, where there is somebody to see it."""
    if not err.is_terminal:
        yield
        return
    with err.status(f"{what} …"):
        yield


@contextmanager
def steps(what: str, total: int) -> Iterator[Callable[[Any], None]]:
    """A progress bar on stderr, one step per folded token, or per layer."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda step: progress.advance(task)
