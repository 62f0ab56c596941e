"""The command line: parse, call a door, print. No logic. One file per command.

Exit codes: 0 proven or done, 1 not proven, 2 bad input (one line, nothing written).
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


SHARED = ("inspect", "fold", "verify", "bake")
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
        err.quiet = False
        who = f" on process {processes.rank()}" if processes.count() > 1 else ""
        err.print(f"[red]error{who}:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer ends so, without a word, when it is interrupted
            err.print("interrupted; the model and all files are as they were", highlight=False)
        elif processes.count() > 1 and end.code != 2:
            processes.leave()
        raise
