"""The command line: parse, call a door, print. No logic. One file per command.

Exit codes: 0 proven or done, 1 not proven, 2 bad input or no room (one line, nothing written), 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.markup import escape

from contextfold import __version__, processes
from contextfold.cli.ablate import ablate
from contextfold.cli.bake import bake
from contextfold.cli.common import err, out
from contextfold.cli.demo import demo
from contextfold.cli.dynamics import dynamics
from contextfold.cli.explain import explain
from contextfold.cli.export import export
from contextfold.cli.fold import fold
from contextfold.cli.generate import generate
from contextfold.cli.inspect import inspect
from contextfold.cli.report import report
from contextfold.cli.reproduce import reproduce
from contextfold.cli.sweep import sweep
from contextfold.cli.verify import verify
from contextfold.errors import ContextfoldError, InputError

__all__ = ["COMMANDS", "app", "main"]

INTERRUPTED = 130

NO_MEMORY = ("allocate memory", "failed to map segment", "can't start new thread", "bad_alloc")
"""How torch, the system's loader, Python and C++ say that memory is short, each with an error of another kind."""

MARGIN = 2**26
"""Bytes that can be had at once unless memory is short."""

COMMANDS = (inspect, explain, fold, verify, generate, dynamics, ablate, bake, sweep, export, report, reproduce, demo)
"""Every command, in the order of the help."""

app = typer.Typer(
    help="Fold a text context into the weights of a language model, exactly and in closed form, and prove it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in COMMANDS:
    app.command()(command)


SHARED = ("inspect", "fold", "verify", "bake", "generate")
"""Commands that several processes can run together, each with a part of the model."""


def _version(asked: bool) -> None:
    if asked:
        out.print(f"contextfold {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Fold a text context into the weights of a language model, exactly and in closed form, and prove it."""
    if processes.count() > 1 and context.invoked_subcommand not in SHARED:
        raise InputError(
            f"{processes.count()} processes were started, and {context.invoked_subcommand} runs in one; several can "
            f"share the model of {', '.join(SHARED)}"
        )
    if processes.rank():
        out.quiet = err.quiet = True


def main() -> None:
    """Entry point: errors are one line, exit code 2, no traceback unless --debug."""
    debug = "--debug" in sys.argv[1:]
    try:
        app()
    except ContextfoldError as error:
        if debug:
            raise
        _fail(str(error))
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer ends so, without a word, when it is interrupted
            err.print("interrupted; the model and all files are as they were", highlight=False)
        elif processes.count() > 1 and end.code != 2:
            processes.leave()
        raise
    except Exception as error:
        if debug or not _short_of_memory(error):
            raise
        _fail("there is not enough memory; close other programs, or give a smaller model, a shorter text or less to do")


def _fail(words: str) -> None:
    err.quiet = False
    who = f" on process {processes.rank()}" if processes.count() > 1 else ""
    err.print(f"[red]error{who}:[/] {escape(words)}", highlight=False, soft_wrap=True)
    raise SystemExit(2) from None


def _short_of_memory(error: BaseException) -> bool:
    """Whether it came of that. Where memory ends, libraries raise anything: what can be had now tells, too."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError) or any(sign in str(found) for sign in NO_MEMORY):
            return True
        found = found.__cause__ or found.__context__
    try:
        bytearray(MARGIN)
    except MemoryError:
        return True
    return False
