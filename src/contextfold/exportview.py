"""An export as rich text. Nothing is computed here and nothing is printed: the command line does that."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from contextfold.export import Proof

__all__ = ["export_view"]


def export_view(proof: Proof) -> RenderableType:
    """What was loaded, how close it is, and the sentence."""
    table = Table(title=f"loaded back by {proof.loader}", title_justify="left", show_header=False)
    table.add_row("parameters that hold the patch", f"{proof.matched} of {proof.expected}")
    table.add_row(f"gap to our own run, {proof.tokens} tokens", f"{proof.logit_gap:.2g}")
    table.add_row("gap that single roundings explain", f"{proof.rounding_gap:.2g}")
    table.add_row("gap of the model without patch", f"{proof.base_gap:.3g}")
    if proof.losses:
        worst = max(proof.losses, key=lambda name: proof.losses[name])
        table.add_row(f"cut off by the rank, worst at {worst}", f"{proof.losses[worst]:.2g} of its norm")
        table.add_row("gap that the cut opens", f"{proof.cut_gap:.3g}")
    colour = "green" if proof.proven else "red"
    panel = Panel(Text(proof.sentence()), title="verdict", border_style=colour, title_align="left")
    return Group(table, *(Text(remark, style="dim") for remark in proof.remarks), panel)
