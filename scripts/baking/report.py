"""What the bench found, as it stands in the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MARKERS = re.compile(r"(<!-- bake: [^>]*-->\n).*?(<!-- /bake -->)", re.DOTALL)
MIB = 2**20


def page(text: str, found: dict[str, Any]) -> str:
    """`text` with everything between its markers as it should be."""
    return MARKERS.sub(lambda marks: marks[1] + "\n".join(lines(found)) + "\n" + marks[2], text)


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Seconds of the processor, {found['threads']} thread, torch {found['torch']}. Intervals: 95 %, by drawing the "
        "held-out questions again."
    )
    for model, entry in found["models"].items():
        yield from ways_table(model, entry.get("contexts", {}))
        yield from distillations(model, entry.get("contexts", {}))
        yield from cache_table(model, entry.get("prefix_cache", []))
        yield from keeping(model, entry)


def ways_table(model: str, contexts: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"**{model}**", "")
    yield "| context | way | recovered | KL, nats | top-1 | best control | neutral | untouched | solved in | peak |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for context, facts in contexts.items():
        for name, row in facts["ways"].items():
            low, high = (percent(end) for end in row["interval"])
            controls = {key: control["kl_recovered"] for key, control in row["controls"].items()}
            best = max(controls, key=lambda key: controls[key], default="")
            cells = (
                context,
                name,
                f"{percent(row['kl_recovered'])} ({low} to {high})",
                f"{row['kl_patched']:.3f}",
                percent(row["top1"]),
                f"{percent(controls[best])} ({best.replace('_', ' ')})" if best else "",
                percent(row["neutral_kl_ratio"]),
                percent(row["untouched_kl_ratio"]),
                f"{row['seconds_solve']:.0f} s",
                f"{row['peak_bytes'] / row['weights_bytes']:.2f} × weights",
            )
            yield "| " + " | ".join(cells) + " |"
        moved = facts["elsewhere_context"]
        cells = (
            context, "the context itself", "", "0", "", "", percent(moved["neutral"]["kl_ratio"]),
            percent(moved["untouched"]["kl_ratio"]), "", "",
        )  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if abs(share) < 10 else f"{100 * share:.0f} %"


def distillations(model: str, contexts: dict[str, Any]) -> Iterator[str]:
    for context, facts in contexts.items():
        row = facts["ways"].get("distillation")
        if row is None or "times_baking" not in row:
            continue
        curve = ", ".join(f"{spent:.0f} s: {kl:.3f}" for spent, kl in row["curve"])
        times, budget = row["times_baking"], row["budget_times_baking"]
        verdict = (
            f"did not reach the KL of the default estimator in {budget:.0f} times its seconds"
            if times is None
            else f"reached the KL of the default estimator after {times:.1f} times its seconds"
        )
        yield ""
        yield (
            f"Gradient distillation on {model}, {context} (rank {row['rank']}, AdamW at {row['rate']:g}, "
            f"{row['epochs']:.1f} epochs) {verdict}. Held-out KL against its time: {curve}."
        )


def cache_table(model: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", f"Keeping the prompt with a prefix cache, {model} (KL 0 by definition):", "")
    yield "| tokens of context | cache | computed in | ms per token with it | without | ratio |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        if "skipped" in row:
            yield f"| {row['context']} | not measured: {row['skipped']} | | | | |"
            continue
        ms, bare = row["ms_per_token"], row["ms_per_token_without"]
        size, spent = f"{row['bytes'] / MIB:.1f} MiB", f"{row['seconds_prefill']:.1f} s"
        yield f"| {row['context']} | {size} | {spent} | {ms:.1f} | {bare:.1f} | {ms / bare:.2f} |"


def keeping(model: str, entry: dict[str, Any]) -> Iterator[str]:
    """Where keeping the prompt is the better choice, from the figures."""
    rows = [row for row in entry.get("prefix_cache", []) if "skipped" not in row]
    sizes = [
        row["patch_bytes"]
        for facts in entry.get("contexts", {}).values()
        for name, row in facts["ways"].items()
        if name == "two-sites"
    ]
    if not rows or not sizes:
        return
    each = rows[0]["bytes"] / rows[0]["context"]
    first, last = rows[0], rows[-1]
    patch = sum(sizes) / len(sizes)
    slower = [row["ms_per_token"] / row["ms_per_token_without"] for row in (first, last)]
    yield ""
    yield (
        f"On {model} keeping the prompt is the better choice where the context is short or has to act in full: with "
        f"{first['context']} tokens of it in the cache a generated token takes {slower[0]:.2f} times as long "
        f"({slower[1]:.2f} times with {last['context']}), nothing is lost of its effect, and its cache "
        f"({each / 1024:.0f} KiB per token, shared by all who have the same prompt) is smaller than the patch on disk "
        f"({patch / MIB:.0f} MiB) up to about {patch / each:.0f} tokens. A patch that is written into the weights "
        "takes no memory beyond them, costs nothing per token, and leaves the window free."
    )
