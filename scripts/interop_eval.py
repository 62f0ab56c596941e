"""A baked patch in lm-evaluation-harness: multiple-choice questions about facts that are no longer in the prompt.

Bakes the fact sheet of `scripts/bake/facts.json` into SmolLM2-135M-Instruct, scores the tasks of `scripts/evaluation`
with and without the patch, and writes `docs/measured/evaluation.json`. Fails unless the patched model is nearer to the
one with the sheet in its prompt than the unpatched one is, and right more often, and a patch with its sign turned is
further away. Needs an environment with lm-eval (`make interop-eval`); minutes on one core.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "measured" / "evaluation.json"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lm_eval  # noqa: E402 (the environment comes first)
import torch  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import contextfold as cf  # noqa: E402
from contextfold.bake import Frame, answered, bake  # noqa: E402
from contextfold.evaluation import evaluating  # noqa: E402
from contextfold.patch import Patch  # noqa: E402
from contextfold.questions import questions  # noqa: E402
from contextfold.versions import versions  # noqa: E402

MODEL = "smollm2"
TOKENS = 24
"""Of an answer that is baked from, at most."""


def main() -> None:
    torch.set_grad_enabled(False)
    os.chdir(ROOT)  # the tasks name their files from here
    loaded = cf.load(MODEL)
    bound = cf.bind(loaded.model)
    patch = _baked(bound, loaded.tokenizer)
    manager = TaskManager(include_path=str(ROOT / "scripts" / "evaluation"), include_defaults=False)

    def score(task: str, edit: Patch | None) -> dict[str, Any]:
        with evaluating(bound, loaded.tokenizer, edit, batch_size=4) as lm:
            found = lm_eval.simple_evaluate(model=lm, tasks=[task], task_manager=manager, bootstrap_iters=0)
        nats = [[float(score) for ((score, _),) in sample["resps"]] for sample in found["samples"][task]]
        return {"accuracy": float(found["results"][task]["acc,none"]), "nats": nats}

    rows = {
        "sheet in the prompt": score("bells_in_context", None),
        "nothing": score("bells", None),
        "patch": score("bells", patch),
        "patch, sign turned": score("bells", patch * -1.0),
    }
    wanted = rows["sheet in the prompt"]["nats"]
    for row in rows.values():
        row["mean_gap_nats"] = _gap(row["nats"], wanted)
    found = {"model": MODEL, "lm_eval": version("lm-eval"), "versions": versions(), "questions": len(wanted)}
    OUT.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
    for name, row in rows.items():
        print(f"{name}: accuracy {row['accuracy']:.2f}, {row['mean_gap_nats']:.2f} nats from the sheet")  # noqa: T201
    nothing, turned, patched = (rows[name]["mean_gap_nats"] for name in ("nothing", "patch, sign turned", "patch"))
    if not (patched < nothing < turned and rows["patch"]["accuracy"] > rows["nothing"]["accuracy"]):
        sys.exit("the patch does not bring the model nearer to the one that has the sheet in its prompt")


def _baked(bound: cf.Bound, tokenizer: Any) -> Patch:
    """The sheet, baked on questions of other words than those of the task."""
    sheet = json.loads((ROOT / "scripts" / "bake" / "facts.json").read_text())
    laid = questions(tokenizer, sheet["context"], sheet["queries"])
    frame = Frame(laid.kept, laid.context)
    return bake(bound, frame, answered(bound, frame.full, laid.tails, tokens=TOKENS, stop=laid.stop)).patch


def _gap(first: list[list[float]], second: list[list[float]]) -> float:
    """Mean absolute difference of the log-probabilities of all choices, in nats, relative within each question.

    What all choices of a question share says nothing about which one is taken.
    """
    gaps = []
    for mine, theirs in zip(first, second, strict=True):
        a, b = torch.tensor(mine).log_softmax(0), torch.tensor(theirs).log_softmax(0)
        gaps.append(float((a - b).abs().mean()))
    return sum(gaps) / len(gaps)


if __name__ == "__main__":
    main()
