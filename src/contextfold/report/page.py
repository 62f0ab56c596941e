"""Runs and patches -> one page of HTML that needs nothing else: no other file, no network, no script to be read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from contextfold.errors import InputError
from contextfold.files import replacing
from contextfold.patch import Patch
from contextfold.report import parts
from contextfold.report.parts import Section
from contextfold.report.reading import Run
from contextfold.report.sections_fold import fold_sections, sequence_sections
from contextfold.report.sections_other import ablate_sections, bake_sections, file_sections, generate_sections
from contextfold.report.sections_paper import paper_sections, paper_sentence, paper_title

__all__ = ["SECTIONS", "Chapter", "chapter", "chapter_of_patch", "check_extra", "page", "save"]

SECTIONS: Mapping[str, Callable[[Run, str], list[Section]]] = {
    "fold": fold_sections,
    "sequence": sequence_sections,
    "generate": generate_sections,
    "ablate": ablate_sections,
    "bake": bake_sections,
    "reproduce": paper_sections,
}
"""By the name of a kind."""


@dataclass(frozen=True)
class Chapter:
    """One run, or one patch file, ready to be laid out."""

    name: str
    """Unique on the page."""
    kind: str
    """Name of the kind of run, or `patch`."""
    title: str
    source: str
    holds: bool | None
    """None where nothing was to be proven."""
    sentence: str
    sections: Sequence[Section]


def check_extra() -> None:
    """Raises `InputError` where what the extra `report` brings is not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"a report needs {error.name}: pip install 'contextfold[report]'") from error


def chapter(run: Run, number: int) -> Chapter:
    """Draws the figures of one run, which takes a second or two."""
    found = run.found
    name = f"run{number}"
    if run.kind.name == "reproduce":
        title, sentence = paper_title(found), paper_sentence(found)
    else:
        title = f"{run.kind.title}: {found['model']}, {found['dtype']}"
        sentence = found.get("verdict") or _ablation(run)
    return Chapter(name, run.kind.name, title, run.source, run.holds, sentence, SECTIONS[run.kind.name](run, name))


def chapter_of_patch(patch: Patch, source: str, number: int) -> Chapter:
    name = f"patch{number}"
    return Chapter(
        name, "patch", f"Patch file: {patch.header.model_type}", source, None, repr(patch), file_sections(patch, name)
    )


def _ablation(run: Run) -> str:
    worst = max(part["patched_logit_gap"] for part in run.found["parts"])
    costly = run.found["ranking"][0]
    words = "Proven" if run.holds else "Not proven"
    return (
        f"{words}: written into the weights, every patch leaves a logit gap of at most {worst:.2g} "
        f"(limit {run.found['exact_limit']:.2g}). The part whose removal costs most is {costly!r}."
    )


def page(chapters: Sequence[Chapter]) -> str:
    """The page. All texts are escaped; figures are our own SVG, whose texts matplotlib escapes.

    A policy in its head forbids every request and every script but the one that it holds, by its hash: even a text
    that found a way out of its place could neither run nor call home.
    """
    import jinja2
    from markupsafe import Markup

    files = resources.files("contextfold.report")
    script = files.joinpath("page.js").read_text("utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files.joinpath(name).read_text("utf-8")),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.tests["number"] = lambda value: isinstance(value, parts.Number)
    environment.filters["kind"] = lambda part: type(part).__name__
    environment.filters["svg"] = lambda text: Markup(text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text: str = environment.get_template("page.html").render(
        chapters=chapters,
        style=Markup(files.joinpath("page.css").read_text("utf-8")),
        script=Markup(script),
        digest=digest,
    )
    return text


def save(text: str, path: Path) -> int:
    """Write the page: the old file or the new one, never half of one. Returns its size in bytes.

    Raises `InputError` where it cannot be written.
    """
    raw = text.encode()
    with replacing(path, "choose another --out") as part:
        part.write_bytes(raw)
    return len(raw)
