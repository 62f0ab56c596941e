"""A baked patch on the screen: what it recovers, beside its controls, and what it does elsewhere."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from contextfold.show import number
from contextfold.verify import ReusableVerdict

__all__ = ["verdict_view"]

BAR = 10
"""Characters of a full bar."""


def verdict_view(verdict: ReusableVerdict) -> RenderableType:
    """The whole screen: recovery, controls, other text, places, and the sentence."""
    colour = "green" if verdict.holds else "red"
    sentence = Panel(Text(verdict.sentence()), title="verdict", border_style=colour, title_align="left")
    tables = [_recovery_table(verdict)]
    if verdict.elsewhere:
        tables.append(_elsewhere_table(verdict))
    if verdict.baked:
        tables.append(_places_table(verdict))
    return Group(*tables, sentence)


def _bar(share: float) -> str:
    return "█" * round(BAR * min(max(share, 0.0), 1.0))


def _recovery_table(verdict: ReusableVerdict) -> Table:
    questions = len(verdict.unpatched.kl_nats)
    table = Table(
        title=f"{verdict.model}, estimator {verdict.method}: {questions} questions held out",
        caption="KL to the model with the context, in nats per answer token. Weights written, unmodified model.",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for column in ("run", "recovered", "", "KL", "same token"):
        table.add_column(column, justify="left" if column in ("run", "") else "right")
    bare = verdict.unpatched
    table.add_row("without the context", "0 %", "", number(bare.mean), f"{bare.top1:.0%}")
    p = verdict.patched
    table.add_row(
        "patched", f"{p.share:.1%}", _bar(p.share), number(p.patched.mean), f"{p.patched.top1:.0%}", style="bold"
    )
    for factor, share in sorted(verdict.strengths.items()):
        table.add_row(f"patch × {factor:g}", f"{share:.1%}", _bar(share), "", "")
    others = {f"from {count} questions": recovery for count, recovery in verdict.fewer.items()}
    for name, control in verdict.controls.items():
        label = name.replace("_", " ")
        others[f"{label} (control)"] = control
        if name in verdict.windows:
            others[f"{label} (in window)"] = verdict.windows[name]
    for name, c in others.items():
        table.add_row(name, f"{c.share:.1%}", _bar(c.share), number(c.patched.mean), f"{c.patched.top1:.0%}")
    table.add_row("same answers, left alone", f"{verdict.same_answers:.0%}", _bar(verdict.same_answers), "", "")
    return table


def _elsewhere_table(verdict: ReusableVerdict) -> Table:
    table = Table(title="elsewhere", title_justify="left", caption="KL from the bare model.", caption_justify="left")
    for column in ("text", "moved by the patch", "by the context"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for name, (patch, context) in verdict.elsewhere.items():
        table.add_row(name, number(patch.mean), number(context.mean))
    return table


def _places_table(verdict: ReusableVerdict) -> Table:
    assert verdict.baked is not None
    table = Table(title="places", title_justify="left", caption="On the examples themselves.", caption_justify="left")
    for column in ("layer", "place", "rank", "explained", "‖dW‖/‖W‖"):
        table.add_column(column, justify="right" if column != "place" else "left")
    for site in verdict.baked.sites:
        table.add_row(str(site.layer), site.role, str(site.rank), f"{site.explained:.0%}", number(site.weight_ratio))
    return table
