"""Everything that is solved, exported and generated from fixed inputs, by what it is to the bit.

    python tests/samebits.py THREADS MODEL FILE WORK ...

writes all tensors of these works of one process into a safetensors file, and, where `company` is among them, into its
metadata what the company in a batch changes; another process is another run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": sys.argv[1], "HF_HUB_OFFLINE": "1"}

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tiny
from contextfold.anatomy import Bound, bind
from contextfold.bake import Frame, answered, bake
from contextfold.export import Checkpoint, PeftFolder, Source, export
from contextfold.fold import fold_sequence, fold_token
from contextfold.patch import Edit, MatrixEdit, Patch
from contextfold.patchfile import packed
from contextfold.stepwise import Window, generate

WORKS = ("fold_token", "fold_sequence", "bake", "export", "generate")

COMPANY = "company"
"""Work that is compared within one process."""

CONTEXT, QUERY = 11, 24
"""Tokens."""


def model_of(name: str) -> nn.Module:
    """A tiny model by its type, or a built-in one."""
    if name in tiny.TYPES:
        return tiny.build(name, torch.float32)
    from contextfold import models

    return models.load(name).model


def everything(bound: Bound, works: Collection[str] = WORKS) -> dict[str, Tensor]:
    """All results of these works by the name of the work and of the tensor."""
    found: dict[str, Tensor] = {}
    context, query = _tokens(bound, CONTEXT, 1), _tokens(bound, QUERY, 3)
    if {"fold_token", "export"} & set(works):
        folded = fold_token(bound, context, query)
        if "fold_token" in works:
            found |= _named("fold_token", folded.patch)
        if "export" in works:
            found |= {f"export/{name}": each for name, each in _exported(bound, folded.patch).items()}
    if "fold_sequence" in works:
        found |= _named("fold_sequence", fold_sequence(bound, context, query).patch)
    if "bake" in works:
        found |= _baked(bound, context)
    if "generate" in works:
        prompts = [context, _tokens(bound, 7, 9)]
        steps = list(generate(bound, prompts, Window(), tokens=6, prove_every=2, temperature=1.0))
        found["generate/tokens"] = torch.tensor([step.chosen for step in steps])
        found["generate/gaps"] = torch.tensor([step.logit_gap for step in steps], dtype=torch.float64)
    return {name: each.contiguous().clone() for name, each in found.items()}


def _named(work: str, patch: Patch) -> dict[str, Tensor]:
    return {f"{work}/{name}": each for name, each in packed(patch.edits)[0].items()}


def _baked(bound: Bound, context: Tensor) -> dict[str, Tensor]:
    frame = Frame(_tokens(bound, 2, 5), context)
    asked = [_tokens(bound, 3 + i % 3, 50 + i) for i in range(5)]
    examples = answered(bound, frame.full, asked, tokens=4, temperature=1.0)
    answers = {f"bake/answer {i}": e.tail for i, e in enumerate(examples)}
    return answers | _named("bake", bake(bound, frame, examples, lam0=1e-2).patch)


def composition(bound: Bound) -> dict[str, float]:
    """What the company in a batch changes: tokens that differ, and the largest relative difference of a baked map."""
    context = _tokens(bound, CONTEXT, 1)
    frame = Frame(_tokens(bound, 2, 5), context)
    asked = [_tokens(bound, 3 + i % 3, 50 + i) for i in range(9)]
    together = answered(bound, frame.full, asked, tokens=6)
    alone = [answered(bound, frame.full, [each], tokens=6)[0] for each in asked]
    one, many = (bake(bound, frame, together, lam0=1e-2, batch=size).patch.edits for size in (1, 9))
    maps = [(each.delta.to_dense(), many[site].delta.to_dense()) for site, each in one.items() if _is_map(each)]
    prompts = [context, _tokens(bound, 7, 9), _tokens(bound, 15, 11)]
    batch = list(generate(bound, prompts, Window(), tokens=6, prove_every=3))
    single = [step for each in prompts for step in generate(bound, each, Window(), tokens=6, prove_every=3)]
    batch.sort(key=lambda step: (step.sequence, step.index))
    return {
        "answers": len(asked),
        "other_answers": sum(not torch.equal(a.tail, b.tail) for a, b in zip(alone, together, strict=True)),
        "bake_relative": max(float((a - b).norm() / a.norm()) for a, b in maps),
        "generated": len(single),
        "other_tokens": sum(a.chosen != b.chosen for a, b in zip(single, batch, strict=True)),
        "gap_logits": max(abs(a.logit_gap - b.logit_gap) for a, b in zip(single, batch, strict=True)),
    }


def _is_map(edit: Edit) -> bool:
    return isinstance(edit, MatrixEdit)


def _tokens(bound: Bound, count: int, seed: int) -> Tensor:
    return torch.randint(0, bound.vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


def _exported(bound: Bound, patch: Any) -> dict[str, Tensor]:
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for exporter in (PeftFolder(), Checkpoint()):
            folder = Path(place) / exporter.name
            export(Source(bound, patch), exporter, folder)
            for file in sorted(folder.glob("*.safetensors")):
                found |= {f"{exporter.name} {name}": each for name, each in load_file(file).items()}
            others = b"".join(each.read_bytes() for each in sorted(folder.iterdir()) if each.suffix == ".json")
            found[f"{exporter.name} json"] = torch.frombuffer(bytearray(others), dtype=torch.uint8)
    return found


def apart(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Per work, how many tensors are not the same bits, and the largest relative difference in norm."""
    rows = {work: {"tensors": 0, "other_bits": 0, "relative": 0.0} for work in WORKS}
    for name in sorted(set(one) | set(two)):
        row = rows[name.split("/")[0]]
        row["tensors"] += 1
        a, b = one.get(name), two.get(name)
        if a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b):
            continue
        row["other_bits"] += 1
        if a is None or b is None or a.shape != b.shape:
            row["relative"] = float("inf")
        else:
            # Gaps are rounding themselves: what they differ by is told in logits.
            size = 1.0 if name.endswith("gaps") else a.double().norm().clamp_min(torch.finfo(torch.float64).tiny)
            row["relative"] = max(row["relative"], float((a.double() - b.double()).norm() / size))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    bound = bind(model_of(sys.argv[2]))
    company = composition(bound) if COMPANY in sys.argv[4:] else {}
    save_file(everything(bound, sys.argv[4:]), sys.argv[3], metadata={name: str(n) for name, n in company.items()})
