"""Wheel and source archive, built in an environment of their own and tried in an empty one: `scripts/wheel.py`.

Refuses a wheel that lacks a file of the package or holds another; then folds, and makes a report, with nothing of the
repository in reach. Leaves both in `dist`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
BUILD = "build==1.6.1"
TORCH = "torch==2.13.0"
CONTEXT, QUERY = "a b c d e f g h ", "i j k l"


def run(*command: str | Path, cwd: Path, python: Path | None = None) -> str:
    """Standard output; a command that fails ends the script with what it said."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    first = [python] if python else []
    done = subprocess.run([*first, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(folder: Path) -> Path:
    """The interpreter of a new, empty environment."""
    run("-m", "venv", folder, cwd=ROOT, python=Path(sys.executable))
    return folder / "bin" / "python"


def tracked(under: str) -> set[str]:
    return set(run("git", "ls-files", under, cwd=ROOT).split())


def check_contents(wheel: Path, archive: Path) -> None:
    """All of the package and nothing else; of the archive, that the wheel can be built from it."""
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {name.removeprefix("src/") for name in tracked("src")}
    if files != expected:
        sys.exit(f"the wheel differs from the package in {sorted(files ^ expected)[:5]}")
    with tarfile.open(archive) as packed:
        inside = {name.split("/", 1)[1] for name in packed.getnames() if "/" in name}
    missing = (tracked("src") | {"pyproject.toml", "README.md", "LICENSE"}) - inside
    if missing:
        sys.exit(f"the source archive lacks {sorted(missing)[:5]}")


def build(scratch: Path) -> tuple[Path, Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    python = environment(scratch / "building")
    run("-m", "pip", "install", "--quiet", BUILD, cwd=ROOT, python=python)
    run("-m", "build", "--outdir", DIST, ROOT, cwd=scratch, python=python)
    (wheel,), (archive,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, archive


def model_folder(scratch: Path) -> Path:
    """A tiny model with a tokenizer of one token per letter, made with the helpers of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    from tiny import build, letters

    letters().save_pretrained(scratch / "model")
    build("llama", torch.float32).save_pretrained(scratch / "model")
    return scratch / "model"


def try_out(wheel: Path, scratch: Path) -> None:
    python = environment(scratch / "empty")
    constraints = ("-c", ROOT / "constraints.txt")
    run("-m", "pip", "install", "--quiet", *constraints, TORCH, cwd=scratch, python=python)
    run("-m", "pip", "install", "--quiet", *constraints, f"contextfold[report] @ {wheel.as_uri()}", cwd=scratch,
        python=python)  # fmt: skip
    run("-m", "pip", "check", cwd=scratch, python=python)
    where = run("-c", "import contextfold; print(contextfold.__file__)", cwd=scratch, python=python).strip()
    if not Path(where).is_relative_to(scratch):
        sys.exit(f"the package was found in {where}, outside of the empty environment")
    command = python.parent / "contextfold"
    sys.stdout.write(run(command, "--version", cwd=scratch))
    folder = model_folder(scratch)
    texts = ("--context", CONTEXT, "--query", QUERY)
    found = run(command, "fold", folder, *texts, "--out", scratch / "p.safetensors", "--json", cwd=scratch)
    if not json.loads(found)["proven"] or not (scratch / "p.safetensors").exists():
        sys.exit("a fold was not proven")
    (scratch / "fold.json").write_text(found, encoding="utf-8")
    run(command, "report", scratch / "fold.json", "--out", scratch / "page.html", cwd=scratch)
    page = (scratch / "page.html").read_text(encoding="utf-8")
    if "<svg" not in page or "<style" not in page:
        sys.exit("the report has no figures or no style")
    sys.stdout.write(f"folded, proven and reported from {wheel.name} alone ({wheel.stat().st_size} bytes)\n")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="contextfold-wheel-") as name:
        scratch = Path(name)
        wheel, archive = build(scratch)
        check_contents(wheel, archive)
        try_out(wheel, scratch)


if __name__ == "__main__":
    main()
