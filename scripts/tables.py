"""Write the generated tables of the documentation: `python scripts/tables.py [--check]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contextfold.rules import REFERENCES, RULES

DOCS = Path(__file__).parent.parent / "docs"

HEAD = """\
# Rules

Every constructive proof, generated from `contextfold.rules.RULES` and `REFERENCES` by `scripts/tables.py`; do not edit
by hand. Letters are those of the equation sheet. Sources: [E] arXiv 2511.17864, [L] 2507.16003, [P] 2609.39329,
[ours] derived here.

A rule *matches* when it makes an inner function give without the context what it gave with it, and *reaches* when it
makes an outer function give any wanted output. `contextfold explain MODEL` says which of them each block of a model
allows and which it gets; `--rule NAME` asks for another.
"""

CLASS = """
## Members of the class through a norm

`output weight through a norm` and `output bias through a norm` are exact for any reference scale r; these are the
choices of it. The first is the default.
"""


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join([row(*head), row(*("---" for _ in head)), *(row(*cells) for cells in rows)]) + "\n"


def rules_page() -> str:
    """The text of `docs/rules.md`."""
    rules = table(
        ("rule", "does", "moves", "equation", "exact when", "minimal in that", "may meet", "source"),
        [
            (
                rule.name, f"{rule.serves.demand.value}es", rule.serves.kind.value, f"`{rule.equation}`",
                rule.condition, rule.minimal, ", ".join(outcome.label for outcome in rule.meets), rule.source,
            )
            for rule in RULES
        ],
    )  # fmt: skip
    members = table(
        ("member", "scale", "exact when", "minimal in that", "source"),
        [(m.name, f"`{m.equation}`", m.condition, m.minimal, m.source) for m in REFERENCES],
    )
    return f"{HEAD}\n{rules}{CLASS}\n{members}"


SUPPORT_HEAD = """\
# Supported models

Generated from `docs/measured/support.json` by `scripts/tables.py`; do not edit by hand. `make conformance` measures
both anew: every causal language model type that transformers {transformers} registers is built small and at random, its
norms, biases and multipliers moved off their trivial initial values, and a context is folded into it, or the type is
refused by name: **{exact} exact, {refused} refused, {neither} neither**.

A gap is the distance of the logits from those of the model with the context, as a fraction of what it is without a
patch; the worst over the family's types, in float64 over eager and sdpa attention. *Written*: weights written, the
unmodified model, alone, in a batch of two, and through its cache. *Action*: low-rank terms beside the weights. In
float64 the limit is 1e-10, and 1e-6 where some operation of the model computes in float32 whatever its dtype. In
narrower dtypes it is what rounding does to the model's own in-context logits, {float32:g} times that in float32 and
{bfloat16:g} times in bfloat16; a dash where the model does not run in one.

Anatomies: A a sequential pre-norm block, B with a norm after the MLP as well, C parallel attention and MLP, D a norm
after the MLP only, E a norm over the sum, M a mixer without an MLP.
"""

STATE_SPACE = """
## Context layers that are not attention

What mixes the tokens is never read, only what it adds to the stream. Structured state-space models other than Mamba
itself are covered by {ssd} (the structured state-space duality of Mamba-2, a state that decays by one number per head)
and {lru} (RG-LRU, a diagonal linear recurrence with gates); `examples/own_mixer.py` shows a mixer of your own.
Besides them, {other} mix tokens by Mamba, gated delta rules, lightning attention, matrix memories or short
convolutions.
"""

SSD = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
LRU = ("recurrent_gemma",)
OTHER_MIXERS = (
    "mamba", "falcon_mamba", "jamba", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    "olmo_hybrid", "minimax", "xlstm", "lfm2", "lfm2_moe",
)  # fmt: skip

WRITTEN, ACTION = ("written", "batch", "cached"), ("action",)


def support_page() -> str:
    """The text of `docs/support.md`."""
    found = json.loads((DOCS / "measured" / "support.json").read_text(encoding="utf-8"))
    types: Mapping[str, Mapping[str, Any]] = found["model_types"]
    exact = {name: entry for name, entry in types.items() if entry["status"] == "exact"}
    roundings = found["limits"]["times rounding"]
    head = SUPPORT_HEAD.format(**found["counts"], **roundings, transformers=found["versions"]["transformers"])
    families: dict[str, list[str]] = {}
    for name, entry in sorted(exact.items(), key=lambda item: (item[1]["family"], item[0])):
        families.setdefault(entry["family"], []).append(name)
    return "\n".join(
        (
            head,
            table(
                ("family", "model types", "anatomy", "status", *(f"{d}, {w}" for d in DTYPES for w in WAYS)),
                [_family_row(family, names, exact) for family, names in families.items()],
            ),
            _discovery(exact),
            STATE_SPACE.format(ssd=listed(SSD, exact), lru=listed(LRU, exact), other=listed(OTHER_MIXERS, exact)),
            "## Refused\n",
            table(
                ("model type", "status", "reason"),
                [(f"`{name}`", entry["status"], entry["reason"]) for name, entry in types.items() if name not in exact],
            ),
        )
    )


DTYPES = ("float64", "float32", "bfloat16")
WAYS = {"written": WRITTEN, "action": ACTION}


def _family_row(family: str, names: Sequence[str], rows: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    anatomies = sorted({letter for name in names for letter in rows[name]["anatomy"].split("+")})
    gaps = (worst((rows[name] for name in names), dtype, keys) for dtype in DTYPES for keys in WAYS.values())
    return (family, ", ".join(f"`{name}`" for name in names), " ".join(anatomies), "exact", *gaps)


def worst(rows: Iterable[Mapping[str, Any]], dtype: str, keys: Sequence[str]) -> str:
    """Largest gap over the rows' runs in one dtype; a dash where no type could be run in it."""
    runs = [gaps for entry in rows for run, gaps in entry["gaps"].items() if run.startswith(dtype)]
    values = [gaps[key] for gaps in runs if not isinstance(gaps, str) for key in keys if key in gaps]
    return f"{max(values):.1e}" if values else "–"


def _discovery(exact: Mapping[str, Mapping[str, Any]]) -> str:
    others = {name: entry["discovery"] for name, entry in exact.items() if entry["discovery"] != "same sites"}
    told = "".join(f"\n- `{name}`: {words}" for name, words in others.items())
    return (
        f"Discovery, with no record to look at, names the same sites for {len(exact) - len(others)} of these "
        f"{len(exact)} types" + (f"; for the others it says why not:\n{told}\n" if others else ".\n")
    )


def listed(names: Sequence[str], exact: Mapping[str, Mapping[str, Any]]) -> str:
    """Names for a sentence that says that they are supported, so each has to be."""
    missing = [name for name in names if name not in exact]
    if missing:
        raise ValueError(f"the support page claims {', '.join(missing)}, which support.json does not show as exact")
    return ", ".join(f"`{name}`" for name in names)


PAGES = {"rules.md": rules_page, "support.md": support_page}


def main() -> int:
    """0 when all pages are as generated (or were written), 1 when `--check` finds one that is not."""
    stale = 0
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if "--check" in sys.argv[1:]:
            stale += not path.is_file() or path.read_text(encoding="utf-8") != text
        else:
            path.write_text(text, encoding="utf-8")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
