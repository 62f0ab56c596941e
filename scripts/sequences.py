"""Figures of one patch for a whole sequence, beyond those that `measured.py` takes from the command line.

python scripts/sequences.py families [TYPE ...]  # every type, 1, 4 and 16 positions: docs/measured/sequences.json
python scripts/sequences.py recompress           # what dropped singular values cost: docs/measured/recompress.json
python scripts/sequences.py cost [MODEL] [N ...] # against two forwards: docs/measured/sequence-cost.json
python scripts/sequences.py memory               # at its peak, each in a process: docs/measured/sequence-memory.json
python scripts/sequences.py peak MODEL N         # one of these, in this process: bytes above the model, JSON
python scripts/sequences.py table                # these, and those of measured.py, as in docs/numerics.md
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402 (the path and the environment come first)
from bench import bound_model, random_ids  # noqa: E402
from measured import FOLDER, TEXTS, WORDS, commands  # noqa: E402

import zoo  # noqa: E402
from contextfold import models, prompts  # noqa: E402
from contextfold.anatomy import FAMILIES, Bound, bind  # noqa: E402
from contextfold.ceiling import peak_memory, reset_peak  # noqa: E402
from contextfold.errors import ContextfoldError  # noqa: E402
from contextfold.fold import fold_sequence, rowsites, split  # noqa: E402
from contextfold.rules import JointPostNorm  # noqa: E402
from contextfold.runtime import materialised, run  # noqa: E402
from sequences import POSITIONS, measure_sequences  # noqa: E402
from storage import expected_peak  # noqa: E402

TOLERANCES = (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3)
"""Relative Frobenius errors of every matrix edit."""

CONTEXT = 200
LENGTHS: dict[str, tuple[int, ...]] = {
    "smollm2": (32, 64, 128, 256, 512, 1024), "gemma3-270m": (32, 64, 128, 256, 512),
    **{f"random-8-{width}": (256,) for width in (256, 512, 1024)},
}  # fmt: skip
"""Numbers of positions; the random models are called by layers and width, and show how the solves grow with it."""

PEAKS = (
    *(("smollm2", n) for n in (64, 256, 512)), *(("gemma3-270m", n) for n in (64, 256)),
    *((f"random-{size}", 256) for size in ("4-512", "8-512", "16-512", "8-256", "8-1024", "4-1024")),
    *(("random-8-512", n) for n in (64, 128, 512)),
)  # fmt: skip
"""Models and numbers of positions."""

RUNS, LONG = 3, 256
"""From so many positions on a fold takes long enough to be measured once."""


def families(types: list[str]) -> None:
    """Rows are written as they come, and take the place of those measured before."""
    path = FOLDER / "sequences.json"
    rows = json.loads(path.read_text())["model_types"] if path.exists() else {}
    covered = {name for family in FAMILIES for name in family.model_types}
    for name in types or [name for name in zoo.MODEL_TYPES if name in covered]:
        rows[name] = _row(name)
        worst = max((entry.get("gap") or 0.0 for entry in rows[name]["positions"].values()), default=0.0)
        reasons = {entry["reason"] for entry in rows[name]["positions"].values()}
        print(f"{name:28} {worst:8.1e}  {', '.join(sorted(reasons))[:80]}", flush=True)  # noqa: T201
        exact = sum(all(entry["exact"] for entry in row["positions"].values()) for row in rows.values())
        unit = "gap of the logits at all positions, as a fraction of the unpatched gap; float64, weights written"
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
        path.write_text(f'{{\n "unit": "{unit}",\n "exact": {exact},\n "model_types": {{\n{lines}\n }}\n}}\n')


def _row(model_type: str) -> dict[str, Any]:
    positions = {}
    for n in POSITIONS:
        try:
            found = measure_sequences(model_type, (n,))[n]
        except (ContextfoldError, ImportError, MemoryError, RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
            positions[str(n)] = {"exact": False, "gap": None, "reason": reason}
            continue
        positions[str(n)] = {
            "exact": found.exact, "gap": found.ratio, "unpatched": found.unpatched, "limit": found.limit,
            "outcomes": list(found.outcomes), "reason": "" if found.exact else ", ".join(found.outcomes),
        }  # fmt: skip
    return {"positions": positions}


def recompress() -> None:
    """One patch for 64 positions on each built-in model, its edits narrowed step by step."""
    found = {}
    for name in ("smollm2", "gemma3-270m"):
        loaded = models.load(name)
        answer = " ".join((TEXTS / "answer.txt").read_text().split()[: WORDS[64]])
        ids = prompts.encode(loaded.tokenizer, (TEXTS / "note.txt").read_text(), answer)
        bound = bind(loaded.model)
        folded = fold_sequence(bound, ids.context, ids.query)
        n = ids.query.numel()
        unpatched = run(bound.model, folded.split.reduced, last=n)
        rows = []
        for tol in TOLERANCES:
            small = folded.patch.recompress(tol)
            with materialised(bound, small):
                logits = run(bound.model, folded.split.reduced, last=n)
            ranks = [edit.delta.rank for edit in small.edits.values() if hasattr(edit, "delta")]
            rows.append({
                "tol": tol, "mean_rank": statistics.mean(ranks), "bytes": small.nbytes,
                "top1_matches": int((logits.argmax(1) == folded.in_context.argmax(1)).sum()),
                "worst_logit_gap": float((logits - folded.in_context).abs().max()),
            })  # fmt: skip
        gap = float((unpatched - folded.in_context).abs().max())
        found[name] = {"tokens": n, "unpatched_logit_gap": gap, "bytes": folded.patch.nbytes, "rows": rows}
    (FOLDER / "recompress.json").write_text(json.dumps(found, indent=1) + "\n")


@contextmanager
def solving() -> Iterator[list[float]]:
    """The processor seconds that solves take while the `with` lasts, as they come."""
    spent: list[float] = []

    def timed(solve: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            started = time.process_time()
            answer = solve(*arguments, **named)
            spent.append(time.process_time() - started)
            return answer

        return call

    with (
        patch.object(rowsites, "min_norm_update", timed(rowsites.min_norm_update)),
        patch.object(JointPostNorm, "solve", timed(JointPostNorm.solve)),
    ):
        yield spent


def cost(chosen: list[str]) -> None:
    """A row per model and length, all or those chosen; written as they come."""
    path = FOLDER / "sequence-cost.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {(row["model"], row["positions"]): row for row in rows}
    names = [name for name in LENGTHS if name in chosen] or list(LENGTHS)
    lengths = [int(word) for word in chosen if word.isdigit()]
    for name in names:
        for n in lengths or LENGTHS[name]:
            found[name, n] = {"model": name, "context": CONTEXT, "positions": n, **_cost(bound_model(name), n)}
            print(found[name, n], flush=True)  # noqa: T201
            order = list(LENGTHS)
            rows = [found[key] for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))]
            path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def _cost(bound: Bound, n: int) -> dict[str, Any]:
    """Two forwards and a fold alternate in one process; the solves are timed inside the fold. All in processor time.

    The forward with the context gives logits at all query positions, as the fold does: a vocabulary is wide.
    """
    context, query = random_ids(bound, CONTEXT), random_ids(bound, n)
    parts = split(bound, context, query)
    fold_sequence(bound, context, query[:8])  # warms up, and takes the fingerprint
    runs = []
    for _ in range(RUNS if n < LONG else 1):
        started = time.process_time()
        run(bound.model, parts.full, last=n)
        run(bound.model, parts.reduced)
        forwards = time.process_time() - started
        started = time.process_time()
        with solving() as solves:
            folded = fold_sequence(bound, context, query)
        runs.append((forwards, sum(solves), time.process_time() - started))
    ratios = [whole / (forwards + solved) for forwards, solved, whole in runs]
    return {
        "threads": torch.get_num_threads(), "clock": "processor",
        "fold_over_forwards_and_solves": statistics.median(ratios),
        "from": min(ratios), "to": max(ratios),
        "solves_over_forwards": statistics.median(solved / forwards for forwards, solved, _ in runs),
        "solve_seconds_per_layer": statistics.median(solved for _, solved, _ in runs) / len(bound.blocks),
        "patch_bytes": folded.patch.nbytes,
        "outcomes": sorted({layer.outcome for layer in folded.layers}),
    }  # fmt: skip


def memory() -> None:
    """Resident bytes at the peak, beside the formula. Freed pieces of memory go back at once, so none counts twice."""
    rows = []
    for name, n in PEAKS:
        command = [sys.executable, __file__, "peak", name, str(n)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        rows.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True).stdout))
        print(rows[-1], flush=True)  # noqa: T201
        result = {"torch": torch.__version__, "rows": rows}
        (FOLDER / "sequence-memory.json").write_text(json.dumps(result, indent=1) + "\n")


def peak(name: str, n: int) -> dict[str, Any]:
    """Of one fold in this process; what loading, binding and a first fold took is not counted."""
    bound = bound_model(name)
    context, query = random_ids(bound, CONTEXT), random_ids(bound, n)
    fold_sequence(bound, context, query[:8])
    reset_peak()
    before = peak_memory()
    folded = fold_sequence(bound, context, query)
    found = peak_memory() - before
    d, f = bound.blocks[0].output_maps[0].weight.shape
    sizes = {"L": len(bound.blocks), "d": d, "f": f, "V": folded.in_context.shape[1]}
    expected = expected_peak(n=n + 1, c=CONTEXT, **sizes)
    logits = folded.in_context.numel() * folded.in_context.element_size()
    return {
        "model": name, "positions": n, "context": CONTEXT, **sizes, "peak_bytes": found, "expected_bytes": expected,
        "ratio": found / expected, "patch_bytes": folded.patch.nbytes, "logit_bytes": logits,
    }  # fmt: skip


def table() -> str:
    """Markdown: one patch for a sequence, recompression, cost, memory."""
    parts = (_sequence_lines(), _recompress_lines(), _cost_lines(), _memory_lines())
    return "\n".join(line for lines in parts for line in [*lines, ""])


def _sequence_lines() -> Iterator[str]:
    yield "| model | sites | positions | same token | worst gap | as action | without | one rounding | other text |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, arguments in commands().items():
        path = FOLDER / f"{name}.json"
        if not name.startswith("sequence") or not path.exists():
            continue
        row = json.loads(path.read_text())
        sites = row["sites"] + (", whitened" if "--typical" in arguments else "")
        yield (
            f"| {row['model']} | {sites} | {row['tokens']} | {row['top1_matches']}{'' if row['proven'] else ' (!)'} | "
            f"{row['worst_logit_gap']:.1e} | {row['action_worst_logit_gap']:.1e} | {row['unpatched_logit_gap']:.0f} | "
            f"{row['perturbed_top1_matches']}, {row['perturbed_worst_logit_gap']:.1e} | "
            f"{row['elsewhere']['mean_kl_nats']:.2g} nats |"
        )


def _recompress_lines() -> Iterator[str]:
    yield "| model | tol | mean rank | bytes left | same token | worst gap |"
    yield "|---|---|---|---|---|---|"
    for name, found in json.loads((FOLDER / "recompress.json").read_text()).items():
        for row in found["rows"]:
            yield (
                f"| {name} | {row['tol']:.0e} | {row['mean_rank']:.0f} | {row['bytes'] / found['bytes']:.0%} | "
                f"{row['top1_matches']} / {found['tokens']} | {row['worst_logit_gap']:.2g} |"
            )


def _cost_lines() -> Iterator[str]:
    yield "| model | positions | fold / (two forwards + solves) | solves / two forwards | solves, s per layer |"
    yield "|---|---|---|---|---|"
    rows = json.loads((FOLDER / "sequence-cost.json").read_text())["rows"]
    for row in rows:
        yield (
            f"| {row['model']} | {row['positions']} | {row['fold_over_forwards_and_solves']:.2f} | "
            f"{row['solves_over_forwards']:.2f} | {row['solve_seconds_per_layer']:.3f} |"
        )
    yield ""
    for name, lengths in LENGTHS.items():
        points = [(row["positions"], row["solve_seconds_per_layer"]) for row in rows if row["model"] == name]
        if len(lengths) > 1:
            low, high = points[0], points[-1]
            yield (
                f"{name}: solves grow as n to the {_slope(points):.2f}, fitted from {low[0]} to {high[0]} positions; "
                f"to the {_slope(points[-3:]):.2f} over the last three."
            )
    wide = [
        (int(row["model"].split("-")[2]), row["solve_seconds_per_layer"]) for row in rows if "random" in row["model"]
    ]
    yield f"random: as d to the {_slope(wide):.2f}, from {wide[0][0]} to {wide[-1][0]}, with f = 3 d."


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Of `log y` over `log x`, least squares."""
    x, y = (torch.tensor([math.log(point[k]) for point in points]) for k in (0, 1))
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (x @ x))


def _memory_lines() -> Iterator[str]:
    yield "| model | L | d | f | V | positions | peak, MB | formula, MB | ratio | patch, MB | logits, MB |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in json.loads((FOLDER / "sequence-memory.json").read_text())["rows"]:
        sizes = " | ".join(str(row[name]) for name in ("L", "d", "f", "V", "positions"))
        name = "random" if row["model"].startswith("random") else row["model"]
        found, expected, patch_, logits = (
            f"{row[f'{part}_bytes'] / 1e6:.0f}" for part in ("peak", "expected", "patch", "logit")
        )
        yield f"| {name} | {sizes} | {found} | {expected} | {row['ratio']:.2f} | {patch_} | {logits} |"


def main() -> None:
    warnings.filterwarnings("ignore")
    match sys.argv[1:]:
        case ["families", *types]:
            families(types)
        case ["recompress"]:
            recompress()
        case ["cost", *names]:
            cost(names)
        case ["memory"]:
            memory()
        case ["peak", name, n]:
            sys.stdout.write(json.dumps(peak(name, int(n))) + "\n")
        case ["table"]:
            sys.stdout.write(table())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    with torch.no_grad():
        main()
