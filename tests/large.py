"""A model that is larger than what a process may take, and the work on it in a process of its own.

`python large.py FOLDER CEILING` prints one line of JSON: peak and ceiling in bytes, and what was proven.
"""

from __future__ import annotations

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
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
CONTEXT, QUERY = "The code word is zebra. Remember it.", "What is it?"


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


def measured(folder: Path, ceiling: int | None) -> dict[str, Any]:
    """The work of `main` in a process of its own. `ceiling`: bytes above what the process takes without a model."""
    command = [sys.executable, __file__, str(folder), str(ceiling or 0)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def main(folder: str, room: int) -> dict[str, Any]:
    import transformers.models.llama.modeling_llama  # noqa: F401  # what any process with a Llama takes

    import contextfold.models
    from contextfold.anatomy import bind
    from contextfold.ceiling import peak_memory, used_memory
    from contextfold.prompts import encode
    from contextfold.runtime import run
    from contextfold.verify import Prompt, fold_and_prove, fold_and_prove_sequence

    before = used_memory()
    loaded = contextfold.models.load(folder, max_memory=before + room if room else None)
    found: dict[str, Any] = {"before": before, "ceiling": before + room if room else None}
    if loaded.placement is None:
        from contextfold.runtime import Run

        run(loaded.model, Run(torch.tensor([1, 2]), torch.arange(2)))
    else:
        found |= {"resident": loaded.placement.resident, "streamed": loaded.placement.streamed}
        bound = bind(loaded.model)
        ids = encode(loaded.tokenizer, CONTEXT, QUERY)
        prompt = Prompt(ids.context, ids.query, ((0, 1),))
        for name, prove in (("token", fold_and_prove), ("sequence", fold_and_prove_sequence)):
            _, verdict = prove(bound, prompt)
            told = verdict.to_json()
            found[name] = {key: told[key] for key in ("proven", "worst_logit_gap", "unpatched_logit_gap")}
    return {**found, "peak": peak_memory()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))  # noqa: T201
