"""The papers' experiments from one command, with their published figures beside ours.

`PAPERS` is the table; a paper is a module `arxiv_*` that says which parts are run, at which sizes, and how their
results are read. `reproduce` runs them, and goes on where it was stopped.
"""

from __future__ import annotations

from contextfold.errors import InputError
from contextfold.reproduce import (
    arxiv_2507_16003,
    arxiv_2510_08734,
    arxiv_2511_17864,
    arxiv_2512_11255,
    arxiv_2609_39329,
)
from contextfold.reproduce.engine import Bench, Outcome, Paper, Part, reproduce
from contextfold.reproduce.row import Missing, Row

__all__ = ["PAPERS", "Bench", "Missing", "Outcome", "Paper", "Part", "Row", "paper_named", "reproduce"]

PAPERS = (
    arxiv_2511_17864.PAPER,
    arxiv_2507_16003.PAPER,
    arxiv_2512_11255.PAPER,
    arxiv_2510_08734.PAPER,
    arxiv_2609_39329.PAPER,
)
"""Every paper, the main one first."""


def paper_named(number: str) -> Paper:
    """The paper of that arXiv number, with or without `arXiv:` and version. Raises `InputError`."""
    bare = number.strip().lower().removeprefix("arxiv:").split("v")[0]
    for paper in PAPERS:
        if paper.number == bare:
            return paper
    raise InputError(f"paper {number!r} is unknown; choose one of {', '.join(paper.number for paper in PAPERS)}")
