"""A model that is larger than what a process may take, and the work on it in a process of its own.

`python large.py WORK FOLDER ROOM` prints one line of JSON: sizes in bytes, and what was proven.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from tiny import letters

SETTINGS = {
    "vocab_size": 400,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
CONTEXT, QUERY = "The code word is zebra. Remember it.", "What is it?"
QUESTIONS = ("Who?", "Where is it?", "Why?")


def save(folder: Path, **settings: Any) -> int:
    """A Llama of random weights in several files, with its tokenizer; its bytes."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SETTINGS, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="60MB")
    letters().save_pretrained(folder)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def measured(folder: Path, room: int, work: str = "main") -> dict[str, Any]:
    """`main` or `sums` in a process of its own. `room`: bytes above what the process takes without a model."""
    command = [sys.executable, __file__, work, str(folder), str(room)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def main(folder: str, room: int) -> dict[str, Any]:
    import transformers.models.llama.modeling_llama  # noqa: F401  # what any process with a Llama takes

    import contextfold.bake
    import contextfold.ceiling
    import contextfold.models
    import contextfold.verify
    from contextfold.runtime import Run, run

    # Everything that would come later is here, so the margin is for the work alone.
    contextfold.ceiling.MARGIN //= 2
    before = contextfold.ceiling.used_memory()
    loaded = contextfold.models.load(folder, max_memory=before + room)
    found: dict[str, Any] = {"before": before, "ceiling": before + room, "streamed": loaded.placement.streamed}
    found |= _worked(loaded)
    found["peak"] = contextfold.ceiling.peak_memory()
    run(contextfold.models.load(folder).model, Run(torch.tensor([1, 2]), torch.arange(2)))
    return {**found, "peak_without": contextfold.ceiling.peak_memory()}


def _worked(loaded: Any) -> dict[str, Any]:
    """One token with its verdict, a sequence against the in-context logits, and a bake on what it learnt from."""
    from contextfold.anatomy import bind
    from contextfold.bake import Frame, answered, bake
    from contextfold.fold import fold_sequence
    from contextfold.prompts import encode, encode_text
    from contextfold.runtime import materialised, run
    from contextfold.verify import Prompt, evaluate, fold_and_prove

    bound = bind(loaded.model)
    ids = encode(loaded.tokenizer, CONTEXT, QUERY)
    _, verdict = fold_and_prove(bound, Prompt(ids.context, ids.query, ((0, 1),)))
    token = {key: verdict.to_json()[key] for key in ("proven", "worst_logit_gap", "unpatched_logit_gap")}
    folded = fold_sequence(bound, ids.context, ids.query)
    n = ids.query.numel()
    bare = run(bound.model, folded.split.reduced, n)
    with materialised(bound, folded.patch):
        met = run(bound.model, folded.split.reduced, n)
    frame = Frame(ids.context[:1], ids.context[1:])
    tails = [encode_text(loaded.tokenizer, text)[1:] for text in QUESTIONS]
    examples = answered(bound, frame.full, tails, tokens=4, stop=())
    baked = evaluate(bound, bake(bound, frame, examples), frame, examples)
    return {
        "token": token,
        "sequence": {
            "gap": float((met - folded.in_context).abs().max()),
            "unpatched": float((bare - folded.in_context).abs().max()),
        },
        "bake": {"recovered": baked.patched.share, "random": baked.controls["random_patch"].share},
    }


WIDE = {"hidden_size": 64, "intermediate_size": 3072, "num_hidden_layers": 1}
"""A map of so many inputs that the sums of a bake take more than the model."""


def sums(folder: str, room: int) -> dict[str, Any]:
    """A bake from more rows than a map has inputs, under a ceiling and then without one."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import contextfold.bake.solve
    import contextfold.models
    from contextfold.anatomy import bind
    from contextfold.bake import Example, Frame, bake
    from contextfold.bake.tiles import Tiles
    from contextfold.ceiling import peak_memory, reset_peak, used_memory
    from tiny import tokens

    contextfold.bake.tiles.TILE //= 2  # so that little of so small a file is in memory at once
    made: list[Tiles] = []
    contextfold.bake.moments.Tiles = lambda *shape: made.append(Tiles(*shape)) or made[-1]
    before = used_memory()
    found: dict[str, Any] = {"ceiling": before + room}
    frame = Frame(tokens(2), tokens(30, seed=1))
    examples = [Example(tokens(65, seed=k), 1) for k in range(48)]
    for name, ceiling in (("kept", before + room), ("free", None)):
        bound = bind(contextfold.models.load(folder, max_memory=ceiling).model)
        reset_peak()
        patch = bake(bound, frame, examples, batch=8).patch
        found[name] = {"peak": peak_memory(), "on_disk": [t.on_disk for t in made]}
        found[name]["sums"] = sum(tile.nbytes for t in made for _, tile in t.parts())
        factors = [part for edit in patch.edits.values() for part in (edit.delta.B, edit.delta.A)]
        found[name]["factors"] = hashlib.sha256(b"".join(f.contiguous().numpy().tobytes() for f in factors)).hexdigest()
        made.clear()
        del factors, patch, bound
    return found


if __name__ == "__main__":
    work = {"main": main, "sums": sums}[sys.argv[1]]
    print(json.dumps(work(sys.argv[2], int(sys.argv[3]))))  # noqa: T201
