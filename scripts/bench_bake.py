"""Baking a context against other ways to have it, measured in one run on the same questions.

python scripts/bench_bake.py run [--models A,B] [--contexts A,B] [--only WAY,WAY] [--questions N] [--out FILE]
python scripts/bench_bake.py table       # put the tables between the markers of docs/bake.md, and draw the curves

`run` writes docs/measured/bake.json, a row when it is measured, in place of the row measured before; `--only cache`
measures the prefix cache alone, `--only composed` two contexts in one model. `--questions N` takes N questions of each
kind, for a quick look at another `--out`. Answers are kept in build/bake, so that a run that was stopped does not
generate them again. Keys: docs/json.md.

Seconds are of the processor for one thread (OMP_NUM_THREADS=1), of the wall otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from baking.composition import PAIRS, composed
from baking.distil import Distillation
from baking.judge import Judge, measured
from baking.material import CONTEXTS, ROOT, Material, Model, frame_of, material, model_of, write
from baking.report import page, pictures
from baking.rival import SIZES, prefix_cache
from baking.ways import Bake, Batch, Learnt, Nothing, Steering, TokenAverage, Way

from contextfold.bake import ESTIMATORS, Frame
from contextfold.patch import Patch
from contextfold.runtime import materialised
from contextfold.verify import Effect, Recovery, random_like, shuffled

RESULT = ROOT / "docs" / "measured" / "bake.json"
MODELS = ("smollm2", "gemma3-270m")
COMPOSES = ("smollm2",)
"""Models whose patches add: two that set the same norm scale do not."""
ASIDE = ("cache", "composed")
"""What is measured besides ways."""
DEFAULT = ESTIMATORS[0].name
BUDGET = 12
"""Gradient distillation gets so many times the seconds that the default estimator took."""

WAYS: tuple[Way, ...] = (
    Nothing("none"),
    *(Bake(e.name, "estimator", e.name) for e in ESTIMATORS),
    Bake(f"{DEFAULT}-sampled", "estimator", DEFAULT, answers=2),
    Bake("even", "variant", DEFAULT, answers=2, emphasis=1.0),
    *(Bake(f"{n} anchors", "variant", DEFAULT, answers=2, anchors=n) for n in (10, 30)),
    *(Bake(f"{n} questions", "variant", DEFAULT, answers=2, questions=n) for n in (8, 16, 32)),
    Batch("batch"),
    Steering("steering vector"),
    TokenAverage("token average"),
    Distillation("distillation"),
)


@dataclass(frozen=True, eq=False)
class Bench:
    """One context on one model, with everything that a way is judged by."""

    model: Model
    context: str
    stuff: Material
    held_out: Judge
    elsewhere: dict[str, Judge]
    unpatched: Effect

    @classmethod
    def of(cls, model: Model, context: str, most: int | None) -> Bench:
        stuff = material(model, context, most)
        held_out, *others = (
            Judge.of(model.bound, stuff.frame, part) for part in (stuff.held_out, *stuff.elsewhere.values())
        )
        return cls(model, context, stuff, held_out, dict(zip(stuff.elsewhere, others, strict=True)), held_out())

    def facts(self) -> dict[str, Any]:
        """Of the context, whatever the way."""
        frame, u = self.stuff.frame, self.unpatched.mean
        moved = {name: judge(frame.full).mean for name, judge in self.elsewhere.items()}
        return {
            "context_tokens": frame.context.numel(),
            "calibration_questions": len(self.stuff.calibration),
            "calibration_tokens": sum(e.tail.numel() for e in self.stuff.calibration),
            "held_out_questions": len(self.stuff.held_out),
            "kl_unpatched": u,
            "unpatched_top1": self.unpatched.top1,
            "elsewhere_context": {name: {"kl": kl, "kl_ratio": kl / u} for name, kl in moved.items()},
        }

    def row(self, way: Way) -> dict[str, Any]:
        """What one way reaches and what it takes. Keys are documented in docs/json.md."""
        bound, stuff = self.model.bound, self.stuff
        examples = way.chosen(stuff) if isinstance(way, Bake) else stuff.calibration
        learnt, cost = measured(lambda: way.learn(bound, stuff.frame, examples))
        remarks = dict(learnt.remarks)
        spent = remarks.pop("seconds_solve", cost.seconds)
        with learnt.acting():
            patched = Recovery.of(self.held_out(), self.unpatched)
            moved = {name: judge().mean / self.unpatched.mean for name, judge in self.elsewhere.items()}
        return {
            "kind": way.kind,
            **patched.to_json(),
            "kl_unpatched": self.unpatched.mean,
            "controls": dict(self.controls(way, learnt)),
            **{f"{name}_kl_ratio": ratio for name, ratio in moved.items()},
            "seconds_solve": spent,
            "seconds_generate": self.generated_in(way),
            "peak_bytes": cost.bytes + self.model.bytes,
            "weights_bytes": self.model.bytes,
            **remarks,
        }

    def generated_in(self, way: Way) -> float:
        """Seconds that the answers took that `way` learns from."""
        sampled = self.stuff.seconds_sampled if isinstance(way, Bake) and way.answers > 1 else 0.0
        whole = len(self.stuff.calibration)
        share = (way.questions or whole) / whole if isinstance(way, Bake) else 1.0
        return 0.0 if isinstance(way, Nothing) else share * (self.stuff.seconds + sampled)

    def controls(self, way: Way, learnt: Learnt) -> Iterator[tuple[str, dict[str, Any]]]:
        """Patches that must not do what this one does, and what their contexts do themselves, kept in the window."""
        if not isinstance(way, Bake) or learnt.patch is None or not way.stands_alone:
            return
        for name, frame in self.wrong(way):
            patch = way.learn(self.model.bound, frame, way.chosen(self.stuff)).patch
            assert patch is not None
            yield name, self.judged(patch, frame)
        yield "random", self.judged(random_like(learnt.patch))

    def wrong(self, way: Bake) -> Iterator[tuple[str, Frame]]:
        """What stands before the same questions instead. A shuffled context is tried with the default alone."""
        frame = self.stuff.frame
        name = CONTEXTS[(CONTEXTS.index(self.context) + 1) % len(CONTEXTS)]
        yield "other_context", replace(frame, context=frame_of(self.model, name).context)
        if way.method == DEFAULT:
            tokens = shuffled(frame.context, ())
            assert tokens is not None, "a context of several tokens has several orders"
            yield "shuffled", replace(frame, context=tokens)

    def judged(self, patch: Patch, frame: Frame | None = None) -> dict[str, Any]:
        with materialised(self.model.bound, patch):
            found = Recovery.of(self.held_out(), self.unpatched).to_json()
        if frame is not None:
            found["in_window"] = Recovery.of(self.held_out(frame.full), self.unpatched).to_json()
        return found


def timed(way: Way, bench: Bench, rows: dict[str, Any]) -> Way:
    """Distillation is told its budget, and on which questions its progress is watched."""
    if not isinstance(way, Distillation):
        return way
    if DEFAULT not in rows:
        raise SystemExit(f"distillation gets {BUDGET} times what {DEFAULT} took; measure that first")
    return replace(way, budget=BUDGET * rows[DEFAULT]["seconds_solve"], watch=lambda: bench.held_out().mean)


def against_baking(rows: dict[str, Any]) -> None:
    """When distillation reached what baking reached, as a multiple of what baking took; None if it did not."""
    if DEFAULT not in rows or "curve" not in rows.get("distillation", {}):
        return
    wanted, taken = (rows[DEFAULT][key] for key in ("kl_patched", "seconds_solve"))
    there = [spent for spent, kl in rows["distillation"]["curve"] if kl <= wanted]
    rows["distillation"] |= {
        "times_baking": there[0] / taken if there else None,
        "budget_times_baking": rows["distillation"]["seconds_solve"] / taken,
    }


def stored(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"models": {}}


def run(names: list[str], contexts: list[str], only: list[str], most: int | None, path: Path) -> None:
    """Rows are written as they come."""
    for name in names:
        model = model_of(name)
        if not only or "cache" in only:
            rows = [prefix_cache(model.bound, size) for size in SIZES]
            put(path, name, lambda entry, rows=rows: entry.update(prefix_cache=rows))
        known = {way.name: way for way in WAYS}
        if "composed" in only or (not only and name in COMPOSES):
            way = known[f"{DEFAULT}-sampled"]
            rows = [composed(model, way, *pair, most) for pair in PAIRS]
            put(path, name, lambda entry, rows=rows: entry.update(composition=rows))
        ways = [known[part] for part in only or known if part not in ASIDE]
        for context in contexts if ways else ():
            bench = Bench.of(model, context, most)
            put(path, name, partial(_add, context, {}, bench.facts()))
            for way in ways:
                rows = stored(path)["models"][name]["contexts"][context]["ways"]
                row = bench.row(timed(way, bench, rows))
                sys.stderr.write(
                    f"{name} {context} {way.name}: {row['kl_recovered']:.3f}, {row['seconds_solve']:.1f} s\n"
                )
                put(path, name, partial(_add, context, {way.name: row}, {}))
            del bench
            gc.collect()


def _add(context: str, rows: dict[str, Any], facts: dict[str, Any], entry: dict[str, Any]) -> None:
    found = entry.setdefault("contexts", {}).setdefault(context, {"ways": {}})
    found |= facts
    known = {**found.pop("ways"), **rows}
    order = [way.name for way in WAYS]
    found["ways"] = dict(sorted(known.items(), key=lambda item: order.index(item[0])))
    against_baking(found["ways"])


def put(path: Path, model: str, change: Any) -> None:
    """Read the file again, change what concerns `model`, and write it."""
    found = stored(path)
    found |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "budget": BUDGET}
    change(found["models"].setdefault(model, {}))
    write(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--contexts", default=",".join(CONTEXTS))
    parser.add_argument("--only", default="")
    parser.add_argument("--questions", type=int)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.command == "table":
        docs = ROOT / "docs" / "bake.md"
        docs.write_text(page(docs.read_text(), stored(given.out)))
        pictures(stored(given.out), ROOT / "docs" / "pictures")
        return
    known = {*(way.name for way in WAYS), *ASIDE}
    asked = [part for part in given.only.split(",") if part]
    if not known.issuperset(asked):
        parser.error(f"--only takes {', '.join(sorted(known))}")
    run(given.models.split(","), given.contexts.split(","), asked, given.questions, given.out)


if __name__ == "__main__":
    with torch.no_grad():
        main()
