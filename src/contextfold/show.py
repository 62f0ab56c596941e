"""Results as rich tables. Nothing is computed here and nothing is printed: the command line does that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from contextfold.anatomy import Block, Bound
from contextfold.anatomy.discover import differences, source
from contextfold.patch import MatrixEdit, Patch, ScaleEdit
from contextfold.verify import SequenceVerdict, Step, Verdict

__all__ = ["anatomy_table", "continuation_panel", "discovery_view", "patch_table", "token_table", "verdict_view"]

Decode = Callable[[Sequence[int]], str]


def number(value: float | None) -> str:
    """Two significant digits, or a dash."""
    return "–" if value is None or value != value else f"{value:.2g}"


def verdict_view(verdict: Verdict | SequenceVerdict) -> RenderableType:
    """The whole screen: ways of applying, controls, layers, and the sentence."""
    if isinstance(verdict, SequenceVerdict):
        return sequence_view(verdict)
    json = verdict.to_json()
    colour = "green" if verdict.proven else "red"
    return Group(
        _ways_table(json),
        layer_table(json["layers"]),
        Panel(Text(verdict.sentence()), title="verdict", border_style=colour, title_align="left"),
    )


def _ways_table(json: Mapping[str, Any]) -> Table:
    tokens = json["tokens"]
    caption = (
        "Gap: largest difference of the logits from those of the model with the context; of that model, with its "
        f"cache from without. Weights written: the unmodified model runs. {json['protocol']}"
    )
    table = Table(
        title=f"{json['model']}, {json['dtype']}, rule {json['rule']}", caption=caption, title_justify="left",
        caption_justify="left",
    )  # fmt: skip
    table.add_column("run")
    for name in ("same first token", "worst gap", "median gap"):
        table.add_column(name, justify="right")
    table.add_row(
        "patched: weights written", f"{json['top1_matches']} / {tokens}",
        number(json["worst_logit_gap"]), number(json["median_logit_gap"]), style="bold",
    )  # fmt: skip
    table.add_row(
        "patched: beside the weights", f"{json['action_top1_matches']} / {tokens}",
        number(json["action_worst_logit_gap"]), "",
    )  # fmt: skip
    table.add_row(
        "patched, input off by a rounding", f"{json['perturbed_top1_matches']} / {tokens}",
        number(json["perturbed_worst_logit_gap"]), "",
    )  # fmt: skip
    table.add_row(
        "the model with itself", f"{json['scatter_top1_matches']} / {tokens}",
        number(json["scatter_logit_gap"]), "", end_section=True,
    )  # fmt: skip
    table.add_row(
        "without patch (control)",
        f"{json['unpatched_top1_matches']} / {tokens}",
        "",
        number(json["unpatched_logit_gap"]),
    )
    for name, found in json["controls"].items():
        table.add_row(
            f"{name.replace('_', ' ')} (control)", f"{found['top1_matches']} / {found['tokens']}", "",
            number(found["median_logit_gap"]),
        )  # fmt: skip
    return table


def layer_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    """A line per layer, worst over the tokens."""
    normed = any(row["min_abs_u"] is not None for row in layers)
    table = Table(
        title="per layer, worst over the tokens",
        title_justify="left",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    columns = {"y error": "relative_error", "‖dW‖/‖W‖": "weight_ratio", "cos z": "min_cos_z", "cond": "condition"}
    if normed:
        columns |= {"max|dm|": "max_abs_dm", "min|u|": "min_abs_u", "min|m|": "min_abs_m"}
    for name in ("layer", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome")
    for row in layers:
        table.add_row(str(row["layer"]), *(number(row[key]) for key in columns.values()), _outcomes(row["outcomes"]))
    return table


def _outcomes(counts: Mapping[str, int]) -> str:
    """`exact`, or how often each outcome was met."""
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{name} × {n}" for name, n in counts.items())


def sequence_view(verdict: SequenceVerdict) -> RenderableType:
    """One static patch over a sequence: runs, layers, and the sentence."""
    json = verdict.to_json()
    table = Table(title=f"{json['model']}, {json['dtype']}, one static patch", title_justify="left")
    table.add_column("run")
    for name in ("same first token", "worst gap", "median gap"):
        table.add_column(name, justify="right")
    rows = {
        "patched: weights written": verdict.written,
        "patched: beside the weights": verdict.action,
        "patched, input off by a rounding": verdict.perturbed,
        "without patch (control)": verdict.unpatched,
        **{f"{name.replace('_', ' ')} (control)": compared for name, compared in verdict.controls.items()},
    }
    for name, compared in rows.items():
        gaps = sorted(c.logit_gap for c in compared)
        same = f"{sum(c.top1_match for c in compared)} / {len(compared)}"
        table.add_row(name, same, number(gaps[-1]), number(gaps[len(gaps) // 2]))
    colour = "green" if verdict.proven else "red"
    panel = Panel(Text(verdict.sentence()), title="verdict", border_style=colour, title_align="left")
    return Group(table, sequence_layer_table(json["layers"]), panel)


def sequence_layer_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    """A line per layer: how many positions its map could serve, and how well."""
    table = Table(title="per layer, worst over the positions", title_justify="left", box=box.SIMPLE)
    table.collapse_padding, table.pad_edge = True, False
    columns = {"rank": "rank", "cond": "condition", "y error": "relative_error", "‖dW‖/‖W‖": "weight_ratio"}
    if any(row["scale_ratio_max"] is not None for row in layers):
        columns |= {"max|m'/m|": "scale_ratio_max", "max|dm|": "max_abs_dm"}
    for name in ("layer", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome")
    for row in layers:
        table.add_row(str(row["layer"]), *(number(row[key]) for key in columns.values()), row["outcome"])
    return table


def token_table(step: Step, decode: Decode) -> Table:
    """The five first tokens of one step, with the context, without it, and patched."""
    table = Table(title="first token of the answer, with its probability", title_justify="left")
    for name in ("with the context", "without", "patched"):
        table.add_column(name)
    for row in zip(step.top["in_context"], step.top["unpatched"], step.top["patched"], strict=True):
        table.add_row(*(f"{decode([token])!r} {p:.3f}" for token, p in row))
    return table


def continuation_panel(verdict: Verdict, unpatched: Sequence[int], decode: Decode) -> Table:
    """What each run says, as text."""
    table = Table(show_header=False, title="what each run says", title_justify="left")
    table.add_row("with the context", Text(decode([step.in_context for step in verdict.steps])))
    table.add_row("without it", Text(decode(list(unpatched))))
    table.add_row("without it, patched", Text(decode([step.written.top1 for step in verdict.steps]), style="bold"))
    return table


def anatomy_table(bound: Bound) -> RenderableType:
    """Where the letters live in a model; equal blocks share a line, and so do the slices of a stacked parameter."""
    table = Table(
        title=f"{bound.model_type}: {len(bound.blocks)} blocks of family {bound.family.name}", title_justify="left"
    )
    for name in ("letter", "where", "shape", "layers"):
        table.add_column(name)
    found: dict[tuple[str, str, str], list[int]] = {}
    for block in bound.blocks:
        for row in dict.fromkeys(_letters(block, f"{bound.family.layers}.{block.index}.")):
            found.setdefault(row, []).append(block.index)
    for row, layers in found.items():
        table.add_row(*map(Text, row), "all" if len(layers) == len(bound.blocks) else _short(layers))
    note = f"Proven on every block by one forward. Weights {bound.fingerprint[:16]}…, attention {bound.attention}."
    return Group(table, Text(note), Text(bound.family.quirks, style="dim"))


def _letters(block: Block, path: str) -> Iterator[tuple[str, str, str]]:
    """Letter, name inside the layer, shape."""
    output = {linear.site for linear in block.output_maps}
    for linear in block.maps:
        site, shape = linear.site, f"{linear.shape}"
        where = site.module if site.parameter == "weight" else f"{site.module}.{site.parameter}"
        stacked = "" if site.expert is None else f", each of {site.experts}"
        letter = "W_out, reads h" if site in output else "W_in, reads z"
        yield letter, where.removeprefix(path), shape + stacked
    if block.norm_post is not None:
        post = block.norm_post
        yield (
            f"m = {'1 + w' if post.offset else 'w'}",
            post.site.module.removeprefix(path),
            str(tuple(post.scale.shape)),
        )


def discovery_view(found: Bound, record: Bound | None) -> RenderableType:
    """A discovered anatomy, whether the record of the model's type agrees, and the new record, ready to paste."""
    if record is None:
        said = Text(f"There is no record for model type {found.model_type!r}; this one can be added.", style="bold")
    elif met := differences(record, found):
        said = Text("\n".join((f"Differs from the record {record.family.name!r}:", *met)), style="yellow")
    else:
        said = Text(f"Agrees with the record {record.family.name!r}.", style="green")
    # No frame and no wrapping around the record: it is there to be copied.
    text = Text(source(found.family), no_wrap=True, overflow="ignore")
    return Group(anatomy_table(found), said, Text("\nRecord, for a file of anatomy/families:\n"), text)


def patch_table(patch: Patch) -> RenderableType:
    """The header of a patch and its edits by kind."""
    header = patch.header
    table = Table(title=repr(patch), title_justify="left", show_header=False)
    rows = {
        "kind": f"{header.kind}, exact at position {', '.join(map(str, header.exact_at)) or 'none'}",
        "made for": f"{header.model_type}, weights {header.fingerprint[:16]}…",
        "run in": f"{header.model_dtype}, attention {header.attention}",
        "positions run": f"{len(header.positions)} tokens: {_short(header.positions)}",
        "plan": " → ".join(header.plan),
        "measured as": "written weights" if header.materialised else "low-rank action",
        "largest |dm|": number(patch.max_abs_dm),
        "matrix edits": str(sum(isinstance(e, MatrixEdit) for e in patch.edits.values())),
        "scale edits": str(sum(isinstance(e, ScaleEdit) for e in patch.edits.values())),
        "versions": ", ".join(f"{k} {v}" for k, v in header.versions.items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _short(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) if len(values) <= 6 else f"{values[0]}, {values[1]}, … {values[-1]}"
