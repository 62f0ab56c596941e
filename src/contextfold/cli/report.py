"""`contextfold report`: one page from what other commands printed with --json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from contextfold.cli.common import JsonOption, check_page, show_or_json, steps
from contextfold.errors import InputError


def report(
    out_file: Annotated[Path, typer.Option("--out", help="The page to write, such as report.html.")],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...", help="Files with what fold, verify, demo, generate, ablate, bake or reproduce wrote."
        ),
    ] = None,
    patch: Annotated[
        list[Path] | None, typer.Option(help="A patch file to draw, its norms and spectra; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make one page of one or several runs: it opens offline, asks for nothing, and can be read without a script."""
    from contextfold import patchfile
    from contextfold import report as pages

    files, patches = runs or [], patch or []
    if not files and not patches:
        raise InputError("nothing to report: name files that --json wrote, or --patch FILE")
    check_page(out_file, "--out")
    read = [pages.read(path) for path in files]
    stored = [patchfile.load(path) for path in patches]
    chapters: list[Any] = []
    with steps("drawing", len(read) + len(stored)) as progress:
        for number, run in enumerate(read, 1):
            chapters.append(pages.chapter(run, number))
            progress(run)
        for number, (path, found) in enumerate(zip(patches, stored, strict=True), 1):
            chapters.append(pages.chapter_of_patch(found, str(path), number))
            progress(found)
    size = pages.save(pages.page(chapters), out_file)
    payload = {
        "report": str(out_file),
        "bytes": size,
        "runs": [{"file": r.source, "kind": r.kind.name, "model": r.found["model"], "holds": r.holds} for r in read],
        "patches": [str(path) for path in patches],
    }
    show_or_json(as_json, payload, lambda: f"Wrote {out_file} ({size} bytes).")
