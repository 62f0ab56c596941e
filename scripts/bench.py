"""What folding costs, as ratios measured side by side in one run, and how they grow.

python scripts/bench.py run [FILTER]     # measure the cases whose name matches, write docs/measured/bench.json
python scripts/bench.py table            # put the table of that file between the markers of docs/stepwise.md
python scripts/bench.py peak WAY MODEL CONTEXT   # one process, one way of decoding: its peak memory in bytes

The two sides of a ratio alternate, step by step or call by call, so that a busy machine slows both. Cases:

a  a step of stepwise generation over a step of plain cached greedy decoding; with and without the proofs
b  the naive algorithm (full recompute for every token) over a step of stepwise generation, with and without proofs;
   as printed, the full pass is a plain call of the model, which computes logits at every position; spared, it is asked
   for the last ones only. And the bound of both: the full pass alone, so spared, over a step of plain decoding
c  folding for a query over one plain forward of context and query
d  decoding with a stored patch, as action and written, over decoding without
e  peak memory of each way over that of plain decoding
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from contextfold import models
from contextfold.anatomy import Bound, bind
from contextfold.ceiling import peak_memory, reset_peak
from contextfold.fold import TokenTargets, fold_token, split
from contextfold.runtime import Decoder, applied, materialised, recording, run
from contextfold.stepwise import generate

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "docs" / "measured" / "bench.json"
DOCUMENT = ROOT / "docs" / "stepwise.md"
MARKERS = re.compile(r"(<!-- bench: [^>]*-->\n).*?(<!-- /bench -->)", re.DOTALL)

MODELS = ("smollm2", "gemma3-270m")
CONTEXTS = (128, 512, 2048)
QUERY = 16
PROVE_EVERY = 40
"""The default of `generate`: one proof in so many steps."""

Ratios = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """One thing to measure. `measure` gives ratios by name, one per run."""

    name: str
    model: str
    sizes: dict[str, int]
    threads: int
    measure: Callable[[], Ratios] = field(repr=False)


@cache
def bound_model(name: str) -> Bound:
    """A built-in model, or a random one called `random-LAYERS-WIDTH`."""
    if not name.startswith("random"):
        return bind(models.load(name).model)
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width = map(int, name.split("-")[1:])
    config = LlamaConfig(
        vocab_size=8000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    return bind(LlamaForCausalLM(config).eval())


def random_ids(bound: Bound, count: int) -> torch.Tensor:
    return torch.randint(0, min(bound.vocabulary, 8000), (count,), generator=torch.Generator().manual_seed(count))


def plain_steps(bound: Bound, ids: torch.Tensor) -> Iterator[int]:
    """Greedy decoding with the model's own cache, a token at a time."""
    decoder = Decoder(bound.model)
    token = int(decoder.extend(ids).argmax())
    while True:
        yield token
        token = int(decoder.extend(torch.tensor([token])).argmax())


def clock() -> float:
    """Seconds: of the processor for one thread, so that others on the machine count little; of the wall for several."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(call: Callable[[], Any]) -> float:
    started = clock()
    call()
    return clock() - started


def against_plain(model: str, context: int, runs: int) -> Ratios:
    """(a)."""
    bound = bound_model(model)
    ids = random_ids(bound, context)
    plain = plain_steps(bound, ids)
    folded = generate(bound, ids, tokens=runs * PROVE_EVERY + 1, prove_every=PROVE_EVERY)
    next(plain), next(folded)  # prefill, the check of the first row and the first proof
    found: Ratios = {"a stepwise / plain, unproven steps": [], "a stepwise / plain, proofs included": []}
    for _ in range(runs):
        spent, with_proof, reference, bare = 0.0, 0.0, 0.0, 0.0
        for _ in range(PROVE_EVERY):
            reference_step = seconds(lambda: next(plain))
            started = clock()
            token = next(folded)
            step = clock() - started
            reference, with_proof = reference + reference_step, with_proof + step
            if token.proof is None:
                spent, bare = spent + step, bare + reference_step
        found["a stepwise / plain, unproven steps"].append(spent / bare)
        found["a stepwise / plain, proofs included"].append(with_proof / reference)
    return found


def against_naive(model: str, context: int, runs: int) -> Ratios:
    """(b)."""
    bound = bound_model(model)
    ids = random_ids(bound, context)
    full = split(bound, ids[:-1], ids[-1:], keep=()).full

    def naive(targets: TokenTargets | None = None) -> None:
        folded = fold_token(bound, ids[:-1], ids[-1:], keep=(), targets=targets)
        with materialised(bound, folded.patch):
            run(bound.model, folded.split.reduced)

    def as_printed() -> None:
        with recording(bound.blocks, slice(-1, None), "zyt") as states:
            logits = bound.model(full.ids[None]).logits[0, -1]
        naive(TokenTargets(full, bound.weights, logits, tuple(states)))

    naive(), as_printed()
    found: Ratios = {
        f"b naive, {way} / stepwise, {which}": []
        for way in ("as printed", "spared")
        for which in ("unproven steps", "proofs included")
    }
    found["b full pass / plain step"] = []
    plain = plain_steps(bound, ids)
    folded = generate(bound, ids, tokens=runs * PROVE_EVERY + 1, prove_every=PROVE_EVERY)
    next(folded), next(plain)
    for _ in range(runs):
        spent = {"as printed": seconds(as_printed), "spared": seconds(naive)}
        bare = seconds(lambda: [next(folded) for _ in range(PROVE_EVERY - 1)])
        with_proof = bare + seconds(lambda: next(folded))
        for way, recomputed in spent.items():
            found[f"b naive, {way} / stepwise, unproven steps"].append(recomputed * (PROVE_EVERY - 1) / bare)
            found[f"b naive, {way} / stepwise, proofs included"].append(recomputed * PROVE_EVERY / with_proof)
        alone = seconds(lambda: run(bound.model, full))
        found["b full pass / plain step"].append(alone * 8 / seconds(lambda: [next(plain) for _ in range(8)]))
    return found


def query_fold(model: str, context: int, runs: int) -> Ratios:
    """(c)."""
    bound = bound_model(model)
    ids, query = random_ids(bound, context), random_ids(bound, QUERY)
    full = split(bound, ids, query).full
    fold_token(bound, ids, query)
    found: Ratios = {"c fold of a query / one forward": []}
    for _ in range(runs):
        forward = seconds(lambda: run(bound.model, full))
        found["c fold of a query / one forward"].append(seconds(lambda: fold_token(bound, ids, query)) / forward)
    return found


def reuse(model: str, context: int, runs: int) -> Ratios:
    """(d)."""
    bound = bound_model(model)
    ids, query = random_ids(bound, context), random_ids(bound, QUERY)
    patch = fold_token(bound, ids, query).patch
    steps = {name: plain_steps(bound, query) for name in ("base", "action", "written")}
    ways = {
        "base": lambda: nullcontext(),
        "action": lambda: applied(bound, patch),
        "written": lambda: materialised(bound, patch),
    }
    found: Ratios = {"d patch as action / base": [], "d patch written / base": []}
    for k in range(runs + 1):
        spent = {}
        for name in list(ways)[k % 3 :] + list(ways)[: k % 3]:  # each goes first in turn
            with ways[name]():
                next(steps[name])  # what comes first finds the caches full of something else
                spent[name] = seconds(lambda name=name: [next(steps[name]) for _ in range(4)])
        if k:  # the first round warms up
            found["d patch as action / base"].append(spent["action"] / spent["base"])
            found["d patch written / base"].append(spent["written"] / spent["base"])
    return found


def memory(model: str, context: int) -> Ratios:
    """(e), each way in a process of its own."""

    def peak(way: str) -> int:
        command = [sys.executable, __file__, "peak", way, model, str(context)]
        return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)

    plain = peak("plain")
    ways = ("steps", "proven", "action", "written")
    return {f"e memory, {way} / plain": [peak(way) / plain] for way in ways}


def one_way(way: str, model: str, context: int) -> int:
    """Peak resident bytes of one way of decoding, the model included, what loading took left out."""
    bound = bound_model(model)
    ids = random_ids(bound, context)
    patch = fold_token(bound, ids[:-1], ids[-1:]).patch if way in ("action", "written") else None
    reset_peak()
    match way:
        case "steps" | "proven":
            # The first step is always proven, so that what a step takes is told by the steps after it.
            steps = generate(bound, ids, tokens=9, prove_every=4 if way == "proven" else 0)
            next(steps)
            if way == "steps":
                reset_peak()
            list(steps)
        case "action" | "written" | "plain":
            door = {"action": applied, "written": materialised}.get(way)
            with nullcontext() if door is None else door(bound, patch):
                steps = plain_steps(bound, ids)
                for _ in range(9):
                    next(steps)
    return peak_memory()


def cases() -> Iterator[Case]:
    every = torch.get_num_threads()
    for threads in sorted({1, every}):
        for model, context in product(MODELS, CONTEXTS if threads == 1 else CONTEXTS[1:2]):
            sizes = {"context": context}
            here, asked = f"{model} {context}", {**sizes, "query": QUERY}
            yield Case(f"a {here}", model, sizes, threads, lambda m=model, c=context: against_plain(m, c, 2))
            yield Case(f"c {here}", model, asked, threads, lambda m=model, c=context: query_fold(m, c, 3))
            if context == 512:
                yield Case(f"b {here}", model, sizes, threads, lambda m=model, c=context: against_naive(m, c, 2))
        for model in MODELS:
            sizes = {"context": 128, "query": QUERY}
            yield Case(f"d {model}", model, sizes, threads, lambda m=model: reuse(m, 128, 9))
    for model in MODELS:
        yield Case(f"e {model}", model, {"context": 512}, every, lambda m=model: memory(m, 512))
    grown = [(8, 512, 128), (8, 512, 512), (8, 512, 2048), (4, 512, 512), (16, 512, 512), (8, 256, 512), (8, 1024, 512)]
    for layers, width, context in grown:
        name, sizes = f"random-{layers}-{width}", {"layers": layers, "width": width, "context": context}
        here = f"{name} {context}"
        yield Case(f"a {here}", name, sizes, 1, lambda n=name, c=context: against_plain(n, c, 2))
        yield Case(f"b {here}", name, sizes, 1, lambda n=name, c=context: against_naive(n, c, 2))
        yield Case(f"c {here}", name, {**sizes, "query": QUERY}, 1, lambda n=name, c=context: query_fold(n, c, 5))


def rows(case: Case) -> Iterator[dict[str, Any]]:
    """What stands in the file; keys are documented in docs/json.md."""
    torch.set_num_threads(case.threads)
    reset_peak()
    measured = case.measure()
    peak = peak_memory()
    for name, ratios in measured.items():
        yield {
            "name": name,
            "model": case.model,
            "threads": case.threads,
            **case.sizes,
            "ratio_median": round(statistics.median(ratios), 4),
            "ratio_min": round(min(ratios), 4),
            "ratio_max": round(max(ratios), 4),
            "runs": len(ratios),
            "peak_bytes": peak,
        }


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(part, 0) for part in ("name", "model", "threads", "layers", "width", "context"))


def measure(pattern: str) -> None:
    """Rows are written as they come, and take the place of those measured before."""
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    stored = json.loads(RESULT.read_text()) if RESULT.exists() else {"cases": []}
    found = {key(row): row for row in stored["cases"]}
    for case in cases():
        if not re.search(pattern, case.name):
            continue
        sys.stderr.write(f"{case.name}, {case.threads} threads\n")
        found |= {key(row): row for row in rows(case)}
        result = {"torch": torch.__version__, "prove_every": PROVE_EVERY, "cases": sorted(found.values(), key=key)}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


def table() -> str:
    """Markdown: the built-in models side by side, then how the ratios grow with random ones; median, least and most."""
    stored = json.loads(RESULT.read_text())["cases"]
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    grown: dict[tuple[int, ...], dict[str, str]] = {}
    for row in stored:
        median, low, high = (f"{row[f'ratio_{which}']:.3g}" for which in ("median", "min", "max"))
        value = median if low == high else f"{median} ({low} – {high})"
        if "layers" in row:
            grown.setdefault((row["layers"], row["width"], row["context"]), {})[row["name"]] = value
        else:
            cells.setdefault((row["name"], row["threads"], row["context"]), {})[row["model"]] = value
    names = sorted({name for values in grown.values() for name in values})
    lines = [f"| case | threads | context | {' | '.join(MODELS)} |", "|---|---|---|---|---|"]
    lines += [line((*at, *(values.get(model, "") for model in MODELS))) for at, values in sorted(cells.items())]
    lines += ["", f"| layers | width | context | {' | '.join(names)} |", "|---|---|---" + "|---" * len(names) + "|"]
    lines += [line((*at, *(values.get(name, "") for name in names))) for at, values in sorted(grown.items())]
    return "\n".join(lines) + "\n"


def line(cells: tuple[Any, ...]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def write_table() -> None:
    text = DOCUMENT.read_text()
    new, found = MARKERS.subn(lambda marks: f"{marks[1]}{table()}{marks[2]}", text)
    if not found:
        raise SystemExit(f"{DOCUMENT} has no markers for the table")
    DOCUMENT.write_text(new)


def main() -> None:
    match sys.argv[1:]:
        case ["run", *rest]:
            measure(rest[0] if rest else "")
        case ["table"]:
            write_table()
        case ["peak", way, model, context]:
            sys.stdout.write(f"{one_way(way, model, int(context))}\n")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    with torch.no_grad():
        main()
