"""What `contextfold inspect` says, as JSON. Keys are stable; documented in `docs/json.md`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from contextfold.anatomy import Block, Bound
from contextfold.anatomy.discover import differences, source
from contextfold.patch import Patch

__all__ = ["anatomy_json", "discovery_json", "patch_json"]


def anatomy_json(bound: Bound) -> dict[str, Any]:
    """Family, conventions and sites of a bound model; a bound model is a proven one."""
    return {
        "model_type": bound.model_type,
        "family": bound.family.name,
        "quirks": bound.family.quirks,
        "proven": True,
        "fingerprint": bound.fingerprint,
        "dtype": str(bound.dtype).removeprefix("torch."),
        "attention": bound.attention,
        "blocks": [_block_json(block) for block in bound.blocks],
    }


def discovery_json(found: Bound, record: Bound | None) -> dict[str, Any]:
    """A discovered anatomy, what the record of the model's type says differently, and the text of the new record."""
    return {
        **anatomy_json(found),
        "record": None if record is None else record.family.name,
        "agrees": None if record is None else not differences(record, found),
        "differences": [] if record is None else list(differences(record, found)),
        "source": source(found.family),
    }


def _block_json(block: Block) -> dict[str, Any]:
    post = block.norm_post
    return {
        "layer": block.index,
        "input_maps": [linear.site.name for linear in block.input_maps],
        "output_map": block.output_maps[0].site.name,
        "output_maps": [linear.site.name for linear in block.output_maps],
        "norm_post": None if post is None else post.site.name,
        "norm_post_convention": None if post is None else ("1 + w" if post.offset else "w"),
        "alpha": block.alpha.tolist(),
    }


def patch_json(patch: Patch) -> dict[str, Any]:
    """Header and sites of a patch."""
    return {
        "header": asdict(patch.header),
        "bytes": patch.nbytes,
        "max_abs_dm": patch.max_abs_dm,
        "edits": [
            {**asdict(site), "kind": type(edit).__name__, "size": edit.size()} for site, edit in patch.edits.items()
        ],
    }
