"""The figures of docs/papers.md: run the commands, keep what they wrote, and print the tables.

python scripts/papers.py run [FILTER]   # write docs/measured/reproduce-*.json, those that match FILTER
python scripts/papers.py table          # put the tables between the markers of docs/papers.md
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

from contextfold.reproduce import PAPERS
from contextfold.reproduce.view import cell

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "measured"
PAGE = ROOT / "docs" / "papers.md"
MARKERS = re.compile(r"(<!-- papers ([\d.]+): [^>]*-->\n).*?(<!-- /papers -->)", re.DOTALL)


def path_of(number: str) -> Path:
    return FOLDER / f"reproduce-{number}.json"


def run(pattern: str) -> None:
    for paper in PAPERS:
        if re.search(pattern, paper.number):
            arguments = ["reproduce", paper.number, "--jobs", "2", "--out", str(path_of(paper.number))]
            subprocess.run(["contextfold", *arguments], check=True, cwd=ROOT)


def table(found: dict[str, object]) -> str:
    """Markdown from one file: a table per section, what is missing, and what ran."""
    model = f"`{found['model']}`" if found["model"] else "models trained on the spot"
    receipt = found["receipt"]
    parts = [
        f"{model}; {found['processor_seconds']:.0f} seconds of the processor, {receipt['threads']} thread, torch "
        f"{receipt['torch']}, transformers {receipt['transformers']}."
    ]
    for section, group in groupby(found["rows"], key=lambda row: row["section"]):
        lines = [f"*{section}*", "", "| | published | ours | difference | note |", "|---|---|---|---|---|"]
        for row in group:
            figures = [cell(row["published"]), cell(row["ours"]), cell(row["difference"], "+")]
            cells = [text.replace("|", "\\|") for text in (row["figure"], *figures, row["note"])]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    parts.append("Not reproduced here:")
    parts.append("\n".join(f"- {each['what']}: {each['why']}." for each in found["not_reproduced"]))
    return "\n\n".join(parts) + "\n"


def histogram(found: dict[str, object]) -> str:
    """Sizes of u per layer of the main paper's model, in float32: shares below powers of ten, in percent."""
    from contextfold.magnitudes import EDGES

    parts = [part["u"] for name, part in found["details"].items() if name.startswith("float32-prompt")]
    if not parts or not parts[0]["counts"]:
        return ""
    limits = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    lines = ["| layer | " + " | ".join(f"< {limit:g}" for limit in limits) + " | smallest |", "|---" * 9 + "|"]
    for layer in range(len(parts[0]["counts"])):
        counts = [sum(column) for column in zip(*(u["counts"][layer] for u in parts), strict=True)]
        below = [sum(counts[: _edge(EDGES, limit) + 1]) for limit in limits]
        cells = [f"{100 * count / sum(counts):.3g}" for count in below]
        smallest = min(u["smallest"][layer] for u in parts)
        lines.append(f"| {layer} | " + " | ".join(cells) + f" | {smallest:.1g} |")
    title = "*float32, sizes of u, the branch before the norm's scale: % of the entries below a limit, all tokens*"
    return f"{title}\n\n" + "\n".join(lines) + "\n"


def _edge(edges: tuple[float, ...], limit: float) -> int:
    return min(range(len(edges)), key=lambda k: abs(edges[k] / limit - 1))


def page() -> str:
    """docs/papers.md with its tables as they should be."""

    def fill(match: re.Match[str]) -> str:
        found = json.loads(path_of(match[2]).read_text())
        more = histogram(found)
        return match[1] + table(found) + ("\n" + more if more else "") + match[3]

    return MARKERS.sub(fill, PAGE.read_text())


def main() -> None:
    match sys.argv[1:]:
        case ["run", *rest]:
            run(rest[0] if rest else "")
        case ["table"]:
            PAGE.write_text(page())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
