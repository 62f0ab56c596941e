"""Runs under `torchrun`: what the tests of models that are shared out over processes let each of the processes do.

`python processes.py FOLDER` in every process; each writes what it found to `FOLDER/<rank>.json`, where the test reads
it in a process of its own and compares it with a model in one piece. In the end one of them stops before the other.
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


def together(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes found. Fails where one of them found nothing, or when they wait for each other."""
    run = start([__file__, str(folder)])
    found = [folder / f"{rank}.json" for rank in (0, 1)]
    said = "\n".join(line for line in run.stderr.splitlines() if line.startswith("[rank"))
    assert all(file.exists() for file in found), said
    return [json.loads(file.read_text()) | {"exit code": run.returncode} for file in found]


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
    # how maps are shared out -> model type, sizes (49: one process holds more), what the plan says otherwise
    "sharded": ("llama", {"mlp_bias": True, "intermediate_size": 49}, {}),
    "fused": ("phi3", {"pad_token_id": 0}, {}),
    "through norms": ("gemma3_text", {"query_pre_attn_scalar": 8}, {}),
    "replicated": ("llama", {}, WHOLE),
    "experts": ("qwen2_moe", {}, {}),
    "fused, cut in halves": (
        "phi3",
        {"pad_token_id": 0},
        {f"{MLP}.gate_up_proj": "packed_colwise", f"{MLP}.down_proj": "rowwise"},
    ),
}


def build(kind: str) -> nn.Module:
    """A tiny model of one kind, in float64, perturbed."""
    import zoo
    from tiny import COMMON

    model_type, sizes, _ = KINDS[kind]
    if kind == "experts":
        return zoo.build(model_type)
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
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager", **options
    ).eval()


def held(model: nn.Module) -> str:
    """Of every bit that this process holds."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(part.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


FOLDS = {"token": True, "sequence": False}
"""What is folded, and whether on written weights or beside them."""


def fold_all(folder: Path, rank: int) -> dict[str, Any]:
    """Every kind folded, lent to the model and judged, in the processes together."""
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
        for name, written in FOLDS.items():
            door = cf.fold_token if name == "token" else fold_sequence
            patch = door(bound, context, query, written=written).patch
            patchfile.save(patch, folder / f"{kind}-{name}-{rank}.safetensors")
            with (cf.materialised if written else cf.applied)(bound, patch) as edited:
                met[name] = cf.run(edited, parts.reduced, 3).tolist()
                met[f"{name}, same bits meanwhile"] = held(model) == before
            met[f"{name}, same bits"] = held(model) == before
        verdict = cf.fold_and_prove(bound, cf.Prompt(context, query))[1]
        met |= {"proven": verdict.proven, "gap": verdict.worst_logit_gap, "unpatched": verdict.unpatched_logit_gap}
        met["steps"] = steps_of(bound)
        found[kind] = met
    more = {"bake": bake_one(folder, rank), "refusals": refusals(folder), "command": command(folder)}
    return found | more


def steps_of(bound: Any) -> list[dict[str, Any]]:
    """Tokens generated step by step, every second one proven on written weights."""
    from contextfold.stepwise import Window, generate
    from tiny import tokens

    steps = generate(bound, tokens(9), Window(((0, 1),)), tokens=4, prove_every=2, temperature=1.0)
    return [
        {"tokens": (step.in_context, step.patched), "gap": step.logit_gap}
        | (
            {}
            if step.proof is None
            else {"written": step.proof.written.logit_gap, "size": step.proof.unpatched.logit_gap}
        )
        for step in steps
    ]


def command(folder: Path) -> tuple[int, str]:
    """What `contextfold generate`, in float32, prints in this process, and its exit code."""
    from contextlib import redirect_stdout
    from io import StringIO

    from contextfold.cli import app

    with redirect_stdout(StringIO()) as printed:
        try:
            app(
                [
                    "generate",
                    str(folder / "sharded"),
                    "--context",
                    "abc def. ",
                    "--prompt",
                    "the",
                    "--tokens",
                    "3",
                    "--json",
                ]
            )
        except SystemExit as end:
            return int(end.code or 0), printed.getvalue()
    raise AssertionError("a command ends with its code")


def bake_one(folder: Path, rank: int) -> str:
    """A bake on shared maps: sums over what maps read, and several forwards in step."""
    import contextfold as cf
    from contextfold import patchfile

    baked = baked_of(cf.bind(load(folder / "sharded", "auto")))
    return str(patchfile.save(baked.patch, folder / f"bake-{rank}.safetensors"))


def baked_of(bound: Any) -> Any:
    from contextfold.bake import Frame, answered, bake
    from tiny import tokens

    frame = Frame(tokens(2, seed=3), tokens(9, seed=4))
    examples = answered(bound, frame.full, [tokens(3 + i, seed=50 + i) for i in range(3)], tokens=3)
    return bake(bound, frame, examples, lam0=1e-4, batch=5)


def refusals(folder: Path) -> dict[str, str]:
    """What every process says where one of them, or none, can do what is asked."""
    import contextfold as cf
    from contextfold.errors import ContextfoldError
    from contextfold.export import Checkpoint, Source, export
    from contextfold.fold import fold_sequence
    from contextfold.lowrank import LowRank
    from contextfold.overlays import Written
    from contextfold.patch import MatrixEdit
    from tiny import tokens

    bound = cf.bind(load(folder / "sharded", "auto").to(torch.float32))
    patch = cf.fold_token(bound, tokens(12), tokens(3)).patch
    site = bound.blocks[0].maps[0].site
    too_large = LowRank(torch.zeros(49, 1, dtype=torch.float64), torch.full((1, 32), 1e30, dtype=torch.float64))
    too_large.B[-1] = 1e30  # in a row that the last process holds

    def write() -> None:
        with Written(bound.model, [site]) as overlay:
            overlay.put(site, MatrixEdit(too_large))

    asked = {
        "overflow on one process": write,
        "export": lambda: export(Source(bound, patch), Checkpoint(), folder / "exported"),
        "store": lambda: fold_sequence(bound, tokens(12), tokens(3), store=folder / "store"),
        "weights": lambda: bound.blocks[0].maps[0].weight,
    }
    found = {}
    for name, ask in asked.items():
        try:
            ask()
            found[name] = "done"
        except ContextfoldError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def one_stops(folder: Path, rank: int) -> None:
    """One process stops while the others have yet to hear from it."""
    import contextfold as cf
    from tiny import tokens

    bound = cf.bind(load(folder / "sharded", "auto"))
    if rank == 1:
        raise SystemExit(2)
    cf.fold_token(bound, tokens(12), tokens(3))
    (folder / "never").touch()


def main() -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    (folder / f"{rank}.json").write_text(json.dumps(fold_all(folder, rank)))
    torch.distributed.barrier()
    one_stops(folder, rank)


if __name__ == "__main__":
    main()
