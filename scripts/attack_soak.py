"""2,000 folds and 200 bakes in one process: memory flat, speed flat, nothing left on the model.

Writes `docs/measured/reliability-soak.json`.

    python scripts/attack_soak.py [--out FILE] [--folds N] [--bakes N]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402 (the path and the environment come first)
from attacking.record import finish  # noqa: E402

import soak  # noqa: E402
import tiny  # noqa: E402
from contextfold.anatomy import bind  # noqa: E402

OUT = ROOT / "docs" / "measured" / "reliability-soak.json"

GROWTH = {"folds": 1024.0, "bakes": 10240.0}
"""Bytes of resident memory per piece of work that still count as flat: 2 MB over the whole soak, half a percent."""

SLOWER = 1.2
"""Median seconds of the last tenth over those of the second one that still count as flat."""


def measure(kind: str, model_type: str, count: int) -> dict[str, Any]:
    """One kind of work on one model; `wrong` says what does not hold."""
    bound = bind(tiny.build(model_type, torch.float32))
    work = {"folds": soak.folds, "bakes": soak.bakes}[kind](bound)
    for k in range(2 * soak.INPUTS):  # what is looked up once is kept
        work(k)
    before = soak.left(bound)
    found = soak.course(work, count, max(1, count // 40)).to_json()
    after = soak.left(bound)
    wrong = [f"{name} changed" for name in before if before[name] != after[name]]
    if found["bytes_per_piece"] > GROWTH[kind]:
        wrong.append("memory grows")
    if found["slowdown"] > SLOWER:
        wrong.append("it slows down")
    same = {name: after[name] for name in ("hooks", "files", "threads", "tensors")}
    return {"kind": kind, "model_type": model_type, **found, **same, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--folds", type=int, default=2000)
    parser.add_argument("--bakes", type=int, default=200)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    begun, rows = time.monotonic(), []
    for model_type in ("llama", "gemma3_text"):
        for kind, count in (("folds", options.folds // 2), ("bakes", options.bakes // 2)):
            rows.append(measure(kind, model_type, count))
            row = rows[-1]
            sys.stderr.write(
                f"{count} {kind} on {model_type}: {row['bytes_per_piece']} bytes each, "
                f"{row['first_seconds']} s -> {row['last_seconds']} s, {row['wrong'] or 'nothing wrong'}\n"
            )
    finish(
        options.out,
        begun,
        rows,
        threads=torch.get_num_threads(),
        bounds={"bytes_per_piece": GROWTH, "slowdown": SLOWER},
    )


if __name__ == "__main__":
    main()
