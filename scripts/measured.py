"""The figures of the README: run the commands, keep what they wrote, and print the table.

python scripts/measured.py run [FILTER]   # write docs/measured/*.json, those that match FILTER
python scripts/measured.py table          # put the table between the markers of README.md
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "measured"
MARKERS = re.compile(r"(<!-- measured: [^>]*-->\n).*?(<!-- /measured -->)", re.DOTALL)

RULES = ("balanced", "floored", "theorem", "appendix", "scalar", "flat")
UNDEFINED_ON_ZERO_SCALES = ("appendix", "scalar")

TEXTS = ROOT / "scripts" / "texts"
WORDS = {64: 55, 256: 219, 512: 448}
"""Words of the answer that make about so many tokens; the files say how many there really were."""

VARIANTS = {
    "all": ["--sites", "all"],
    "attention": ["--sites", "attention"],
    "typical": ["--typical", "@scripts/texts/typical.txt"],
    "attention-typical": ["--sites", "attention", "--typical", "@scripts/texts/typical.txt"],
}
"""Of one patch for a sequence: other sites, and the whitened form."""


def commands() -> dict[str, list[str]]:
    """File name -> arguments of `contextfold`."""
    found = {"demo": ["demo", "--json"]}
    for dtype in ("float32", "bfloat16"):
        for model, rules in (("smollm2", RULES[:1]), ("gemma3-270m", RULES)):
            for rule in rules:
                arguments = ["verify", "--suite", "paper", "--model", model, "--dtype", dtype, "--rule", rule, "--json"]
                if dtype == "bfloat16" and rule != RULES[0]:
                    arguments += ["--tokens", "4"]  # a look at the others; the default is measured in full
                if rule in UNDEFINED_ON_ZERO_SCALES:
                    arguments += ["--fallback", "floored"]
                found[f"paper-{model}-{dtype}-{rule}"] = arguments
    answer = (TEXTS / "answer.txt").read_text().split()
    for model in ("smollm2", "gemma3-270m"):
        for size, words in WORDS.items():
            query = " ".join(answer[:words])
            found[f"sequence-{model}-{size}"] = [
                "fold", model, "--context", "@scripts/texts/note.txt", "--query", query, "--positions", "all", "--json",
            ]  # fmt: skip
    for name, options in VARIANTS.items():
        found[f"sequence-smollm2-64-{name}"] = [*found["sequence-smollm2-64"], *options]
    return found


def run(pattern: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, arguments in commands().items():
        if not re.search(pattern, name):
            continue
        printed = subprocess.run(
            ["contextfold", *arguments], stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT
        ).stdout
        result = {"command": " ".join(["contextfold", *arguments]), **json.loads(printed)}
        (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def table() -> str:
    """Markdown rows from the files that are there."""
    rows = [
        "| model | dtype | rule | same token | worst gap | under one rounding | max abs dm | the model with itself | "
        "without patch |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in commands():
        path = FOLDER / f"{name}.json"
        if not name.startswith("paper") or not path.exists():
            continue
        r = json.loads(path.read_text())
        fallback = f" (else {r['fallback']})" if r["fallback"] else ""
        rule = r["rule"] if r["max_abs_dm"] else "no norm after the MLP"
        n = r["tokens"]
        cells = [
            r["model"],
            r["dtype"],
            rule + fallback,
            f"{r['top1_matches']} / {n}",
            f"{r['worst_logit_gap']:.2g}",
            f"{r['perturbed_top1_matches']} / {n}, {r['perturbed_worst_logit_gap']:.2g}",
            f"{r['max_abs_dm']:.2g}",
            f"{r['scatter_top1_matches']} / {n}, {r['scatter_logit_gap']:.2g}",
            f"{r['unpatched_logit_gap']:.3g}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def readme() -> str:
    """README.md with the table as it should be."""
    return MARKERS.sub(lambda found: found[1] + table() + found[2], (ROOT / "README.md").read_text())


def main() -> None:
    match sys.argv[1:]:
        case ["run", *rest]:
            run(rest[0] if rest else "")
        case ["table"]:
            (ROOT / "README.md").write_text(readme())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
