"""One page that shows what a run proved, and the figures on it.

`report` makes the page; `figures` has one function per figure, which return matplotlib figures and serve in a notebook
too; `reading` says which JSON is accepted. Needs the extra `report`.
"""

from __future__ import annotations

from contextfold.report import figures
from contextfold.report.page import Chapter, chapter, chapter_of_patch, check_extra, page, save
from contextfold.report.reading import KINDS, Run, read, run_of

__all__ = [
    "KINDS", "Chapter", "Run", "chapter", "chapter_of_patch", "check_extra", "figures", "page", "read", "run_of",
    "save",
]  # fmt: skip
