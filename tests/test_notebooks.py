"""The notebooks of `examples/` run from beginning to end, and what they show is what they say."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL = 10_000
"""Bytes of a committed notebook: text, and outputs of a line or two."""

SHOWN = {
    "fold_and_prove": ("Proven: 1 of 1 tokens agree", " Edmund"),
    "bake_and_export": ("Proven: peft", "Heron"),
}


def outputs(book):
    """What every cell printed or gave back, as text."""
    found = []
    for cell in book.cells:
        for output in cell.get("outputs", []):
            found.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(found)


def test_every_notebook_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.real
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs_and_shows_what_it_says(name, tmp_path):
    path = EXAMPLES / f"{name}.ipynb"
    assert path.stat().st_size < SMALL
    book = nbformat.read(path, as_version=4)
    for shown in SHOWN[name]:
        assert shown in outputs(book)  # as it was committed
    for cell in book.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    client = NotebookClient(book, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises where a cell does
    for shown in SHOWN[name]:
        assert shown in outputs(book)
