"""Files that are small and want much memory, each read in a process of its own under a limit on its address space."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]

READERS = {
    "patch": "from contextfold import patchfile; read = patchfile.load",
    "jobs": "from pathlib import Path; from contextfold.sweep import read_jobs; read = lambda p: read_jobs(Path(p))",
    "report": "from pathlib import Path; from contextfold.report import read as r; read = lambda p: r(Path(p))",
    "questions": "from contextfold import prompts, questions\n"
    "read = lambda p: questions.read_questions(prompts.read_argument('@' + p))",
}

CHILD = """
import resource, sys
{reader}
def peak():
    # Not what getrusage says, which a process inherits from the one that started it.
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
from contextfold.errors import ContextfoldError
try:
    read(sys.argv[1])
    ended = "taken"
except ContextfoldError as error:
    ended = type(error).__name__
print(ended, peak() - before)
"""

CONSTANT = 2**28
"""Bytes of memory that any file may take."""


def measured(place: Path) -> dict[str, Any]:
    """By bomb: trials, how it ended, size and memory in bytes, and the multiple that is allowed."""
    found = {}
    for name, (reader, multiple, make) in BOMBS.items():
        path = place / "bomb"
        make(path)
        size = path.stat().st_size
        bound = multiple * size + CONSTANT
        script = CHILD.format(reader=READERS[reader], limit=bound + 2**33)
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=300, check=False
        )
        ended, _, taken = done.stdout.strip().rpartition(" ")
        failed = done.returncode != 0 or int(taken) > bound
        found[name] = {
            "trials": 1, "ended": {ended: 1}, "failed": int(failed), "size_bytes": size,
            "memory_bytes": int(taken or 0), "bound_bytes": bound,
            "failures": {done.stderr.strip()[-120:]: [0]} if failed else {},
        }  # fmt: skip
        path.unlink()
    return found


def _patch(header: str, sites: str, tensors: int = 1) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        told = {"format": "contextfold-patch", "version": "1", "header": header, "sites": sites}
        save_file({str(k): torch.zeros(1) for k in range(tensors)}, path, metadata=told)

    return make


def _large(path: Path) -> None:
    sites = [
        {"layer": 0, "module": "m", "parameter": "weight", "transposed": False, "expert": None, "experts": 1,
         "edit": "bias"}
    ]  # fmt: skip
    names = ("kind", "model_type", "fingerprint", "tokens_digest", "context_digest", "model_dtype", "factor_dtype",
             "attention")  # fmt: skip
    header = {**dict.fromkeys(names, ""), "positions": [], "exact_at": [], "materialised": True, "plan": [],
              "versions": {}}  # fmt: skip
    told = {"format": "contextfold-patch", "version": "1", "header": json.dumps(header), "sites": json.dumps(sites)}
    save_file({"0.delta": torch.zeros(2**26)}, path, metadata=told)


def _text(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


MIB = 2**20
BOMBS: dict[str, tuple[str, int, Callable[[Path], None]]] = {
    "a patch of 256 MiB": ("patch", 4, _large),
    "a patch whose header is empty lists": ("patch", 32, _patch("{}", "[" + "[]," * (8 * MIB) + "[]]")),
    "a patch whose header is small objects": ("patch", 32, _patch("{}", "[" + '{"a":0},' * (3 * MIB) + "0]")),
    "a patch whose header is longer than any": ("patch", 32, _patch("{}", "[" + "[]," * (12 * MIB) + "[]]")),
    "a patch of 100,000 tensors": ("patch", 32, _patch("{}", "[]", 100_000)),
    "a jobs file of as many values as fit": ("jobs", 4000, _text("models: [" + "x," * 120_000 + "x]")),
    "a jobs file of aliases": ("jobs", 4000, _text("a: [&a [" + "x," * 99 + "x], &b [" + "*a," * 99 + "*a], ["
                                                     + "*b," * 99 + "*b]]")),
    "a report of small objects": ("report", 32, _text("[" + '{"a":0},' * (4 * MIB) + "0]")),
    "a report longer than any": ("report", 32, _text("[" + "0," * (130 * MIB) + "0]")),
    "questions of one letter": ("questions", 64, _text("\n".join(map(str, range(2 * MIB))))),
    "questions longer than any": ("questions", 32, _text("a\n" * (33 * MIB))),
}  # fmt: skip
