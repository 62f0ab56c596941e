"""Measure a model of more than three times the memory that it may take: `python scripts/bigger.py run`, then `table`.

A Llama of random weights is written layer by layer. Every job runs in a process of its own with a ceiling; the same
jobs without one say what the patches have to be, bit for bit. Where the system lets us, a fold runs once more in a
control group: there the kernel gives no more than the ceiling, its cache of the files included, and kills what asks for
more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "docs" / "measured" / "bigger.json"
PAGE = ROOT / "docs" / "bigger.md"
CEILING = "700MiB"
SETTINGS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": 400,
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 13, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
CONTEXT, QUERY = "The code word is zebra.", "What is it?"
QUESTIONS = ("Who is it?", "Where is it?", "Why is it?")


def write_model(folder: Path) -> int:
    """Files of one layer each, and an index; bytes of all weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    random = torch.Generator().manual_seed(0)
    where: dict[str, str] = {}
    total = 0

    def save(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        nonlocal total
        tensors = {key: torch.randn(shape, generator=random) for key, shape in shapes.items()}
        tensors = {key: 1 + 0.1 * t if t.dim() == 1 else t.mul_(0.03) for key, t in tensors.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))
        total += sum(t.numel() * t.element_size() for t in tensors.values())

    d, f, kv = SETTINGS["hidden_size"], SETTINGS["intermediate_size"], SETTINGS["num_key_value_heads"]
    assert isinstance(d, int)
    assert isinstance(f, int)
    assert isinstance(kv, int)
    width = kv * int(str(SETTINGS["head_dim"]))
    maps = {"self_attn.q_proj": (d, d), "self_attn.k_proj": (width, d), "self_attn.v_proj": (width, d),
            "self_attn.o_proj": (d, d), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
            "input_layernorm": (d,), "post_attention_layernorm": (d,)}  # fmt: skip
    for k in range(int(str(SETTINGS["num_hidden_layers"]))):
        save(f"layer-{k:02}.safetensors", {f"model.layers.{k}.{name}.weight": shape for name, shape in maps.items()})
    ends = {"model.embed_tokens.weight": (400, d), "lm_head.weight": (400, d), "model.norm.weight": (d,)}
    save("ends.safetensors", ends)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    words = ["<unk>", "<bos>", *(chr(c) for c in range(32, 127))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<bos>").save_pretrained(folder)
    return total


def bake_job(folder: str, ceiling: str | None, out: str) -> None:
    """What `contextfold bake` does, on three questions, judged on what it learnt from; the patch is always kept."""
    from contextfold import models, patchfile
    from contextfold.anatomy import bind
    from contextfold.bake import Frame, answered, bake
    from contextfold.ceiling import peak_memory, read_size
    from contextfold.prompts import encode_text
    from contextfold.verify import evaluate

    loaded = models.load(folder, max_memory=None if ceiling is None else read_size(ceiling))
    bound = bind(loaded.model)
    text = encode_text(loaded.tokenizer, CONTEXT)
    frame = Frame(text[:1], text[1:])
    tails = [encode_text(loaded.tokenizer, question)[1:] for question in QUESTIONS]
    examples = answered(bound, frame.full, tails, tokens=4, stop=())
    baked = bake(bound, frame, examples)
    patchfile.save(baked.patch, out)
    verdict = evaluate(bound, baked, frame, examples).to_json()
    told = {key: verdict[key] for key in ("kl_recovered", "calibration_tokens")}
    told["random_recovered"] = verdict["controls"]["random_patch"]["kl_recovered"]
    print(json.dumps({**told, "peak_bytes": peak_memory()}))  # noqa: T201


class Group:
    """A control group of the kernel that holds no more memory than it is given; without one, nothing is enforced."""

    def __init__(self, size: int) -> None:
        self.path: Path | None = None
        for root, limit in (
            (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
            (Path("/sys/fs/cgroup"), "memory.max"),
        ):
            path = root / f"bigger-{os.getpid()}"
            try:
                path.mkdir()
                (path / limit).write_text(str(size))
            except OSError:
                if path.is_dir():
                    path.rmdir()
                continue
            self.path = path
            return

    def enter(self) -> None:
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        if self.path is not None:
            self.path.rmdir()


def measure(command: list[str], enter: Callable[[], None] | None) -> dict[str, Any]:
    """Run it; its JSON, seconds, and the most that was anonymous and that was mapped, sampled every 20 ms."""
    started, most = time.monotonic(), {"RssAnon": 0, "RssFile": 0}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=said, stderr=errors, env=environment, preexec_fn=enter)
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                break
            for key in most:
                found = re.search(rf"^{key}:\s+(\d+)", status, re.MULTILINE)
                most[key] = max(most[key], int(found[1]) * 1024 if found else 0)
            time.sleep(0.02)
        process.wait()
        said.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {errors.read()[-2000:]}")
        told = json.loads(said.read())
    told["anonymous_bytes"], told["mapped_bytes"] = most["RssAnon"], most["RssFile"]
    return {**told, "seconds": time.monotonic() - started}


KEYS = (
    "proven", "worst_logit_gap", "unpatched_logit_gap", "logit_gap", "base_gap", "kl_recovered", "random_recovered",
    "matched", "expected", "peak_bytes", "anonymous_bytes", "mapped_bytes", "seconds",
)  # fmt: skip


def commands(model: Path, work: Path, ceiling: str | None) -> dict[str, list[str]]:
    """By job, its command; patches go to `work`."""
    limit = [] if ceiling is None else ["--max-memory", ceiling]
    texts = ["--context", CONTEXT, "--query", QUERY, "--json", *limit]
    program = [sys.executable, "-m", "contextfold"]
    found = {
        "fold": [*program, "fold", str(model), *texts, "--out", str(work / "token")],
        "fold --positions all": [
            *program,
            "fold",
            str(model),
            *texts,
            "--positions",
            "all",
            "--out",
            str(work / "all"),
        ],
        "bake": [sys.executable, __file__, "work", str(model), ceiling or "none", str(work / "bake")],
    }
    if ceiling is None:
        return found
    found["verify --patch"] = [*program, "verify", str(model), *texts, "--patch", str(work / "all")]
    for target in ("peft", "checkpoint"):
        found[f"export --to {target}"] = [
            *program, "export", str(model), str(work / "all"), "--to", target, "--out", str(work / target), "--json",
            *limit,
        ]  # fmt: skip
    return found


def forget(folder: Path) -> None:
    """Let the kernel drop what it has cached of these files."""
    os.sync()
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def same(first: Path, second: Path) -> bool:
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(place: Path, ceiling: str) -> None:
    from contextfold.ceiling import read_size
    from contextfold.versions import versions

    work = Path(tempfile.mkdtemp(dir=place, prefix="bigger."))
    model, kept, plain = (work / name for name in ("model", "kept", "plain"))
    for folder in (model, kept, plain):
        folder.mkdir()
    group = Group(read_size(ceiling))
    found: dict[str, Any] = {
        "max_memory": read_size(ceiling), "limited_by_kernel": group.path is not None,
        "model": {key: SETTINGS[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        "threads": 1, "versions": versions(), "jobs": {},
    }  # fmt: skip

    def done(name: str, told: dict[str, Any], **more: Any) -> None:
        found["jobs"][name] = {**{key: told[key] for key in KEYS if told.get(key) is not None}, **more}
        print(name, found["jobs"][name], flush=True)  # noqa: T201
        MEASURED.write_text(json.dumps(found, indent=1) + "\n")

    try:
        found["weights_bytes"] = write_model(model)
        for name, command in commands(model, kept, ceiling).items():
            done(name, measure(command, None))
        if group.path is not None:
            forget(model)
            again = [*commands(model, kept, ceiling)["fold"][:-1], str(kept / "again")]
            done("fold, in a control group", measure(again, group.enter))
        for name, command in commands(model, plain, None).items():
            free, where = measure(command, None), Path(command[-1])
            done(
                name, found["jobs"][name], peak_bytes_without=free["peak_bytes"], seconds_without=free["seconds"],
                same_bits=same(kept / where.name, where),
            )  # fmt: skip
    finally:
        group.close()
        shutil.rmtree(work)


def table() -> str:
    found = json.loads(MEASURED.read_text())
    weights, ceiling = found["weights_bytes"], found["max_memory"]
    lines = [
        f"{weights / 2**20:.0f} MiB of float32 weights, {weights / ceiling:.2f} times the ceiling of "
        f"{ceiling / 2**20:.0f} MiB. MiB at the peak; seconds on one core, shared with other work.",
        "",
        "| job | proof | peak | of it anonymous | seconds | without a ceiling: peak | seconds | same bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, job in found["jobs"].items():
        free = (
            [f"{job['peak_bytes_without'] / 2**20:.0f}", f"{job['seconds_without']:.0f}"]
            if "same_bits" in job
            else ["", ""]
        )
        bits = {True: "yes", False: "no"}.get(job.get("same_bits"), "")
        cells = [f"`{name}`" if "," not in name else name, proof(job), f"{job['peak_bytes'] / 2**20:.0f}",
                 f"{job['anonymous_bytes'] / 2**20:.0f}", f"{job['seconds']:.0f}", *free, bits]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def proof(job: dict[str, Any]) -> str:
    if "worst_logit_gap" in job:
        word = "proven" if job["proven"] else "not proven"
        return f"{word}, gap {job['worst_logit_gap']:.1g} of {job['unpatched_logit_gap']:.2g}"
    if "base_gap" in job:
        word = "proven" if job["proven"] else "not proven"
        return f"{word}, {job['matched']} of {job['expected']}, {job['logit_gap']:.1g} of {job['base_gap']:.2g} off"
    return f"{job['kl_recovered']:.1%} of the effect; a random patch {max(job['random_recovered'], 0):.1%}"


def main() -> None:
    if sys.argv[1:2] == ["work"]:
        folder, ceiling, out = sys.argv[2:]
        bake_job(folder, None if ceiling == "none" else ceiling, out)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()), help="Folder with 8 GB to spare.")
    parser.add_argument("--ceiling", default=CEILING)
    given = parser.parse_args()
    if given.what == "run":
        run(given.place, given.ceiling)
    text = PAGE.read_text(encoding="utf-8")
    start, stop = "<!-- measured: scripts/bigger.py -->\n", "<!-- end -->"
    head, rest = text.split(start)
    PAGE.write_text(head + start + table() + "\n" + stop + rest.split(stop, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
