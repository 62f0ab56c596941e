"""The same inputs in several processes, with one and with two threads: which results are the same bits.

Writes `docs/measured/reliability-same-bits.json`.

    python scripts/attack_same_bits.py [--out FILE] [--models M ...] [--runs N] [--threads T ...] [--works W ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

from attacking.record import finish  # noqa: E402
from safetensors import safe_open  # noqa: E402 (the path and the environment come first)
from safetensors.torch import load_file  # noqa: E402

import samebits  # noqa: E402

OUT = ROOT / "docs" / "measured" / "reliability-same-bits.json"

BOUND = 1e-2
"""Relative, of what another number of threads, or other company in a batch, may change in float32."""

GAP = 1e-2
"""Logits, for the same."""


def measure(model: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One model; `wrong` says what does not hold."""
    files = {}
    for threads in options.threads:
        for k in range(options.runs):
            file = folder / f"{threads}-{k}"
            # What the company in a batch changes is the same in each of them.
            works = [work for work in options.works if work != samebits.COMPANY or not files]
            command = [sys.executable, str(ROOT / "tests" / "samebits.py"), str(threads), model, str(file), *works]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
            files[threads, k] = load_file(file)
    first, *others = options.threads
    with safe_open(folder / f"{first}-0", framework="pt") as file:
        company = {name: float(number) for name, number in (file.metadata() or {}).items()}
    again = {
        threads: [samebits.apart(files[threads, 0], files[threads, k]) for k in range(1, options.runs)]
        for threads in options.threads
    }
    across = {work: row for other in others for work, row in samebits.apart(files[first, 0], files[other, 0]).items()}
    wrong = [
        f"{work} is other bits with {threads} threads again"
        for threads, found in again.items()
        for rows in found
        for work, row in rows.items()
        if row["other_bits"]
    ]
    wrong += [f"{work} depends on the threads by {row['relative']}" for work, row in across.items() if _far(row)]
    if company and (company["bake_relative"] > BOUND or company["gap_logits"] > GAP):
        wrong.append("the company in a batch changes more than the bound")
    return {
        "model": model,
        "runs": options.runs,
        "tensors": {work: int(row["tensors"]) for work, row in _counted(files[first, 0]).items() if row["tensors"]},
        "again": {str(threads): _worst(found) for threads, found in again.items()},
        "one_thread_or_two": across,
        "company": company,
        "wrong": wrong,
    }


def _counted(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many tensors were compared, per work."""
    return samebits.apart(found, found)


def _far(row: dict[str, float]) -> bool:
    return row["relative"] > BOUND


def _worst(found: list[dict[str, dict[str, float]]]) -> dict[str, int]:
    """Tensors of other bits per work, over all repetitions."""
    return {
        work: int(sum(rows[work]["other_bits"] for rows in found))
        for work in samebits.WORKS
        if any(rows[work]["tensors"] for rows in found)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--models", nargs="*", default=["llama", "gemma3_text", "smollm2"])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2], help="one number, or one and two")
    parser.add_argument("--works", nargs="*", default=[*samebits.WORKS, samebits.COMPANY])
    options = parser.parse_args()
    begun, rows = time.monotonic(), []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(model, options, Path(folder)))
        sys.stderr.write(f"{model}: {rows[-1]['wrong'] or 'as it should'}\n")
    finish(options.out, begun, rows, bounds={"relative": BOUND, "logits": GAP})


if __name__ == "__main__":
    main()
