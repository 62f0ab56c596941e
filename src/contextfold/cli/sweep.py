"""`contextfold sweep`: many bakes and folds from one file, their figures in one table."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from contextfold.cli.common import JsonOption, check_writable, err, out, show_or_json, steps
from contextfold.errors import InputError


def sweep(
    jobs: Annotated[Path, typer.Argument(help="A YAML file of models, contexts, estimators and seeds.")],
    out_file: Annotated[Path, typer.Option("--out", help="A Parquet file for the results, a row per job.")],
    work: Annotated[
        Path | None, typer.Option(help="Folder for finished jobs, where the sweep goes on. Without: beside --out.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, or local. Without: all in this process.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers on Ray. Without: one per processor.")] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Run nothing; write the results of what is done.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the jobs of a file that are not done yet, and write a table of all results."""
    from contextfold.sweep import check_parquet, read_jobs, write_parquet
    from contextfold.sweep import sweep as run
    from contextfold.sweep.view import outcome_view

    check_parquet()
    check_writable(out_file)
    if workers is not None and (ray is None or workers < 1):
        raise InputError(f"--workers {workers} is for --ray, and at least 1; without it all jobs run in this process")
    asked = read_jobs(jobs)
    folder = work or out_file.with_name(f"{out_file.name}.work")
    with steps("jobs", len(asked)) as advance:

        def done(count: int) -> None:
            for _ in range(count):
                advance(None)

        # Ray says on stdout that a worker died, where the JSON is to stand alone.
        with redirect_stdout(sys.stderr):
            outcome = run(asked, folder, address=ray, workers=workers, collect=collect, progress=done)
    write_parquet(out_file, outcome.rows)
    for notice in _notices({job.model for job in asked}):
        err.print(notice, style="dim", highlight=False, markup=False)
    payload = {**outcome.to_json(), "out": str(out_file), "work": str(folder)}
    show_or_json(as_json, payload, lambda: outcome_view(outcome))
    if not as_json:
        out.print(f"Wrote {out_file}.", highlight=False, markup=False)
    raise typer.Exit(1 if outcome.failed else 0)


def _notices(names: set[str]) -> list[str]:
    """What has to be said of built-in models."""
    from contextfold.models import BUILTINS

    return [builtin.notice for builtin in BUILTINS if builtin.name in names and builtin.notice]
