"""Runs under `torchrun`: what the tests of models that are shared out over processes let each of the processes do.

`python processes.py WORK FOLDER` in every process; each writes what it found to `FOLDER/<rank>.json`, where the test
reads it in a process of its own and compares it with a model in one piece.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

SECONDS = 120
"""Far above need: what hangs is killed, with all its processes."""


def together(work: str, folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """What each of `count` processes found. Fails when one of them does, or when they wait for each other."""
    run = start([__file__, work, str(folder)], count)
    assert run.returncode == 0, "\n".join(line for line in run.stderr.splitlines() if line.startswith("[rank"))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def start(command: list[str], count: int = 2) -> subprocess.CompletedProcess[str]:
    """`torchrun` with so many processes of `command`; none of them outlives it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    process = subprocess.Popen(
        [*torchrun, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed, said = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, printed, said)


MLP = "model.layers.*.mlp"
WHOLE = {f"{MLP}.{name}": "replicate" for name in ("gate_proj", "up_proj", "down_proj")}

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    # what is shared out -> model type, sizes, what the plan says otherwise
    "sharded": ("llama", {"mlp_bias": True}, {}),
    "uneven": ("llama", {"intermediate_size": 49}, {}),
    "fused": ("phi3", {"pad_token_id": 0}, {}),
    "through norms": ("gemma3_text", {"query_pre_attn_scalar": 8}, {}),
    "replicated": ("llama", {}, WHOLE),
    "fused, cut in halves": (
        "phi3",
        {"pad_token_id": 0},
        {f"{MLP}.gate_up_proj": "packed_colwise", f"{MLP}.down_proj": "rowwise"},
    ),
}


def build(kind: str) -> nn.Module:
    """A tiny model of one kind, in float64, perturbed."""
    from tiny import COMMON

    model_type, sizes, _ = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **sizes}, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.add_((0.3 if parameter.dim() == 1 else 0.15) * torch.randn_like(parameter))
    return model.double().eval()


def load(folder: Path, plan: dict[str, str] | str | None = None) -> nn.Module:
    """The model in `folder`, whole, or by this plan shared out over the processes that run this."""
    from transformers.distributed import DistributedConfig

    options = {} if plan is None else {"distributed_config": DistributedConfig(tp_plan=plan)}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", **options
    ).eval()


def held(model: nn.Module) -> str:
    """Of every bit that this process holds."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(part.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def fold_all(folder: Path, rank: int) -> dict[str, Any]:
    """Every kind folded, written, applied and judged, in the processes together."""
    import contextfold as cf
    from contextfold import patchfile
    from contextfold.fold import fold_sequence
    from tiny import tokens

    found: dict[str, Any] = {}
    context, query = tokens(12), tokens(3, seed=2)
    for kind, (_, _, plan) in KINDS.items():
        model = load(folder / kind, plan or "auto")
        before = held(model)
        bound = cf.bind(model)
        parts = cf.split(bound, context, query)
        met: dict[str, Any] = {"fingerprint": bound.fingerprint}
        for name, door in (("token", cf.fold_token), ("sequence", fold_sequence)):
            for written in (True, False):
                patch = door(bound, context, query, written=written).patch
                patchfile.save(patch, folder / f"{kind}-{name}-{written}-{rank}.safetensors")
                with (cf.materialised if written else cf.applied)(bound, patch) as edited:
                    met[f"{name}-{written}"] = cf.run(edited, parts.reduced, 3).tolist()
                    met["other bits"] = held(model) != before
                met["same bits"] = held(model) == before
        verdict = cf.fold_and_prove(bound, cf.Prompt(context, query))[1]
        met |= {"proven": verdict.proven, "gap": verdict.worst_logit_gap, "unpatched": verdict.unpatched_logit_gap}
        found[kind] = met
    return found


WORK = {"fold_all": fold_all}


def main() -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    work, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    found = WORK[work](folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
