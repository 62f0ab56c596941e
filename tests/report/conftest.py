"""Pages of every kind, drawn once."""

from __future__ import annotations

import pytest

import runs
from contextfold.report import chapter, page, run_of


@pytest.fixture(scope="session")
def chapters():
    """By kind, the run and its chapter; every chapter under a number of its own."""
    made = {name: make() for name, make in runs.ALL.items()}
    return {name: (found, chapter(run_of(found), k)) for k, (name, found) in enumerate(made.items(), 1)}


@pytest.fixture(scope="session")
def made(chapters):
    """By kind, the run and a page of it alone."""
    return {name: (found, page([drawn])) for name, (found, drawn) in chapters.items()}
