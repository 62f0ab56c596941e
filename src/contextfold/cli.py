"""The command line: parse, call a door, print. No logic.

Exit codes: 0 proven or done, 1 not proven, 2 bad input (one line, nothing written).
"""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from contextfold.errors import ContextfoldError, InputError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Fold a text context into the weights of a language model, exactly and in closed form, and prove it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
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


@app.callback()
def root(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Fold a text context into the weights of a language model, exactly and in closed form, and prove it."""


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="A model, or a patch file.")],
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
) -> None:
    """Show where the letters live in a model, proven on every block; or what a patch file holds."""
    from contextfold import inspection, patchfile, show

    path = Path(target)
    if path.suffix == ".safetensors":
        patch = patchfile.load(path)
        _print(as_json, inspection.patch_json(patch), lambda: show.patch_table(patch))
        return
    bound = _bind(_load(target, dtype))
    _print(as_json, inspection.anatomy_json(bound), lambda: show.anatomy_table(bound))


@app.command()
def fold(
    model: Model,
    context: ContextOption,
    query: QueryOption,
    out_file: Annotated[Path | None, typer.Option("--out", help="Where to write the patch.")] = None,
    keep: KeepOption = "sink",
    rule: RuleOption = "balanced",
    fallback: FallbackOption = None,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
) -> None:
    """Fold a context for the last token of a query, prove the patch, and write it when proven."""
    from contextfold import patchfile, show
    from contextfold.verify import Settings, fold_and_prove

    _check_writable(out_file)
    loaded = _load(model, dtype)
    prompt = _prompt(loaded.tokenizer, context, query, keep)
    with _waiting("folding and proving"):
        settings = Settings(rule, fallback, _other(loaded), model, _protocol(prompt))
        patch, verdict = fold_and_prove(_bind(loaded), prompt, settings)
    written = patchfile.save(patch, out_file) if out_file is not None and verdict.proven else None
    payload = {**verdict.to_json(), "patch": None if written is None else str(written)}
    _print(as_json, payload, lambda: show.verdict_view(verdict))
    if not as_json and out_file is not None:
        out.print(f"Wrote {written} ({patch.nbytes} bytes)." if written else "Not proven, so nothing was written.")
    raise typer.Exit(0 if verdict.proven else 1)


@app.command()
def verify(
    model: Annotated[str | None, typer.Argument(help="As for fold; or use --model.")] = None,
    model_option: Annotated[str | None, typer.Option("--model", help="The model, where no argument names it.")] = None,
    patch: Annotated[Path | None, typer.Option(help="A patch file to put to the test.")] = None,
    suite: Annotated[str | None, typer.Option(help="paper: five prompts × 20 tokens, each folded afresh.")] = None,
    context: Annotated[str | None, typer.Option(help="Context of the patch: text or @file.")] = None,
    query: Annotated[str | None, typer.Option(help="Query of the patch: text or @file.")] = None,
    keep: Annotated[str | None, typer.Option(help="As for fold; the suite keeps none, a patch the sink.")] = None,
    rule: RuleOption = "balanced",
    fallback: FallbackOption = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per prompt of the suite.")] = None,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
) -> None:
    """Put a patch file, or the rule itself over a suite of prompts, to the test."""
    from contextfold import show

    name = model or model_option
    if name is None:
        raise InputError("name a model: contextfold verify MODEL …")
    if (suite is None) == (patch is None):
        raise InputError("give either --patch FILE with --context and --query, or --suite paper")
    if suite is not None:
        verdict = _suite(name, suite, keep, tokens, rule, fallback, dtype)
    else:
        assert patch is not None
        verdict = _stored(name, patch, context, query, keep or "sink", dtype)
    _print(as_json, verdict.to_json(), lambda: show.verdict_view(verdict))
    raise typer.Exit(0 if verdict.proven else 1)


def _suite(
    name: str, suite: str, keep: str | None, tokens: int | None, rule: str, fallback: str | None, dtype: Dtype
) -> Any:
    from contextfold import prompts, suites
    from contextfold.verify import Prompt, Settings, verify_prompts

    if suite != "paper":
        raise InputError(f"suite {suite!r} is unknown; there is one: paper")
    loaded = _load(name, dtype)
    count = suites.PAPER_TOKENS if tokens is None else tokens
    spans = _spans(keep or "none", None)
    items = [Prompt(prompts.encode_text(loaded.tokenizer, text), keep=spans) for text in suites.PAPER]
    seen = "only the current token" if not spans else "the kept spans and the current token"
    protocol = f"{len(items)} prompts × {count} tokens, each folded afresh; the patched model saw {seen}."
    with _steps("folding", len(items) * count) as progress:
        settings = Settings(rule, fallback, None, name, protocol)
        return verify_prompts(_bind(loaded), items, tokens=count, settings=settings, progress=progress)


def _stored(name: str, path: Path, context: str | None, query: str | None, keep: str, dtype: Dtype) -> Any:
    from contextfold import patchfile
    from contextfold.verify import Settings, verify_patch

    if context is None or query is None:
        raise InputError("a patch is exact for one context and query: give both with --context and --query")
    stored = patchfile.load(path)
    loaded = _load(name, dtype)
    prompt = _prompt(loaded.tokenizer, context, query, keep)
    with _waiting("proving"):
        settings = Settings(other=_other(loaded), name=name, protocol=_protocol(prompt))
        return verify_patch(_bind(loaded), stored, prompt, settings)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="smollm2, gemma3-270m, or any other model.")] = "smollm2",
    tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 12,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
) -> None:
    """A real model, a real context, weights written, and a table that proves it."""
    from contextfold import show, suites
    from contextfold.fold import SINK, split
    from contextfold.verify import Settings, continuation, verify_prompts

    loaded = _load(model, dtype)
    prompt = _prompt(loaded.tokenizer, suites.DEMO.context, suites.DEMO.query, "sink")
    bound = _bind(loaded)
    assert prompt.query is not None
    if not as_json:
        out.print(f"[bold]Context[/] ({prompt.context.numel()} tokens): {suites.DEMO.context.strip()}")
        out.print(f"[bold]Query[/] ({prompt.query.numel()} tokens): {suites.DEMO.query}\n")
    reduced = split(bound, prompt.context, prompt.query, SINK, "absolute").reduced
    protocol = (
        "Every token of the answer is folded afresh; the patched model saw the sink, the query and the answer so "
        "far, not the context."
    )
    with _steps("folding", tokens) as progress:
        settings = Settings(other=_other(loaded), name=model, protocol=protocol)
        verdict = verify_prompts(bound, [prompt], tokens=tokens, settings=settings, progress=progress)
    without = continuation(bound, reduced, tokens).tolist()
    decode: Callable[[Any], str] = loaded.tokenizer.decode
    payload = verdict.to_json()
    if not as_json:
        out.print(show.token_table(verdict.steps[0], decode))
        out.print(show.continuation_panel(verdict, without, decode))
    _print(as_json, payload, lambda: show.verdict_view(verdict))
    raise typer.Exit(0 if verdict.proven else 1)


def _load(name: str, dtype: Dtype) -> Any:
    import torch

    from contextfold import models

    with _waiting(f"loading {name}"):
        loaded = models.load(name, dtype=getattr(torch, dtype.value))
    if loaded.notice:
        err.print(f"[dim]{loaded.notice}[/]")
    return loaded


def _bind(loaded: Any) -> Any:
    from contextfold.anatomy import bind

    with _waiting("proving the anatomy"):
        return bind(loaded.model)


def _prompt(tokenizer: Any, context: str, query: str, keep: str) -> Any:
    from contextfold import prompts
    from contextfold.verify import Prompt

    ids = prompts.encode(tokenizer, prompts.read_argument(context), prompts.read_argument(query))
    return Prompt(ids.context, ids.query, _spans(keep, ids.context.numel()))


def _protocol(prompt: Any) -> str:
    kept = sum(stop - start for start, stop in prompt.keep)
    return (
        f"One token folded; the patched model saw {kept} of {prompt.context.numel()} context tokens and the "
        f"{prompt.query.numel()} of the query."
    )


def _other(loaded: Any) -> Any:
    from contextfold import prompts, suites

    return prompts.encode_text(loaded.tokenizer, suites.OTHER_CONTEXT)


def _spans(keep: str, length: int | None) -> tuple[tuple[int, int], ...]:
    from contextfold import prompts
    from contextfold.fold import SINK

    if keep == "none":
        return ()
    return tuple(SINK) if keep == "sink" else prompts.parse_spans(keep, sys.maxsize if length is None else length)


def _check_writable(path: Path | None) -> None:
    """Before minutes of work, not after."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"cannot write {path}: its folder does not exist, or it is a folder; choose another --out")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write to {path.parent}: permission denied; choose another --out")


def _print(as_json: bool, payload: Any, view: Callable[[], Any]) -> None:
    if as_json:
        sys.stdout.write(json.dumps(payload, indent=2, ensure_ascii=False) + "\n")
    else:
        out.print(view())


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """A spinner on stderr, where there is somebody to see it."""
    with err.status(f"{what} …"):
        yield


@contextmanager
def _steps(what: str, total: int) -> Iterator[Callable[[Any], None]]:
    """A progress bar on stderr, one step per folded token."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda step: progress.advance(task)


def main() -> None:
    """Entry point: errors are one line, exit code 2, no traceback unless --debug."""
    debug = "--debug" in sys.argv[1:]
    try:
        app()
    except ContextfoldError as error:
        if debug:
            raise
        err.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        err.print("interrupted; the model and all files are as they were", highlight=False)
        raise SystemExit(130) from None
