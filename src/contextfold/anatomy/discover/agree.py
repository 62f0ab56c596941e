"""Whether a discovered anatomy is the recorded one: both bound, block by block."""

from __future__ import annotations

from torch import nn

from contextfold.anatomy.bind import Bound
from contextfold.anatomy.block import Block
from contextfold.anatomy.families import FAMILIES
from contextfold.anatomy.probe import bind
from contextfold.anatomy.proof import TOLERANCE

__all__ = ["differences", "recorded"]


def recorded(model: nn.Module, model_type: str) -> Bound | None:
    """`model` bound by the record of its type; None where there is no record.

    Raises `ProbeFailed` or `UnsupportedModel` where there is one that does not hold.
    """
    known = any(model_type in family.model_types for family in FAMILIES)
    return bind(model) if known else None


def differences(record: Bound, found: Bound) -> tuple[str, ...]:
    """What the two say differently, in words; empty where they agree in everything that a fold uses."""
    ours = {block.index: block for block in record.blocks}
    theirs = {block.index: block for block in found.blocks}
    limit = TOLERANCE.get(record.dtype, 0.0)
    lines = [f"layer {k}: one of them has no block there" for k in sorted(ours.keys() ^ theirs.keys())]
    for k in sorted(ours.keys() & theirs.keys()):
        lines += [f"layer {k}: {what}" for what in _of_block(ours[k], theirs[k], limit)]
    return tuple(lines)


def _of_block(record: Block, found: Block, limit: float) -> list[str]:
    """Orientation and slices are part of a site, so a transposed map differs. What else a record says is proven."""
    roles = (
        ("input map", record.input_maps, found.input_maps),
        ("output map", record.output_maps, found.output_maps),
        ("map", record.maps, found.maps),
    )
    lines: list[str] = []
    for role, ours, theirs in roles:
        here, there = ({linear.site for linear in maps} for maps in (ours, theirs))
        new = [f"{site.name} is an edited {role} for {'the record' if site in here else 'discovery'} only"
               for site in sorted(here ^ there, key=lambda site: site.name)]  # fmt: skip
        lines += [] if role == "map" and lines else new
    if _post(record) != _post(found):
        lines.append(f"the norm after the MLP is {_post(record)} in the record, {_post(found)} for discovery")
    if record.norm_outer is not found.norm_outer:
        lines.append("the norm over the sum is not the same module")
    if bool(((record.alpha - found.alpha).abs() > limit * record.alpha.abs()).any()):
        lines.append(f"alpha is {record.alpha.tolist()} in the record, {found.alpha.tolist()} for discovery")
    return lines


def _post(block: Block) -> str:
    post = block.norm_post
    return "none" if post is None else f"{post.site.name} of convention {'1 + w' if post.offset else 'w'}"
