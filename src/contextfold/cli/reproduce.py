"""`contextfold reproduce`: a paper's experiments, its published figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from contextfold.cli.common import JsonOption, check_page, check_writable, err, out, show_or_json
from contextfold.errors import InputError


def reproduce(
    paper: Annotated[str, typer.Argument(help="Number on arXiv, such as 2511.17864.")],
    model: Annotated[
        str | None, typer.Option(help="As for fold; gemma3-270m where none is named and the paper takes one.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder for finished parts; a run that was stopped goes on there.")
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="A file for the JSON.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="A page to write besides, as `contextfold report` makes it; ends in .html.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Parts that run at once, each in a process with one thread.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, to see that it runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a paper's experiments and print its published figures beside ours, and what could not be reproduced."""
    from contextfold.files import write_json
    from contextfold.reproduce import Bench, paper_named
    from contextfold.reproduce import reproduce as run
    from contextfold.reproduce.jobs import together
    from contextfold.reproduce.view import outcome_view

    chosen = paper_named(paper)
    check_writable(out_file)
    check_page(report, "--report")
    if model is not None and chosen.model is None:
        raise InputError(f"{chosen.number} trains its own models, so it takes no --model; leave it out")
    if jobs < 1:
        raise InputError(f"--jobs {jobs} is no number of processes; give 1 or more")
    name, folder = model or chosen.model or "", work or _folder(chosen.number)
    with _progress() as progress:

        def beforehand(parts: Any) -> Any:
            if jobs == 1:
                return ()
            return together(chosen, parts, name, folder, quick=quick, jobs=jobs, progress=progress)

        outcome = run(
            chosen, Bench(name, _loader(name)), folder, quick=quick, beforehand=beforehand, progress=progress
        )  # fmt: skip
    payload = outcome.to_json()
    if out_file is not None:
        write_json(out_file, payload)
    if report is not None:
        _write_page(payload, chosen.number, report)
    show_or_json(as_json, payload, lambda: outcome_view(outcome))
    for path in (out_file, report):
        if path is not None and not as_json:
            out.print(f"Wrote {path}.")


def _write_page(payload: Any, number: str, path: Path) -> None:
    from contextfold import report as pages

    run = pages.run_of(payload, f"contextfold reproduce {number}")
    pages.save(pages.page([pages.chapter(run, 1)]), path)


def _folder(number: str) -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_path("contextfold", appauthor=False)) / "reproduce" / number


def _loader(name: str) -> Callable[[Any], Any]:
    told: set[str] = set()

    def load(dtype: Any) -> Any:
        from contextfold import models

        loaded = models.load(name, dtype=dtype)
        if loaded.notice and loaded.notice not in told:
            told.add(loaded.notice)
            err.print(f"[dim]{loaded.notice}[/]")
        return loaded

    return load


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr over all units of work, named after the part at work."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("reproducing", total=None)
        yield lambda part, done, total: bar.update(task, description=part or "reproducing", completed=done, total=total)
