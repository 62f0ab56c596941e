"""An ablation as rich tables. Nothing is computed here and nothing is printed: the command line does that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from contextfold.ablate import Ablation, PartAblation

__all__ = ["ablation_view"]

Decode = Callable[[Sequence[int]], str]


def ablation_view(ablation: Ablation, decode: Decode) -> RenderableType:
    """What each removal costs, what absorbs it, and one sentence; the most costly part first."""
    ranked = ablation.ranked()
    lines = [
        f"Part {part.name!r} keeps the first token of the sequence: attention rests on it whatever it is."
        for part in ranked
        if part.keeps_sink
    ]
    worst = max(part.patched_logit_gap for part in ranked)
    words = "Proven" if ablation.proven else "Not proven"
    lines.append(f"{words}: written into the weights, every patch leaves a gap of at most {worst:.2g}.")
    return Group(
        Text(f"Answer with the whole prompt: {decode(list(ablation.answer))!r}"),
        _cost_table(ablation, ranked, decode),
        _patch_table(ablation, ranked),
        Text("\n".join(lines), style="" if ablation.proven else "red"),
    )


def _cost_table(ablation: Ablation, ranked: Sequence[PartAblation], decode: Decode) -> Table:
    table = _table("what the removal of each part alone costs", "KL and log-probability in nats, gaps in logits.")
    for name in ("part", "tokens", "KL", "answer loses", "first token", "gap", "gap patched"):
        table.add_column(name, justify="left" if name in ("part", "first token") else "right")
    for part in ranked:
        changed = next((r for r in part.removals if not r.removed.top1_match), None)
        shown = "same" if changed is None else f"{decode([changed.answer])!r} → {decode([changed.removed.top1])!r}"
        if len(ablation.answer) > 1 and changed is not None:
            shown += f" ({part.top1_changes} of {len(ablation.answer)})"
        table.add_row(
            Text(part.name), str(part.dropped), f"{part.kl_nats:.3g}", f"{part.answer_nats:+.3g}", Text(shown),
            f"{part.logit_gap:.2g}", f"{part.patched_logit_gap:.1g}",
        )  # fmt: skip
    return table


def _patch_table(ablation: Ablation, ranked: Sequence[PartAblation]) -> Table:
    table = _table(f"the patch that absorbs it, rule {ablation.rule}", "‖dW‖ by layer: first to last, on one scale.")
    for name in ("part", "‖dW‖", "rank", "‖dW‖/‖W‖", "max|dm|", "‖dW‖ by layer"):
        table.add_column(name, justify="left" if name in ("part", "‖dW‖ by layer") else "right")
    top = max((size for part in ranked for size in part.layer_norms), default=0.0)
    for part in ranked:
        table.add_row(
            Text(part.name), f"{part.patch_norm:.3g}", str(part.patch_rank), f"{part.weight_ratio:.2g}",
            f"{part.max_abs_dm:.2g}", "".join(_bar(size, top) for size in part.layer_norms),
        )  # fmt: skip
    return table


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE)


BARS = "▁▂▃▄▅▆▇█"


def _bar(size: float, top: float) -> str:
    return BARS[min(int(len(BARS) * size / top), len(BARS) - 1)] if top else BARS[0]
