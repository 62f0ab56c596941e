"""The parser of a patch's header under atheris, which follows the branches that an input takes.

atheris is none of the extras: `pip install atheris`, or put its folder on PYTHONPATH.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEPARATOR = b"\0|\0"
"""Between the two texts of an input."""


def fuzzed(place: Path, seconds: int, seed: int) -> dict[str, Any]:
    """Run it in a process of its own, since libFuzzer ends the one that it runs in."""
    corpus = place / "corpus"
    corpus.mkdir()
    for number, texts in enumerate(_seeds(place)):
        (corpus / str(number)).write_bytes(SEPARATOR.join(text.encode() for text in texts))
    done = subprocess.run(
        [sys.executable, __file__, str(corpus), f"-max_total_time={seconds}", f"-seed={seed + 1}", "-max_len=20000",
         f"-artifact_prefix={place}/", "-timeout=20", "-rss_limit_mb=4096"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    runs = re.findall(r"#(\d+)\s+DONE|Done (\d+) runs", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    if not runs and done.returncode == 0:
        raise SystemExit(f"atheris did not run: {done.stderr[-500:]}")
    last = re.findall(r"#(\d+)", done.stderr)
    failed = done.returncode != 0
    return {
        "the header of a patch file": {
            "trials": int(max((int(n) for n in last), default=0)), "ended": {}, "failed": int(failed),
            "edges": int(covered[-1]) if covered else None,
            "failures": {done.stderr.strip()[-300:]: [0]} if failed else {},
        }
    }  # fmt: skip


def _seeds(place: Path) -> list[tuple[str, str]]:
    """Header and sites of two patches that are right."""
    import torch
    from safetensors import safe_open

    import tiny
    from contextfold import patchfile
    from contextfold.fold import fold_token

    found = []
    for model_type in ("llama", "gemma3_text"):
        folded = fold_token(tiny.shared(model_type, torch.float32), tiny.tokens(9), tiny.tokens(3, seed=2))
        path = patchfile.save(folded.patch, place / "seed.safetensors")
        with safe_open(path, framework="pt") as file:
            told = file.metadata()
        found.append((told["header"], json.dumps(json.loads(told["sites"])[:2])))
    return found


def _main() -> None:
    import atheris

    with atheris.instrument_imports(include=["contextfold.patchfile", "contextfold.files", "json"]):
        from contextfold import patchfile
    import torch

    from contextfold.errors import ContextfoldError

    class Tensors(dict[str, Any]):
        """A right one under every name."""

        def __missing__(self, name: str) -> Any:
            return torch.ones(1) if name[-1:] not in "AB" else torch.ones(1, 1)

    def once(data: bytes) -> None:
        first, _, second = data.partition(SEPARATOR)
        texts = {"header": first.decode(errors="surrogateescape"), "sites": second.decode(errors="surrogateescape")}
        try:
            _header, rows = patchfile._parsed(Path("x"), texts)
            patchfile.unpacked(rows, Tensors())
        except (ContextfoldError, KeyError, TypeError, ValueError):  # the last three are what `load` names
            return

    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    _main()
