"""How many wrong versions of the pure half the quick tests tell from the right one: `scripts/mutants.py N`.

mutmut makes the wrong versions, one small change each, and runs the tests that reach the changed function. A seeded
sample of N of them is tried, all of them without a number. Writes `docs/measured/mutants.json`; the reason that
stands there for a survivor stays with the same change. A run that was stopped goes on; `rm -r mutants` begins anew.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mutmut.__main__ as tool
from hypothesis import Phase, settings
from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from scipy.stats import beta

FIGURES = Path(__file__).parent.parent / "docs" / "measured" / "mutants.json"
SEED = 11
LEVEL = 0.95
"""Of the interval for the share that all mutants would give (Clopper-Pearson)."""

plain_collect = tool.collect_source_file_mutation_data
plain_run = PytestRunner.run_tests


def cheap_first(self: PytestRunner, *, mutant_name: str | None, tests: Iterable[str]) -> int:
    """The tests that take least come first: most mutants fall at once."""
    seconds = state().duration_by_test
    return plain_run(self, mutant_name=mutant_name, tests=sorted(tests, key=lambda test: (seconds.get(test, 0), test)))


def drawing(count: int | None) -> Any:
    """mutmut's list of mutants, cut to the sample."""

    def collect(*, mutant_names: Any) -> Any:
        found, by_path = plain_collect(mutant_names=mutant_names)
        names = draw((name for _, name, _ in found), count)
        return [row for row in found if row[1] in names], by_path

    return collect


def draw(names: Iterable[str], count: int | None) -> set[str]:
    ordered = sorted(names)
    return set(ordered if count is None else random.Random(SEED).sample(ordered, min(count, len(ordered))))


def module(name: str) -> str:
    """`contextfold.rules.joint.x_joint_scale__mutmut_3` stands in `rules.joint`."""
    return name.split(".x", 1)[0].removeprefix("contextfold.")


def change(name: str) -> tuple[str, str]:
    """The lines that differ: as they are, and as the mutant has them."""
    lines = get_diff_for_mutant(name, path=find_mutant(name).path).splitlines()[2:]
    sides = ["\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"]
    return sides[0], sides[1]


def report(count: int | None) -> dict[str, Any]:
    found, _ = plain_collect(mutant_names=())
    made = {name: status_by_exit_code[code] for _, name, code in found}
    tried = {name: made[name] for name in sorted(draw(made, count))}
    earlier = json.loads(FIGURES.read_text(encoding="utf-8"))["survivors"] if FIGURES.exists() else []
    reasons = {(row["is"], row["becomes"]): (row["equivalent"], row["why"]) for row in earlier}
    survivors = []
    for name in (name for name, status in tried.items() if status not in ("killed", "timeout")):
        pair = change(name)
        equivalent, why = reasons.get(pair, (False, ""))
        place = name.removeprefix("contextfold.").replace("ǁ", ".").replace(".x.", ".").replace(".x_", ".")
        survivors.append({"where": place.split("__mutmut")[0], "is": pair[0], "becomes": pair[1],
                          "equivalent": equivalent, "why": why})  # fmt: skip
    killed, total = len(tried) - len(survivors), len(tried)
    modules = Counter(module(name) for name in made)
    return {
        "tool": f"mutmut {version('mutmut')}", "seed": SEED, "made": len(made), "tried": total, "killed": killed,
        "equivalent": sum(row["equivalent"] for row in survivors), "survived": len(survivors),
        "killed_share": killed / total,
        "interval": [float(beta.ppf((1 - LEVEL) / 2, killed, total - killed + 1)),
                     float(beta.ppf((1 + LEVEL) / 2, killed + 1, max(total - killed, 1e-9)))],
        "modules": {
            name: {"made": modules[name], "tried": sum(module(one) == name for one in tried),
                   "killed": sum(module(one) == name and s in ("killed", "timeout") for one, s in tried.items())}
            for name in sorted(modules)
        },
        "survivors": survivors,
    }  # fmt: skip


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else None
    # Nothing to shrink, nothing to remember, and the same examples for every mutant.
    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, max_examples=25,
        phases=(Phase.explicit, Phase.generate),
    )  # fmt: skip
    PytestRunner.run_tests = cheap_first  # type: ignore[method-assign]
    tool.collect_source_file_mutation_data = drawing(count)
    tool._run((), 1)
    figures = report(count)
    FIGURES.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.stdout.write(f"\n{figures['killed']} of {figures['tried']} killed ({100 * figures['killed_share']:.1f} %)\n")


if __name__ == "__main__":
    main()
