"""What folding and baking cost on paper: formulas, points that were measured, and how far the formulas carry.

python scripts/scale.py run [NAME ...]    # measure, in one thread: docs/measured/scale.json; names of models and of
                                          # operations (token, sequence, bake) leave out the others
python scripts/scale.py peaks MODEL NAME ...  # of one model, in this process: bytes above the model by call, JSON
python scripts/scale.py table             # put the tables between the markers of docs/scale.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402 (the path and the environment come first)

from contextfold.files import write_json  # noqa: E402

RESULT = ROOT / "docs" / "measured" / "scale.json"


def measure(names: list[str]) -> None:
    """Rows take the place of those that were measured before; the file is written model by model."""
    from scaling.points import FITTED, LEFT_OUT, OPERATIONS, machine, points

    torch.set_num_threads(1)
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {"points": []}
    known = [*FITTED, *LEFT_OUT]
    operations = [name for name in OPERATIONS if name in names] or list(OPERATIONS)
    for name in [name for name in known if name in names] or known:
        fresh = []
        for row in points(name, operations):
            sys.stderr.write(f"{name} {row['operation']} {row['seconds']:.3g} s\n")
            fresh.append(row)
        for row, peak in zip(fresh, _peaks(name, operations, len(fresh)), strict=True):
            row["peak_bytes"] = peak
        rows = fresh + [r for r in found["points"] if r["model"] != name or r["operation"] not in operations]
        rows.sort(key=lambda row: (known.index(row["model"]), OPERATIONS.index(row["operation"])))
        found = {"machine": machine(), "points": rows}
        write_json(RESULT, found)


def _peaks(name: str, operations: list[str], count: int) -> list[int | None]:
    """None each where a model's are not measured."""
    from scaling.points import PEAKED, PEAKS

    if name not in PEAKED:
        return [None] * count
    command = [sys.executable, __file__, "peaks", name, *operations]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **PEAKS}).stdout
    peaks: list[int | None] = json.loads(found)
    return peaks


def main() -> None:
    match sys.argv[1:]:
        case ["run", *names]:
            measure(names)
        case ["peaks", name, *operations]:
            from scaling.points import peaks

            torch.set_num_threads(1)
            sys.stdout.write(json.dumps(peaks(name, operations)) + "\n")
        case ["table"]:
            from scaling.page import write_page

            write_page()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
