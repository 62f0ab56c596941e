"""The list of licences is that of the environment, and every licence in it was signed off."""

from __future__ import annotations

import runpy
import shutil
from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTED = runpy.run_path(str(ROOT / "scripts" / "licences.py"))
PAGE = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")


class Package(Distribution):
    """A package that is not there, with these metadata."""

    def __init__(self, **metadata: str | list[str]) -> None:
        self.fields = metadata

    @property
    def metadata(self) -> Message:
        message = Message()
        message["Name"] = "made-up"
        for key, value in self.fields.items():
            for one in [value] if isinstance(value, str) else value:
                message[key.replace("_", "-")] = one
        return message

    def read_text(self, filename: str) -> None:
        return None

    def locate_file(self, path: object) -> Path:
        return ROOT


def test_the_page_is_that_of_the_environment() -> None:
    assert LISTED["page"]() == PAGE, "read the licence of what is new, then run python scripts/licences.py"


def test_every_licence_is_accepted() -> None:
    rows = list(LISTED["rows"]())
    assert len(rows) > 60
    unknown = [row for row in rows if not LISTED["identifiers"](row[1]) <= LISTED["ACCEPTED"]]
    assert unknown == [], "sign it off in scripts/licences.py, or do without the package"


def test_what_is_imported_is_listed() -> None:
    named = {line.split(" | ")[0].strip("| ") for line in PAGE.splitlines() if line.startswith("| ")}
    assert {"torch", "transformers", "numpy", "jinja2", "matplotlib", "pillow", "pyarrow", "hypothesis"} <= named
    assert "contextfold" not in named


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"License_Expression": "MIT OR Apache-2.0", "License": "other"}, "MIT OR Apache-2.0"),
        ({"Classifier": ["License :: OSI Approved :: MIT License", "Typing :: Typed"], "License": "x"}, "MIT"),
        ({"License": "Apache 2.0"}, "Apache-2.0"),
        ({"License": "GPL-3.0-only\nand a page of text"}, "GPL-3.0-only"),
        ({"Classifier": ["License :: OSI Approved :: GNU General Public License v3 (GPLv3)"]}, "not stated"),
        ({}, "not stated"),
    ],
)
def test_a_licence_is_read_from_what_metadata_say(metadata: dict[str, str], expected: str) -> None:
    assert LISTED["licence"](Package(**metadata)) == expected


def test_another_licence_fails() -> None:
    for text in ("GPL-3.0-only", "not stated", "MIT AND LGPL-2.1-or-later", "Elastic-2.0"):
        assert not LISTED["identifiers"](text) <= LISTED["ACCEPTED"]
    assert LISTED["identifiers"]("MIT AND (PSF-2.0 OR Zlib)") == {"MIT", "PSF-2.0", "Zlib"}


def test_a_new_dependency_fails(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    copy = shutil.copy(ROOT / "scripts" / "licences.py", tmp_path / "scripts")
    asked = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(asked.replace("dependencies = [", 'dependencies = ["pip",', 1))
    rows = [*LISTED["rows"]()]
    assert sorted({*runpy.run_path(copy)["rows"]()} - {*rows}) == [("pip", "MIT", "use")]
