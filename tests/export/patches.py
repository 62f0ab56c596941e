"""Patches to export: folded ones, and random ones of any rank on any site."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch

import zoo
from conformance import tokens
from contextfold.anatomy import DenseBlock, bind
from contextfold.errors import NotControllable
from contextfold.export import Proof
from contextfold.fold import fold_token
from contextfold.lowrank import LowRank
from contextfold.patch import MatrixEdit, Patch

PROOF = Proof("peft", "nobody", 1, 1, (), 1, 0.0, 1.0, 2.0)
"""What a folder's card says where a test writes one without loading it back."""


def fold(model_type: str, dtype: torch.dtype = torch.float32, **options):
    """A bound tiny model and a fold of it."""
    model = zoo.build(model_type, dtype, **options)
    bound = bind(model)
    for seed in range(3, 8):  # a token that skips every expert cannot be steered
        try:
            return bound, fold_token(bound, tokens(model, 9, seed), tokens(model, 6, seed + 100))
        except NotControllable:
            continue
    raise AssertionError("no token could be steered")


def random_edits(bound, rank: int, size: float = 0.05, attention: bool = False):
    """Edits of `rank` on every output map, as a baked patch has them, and on attention output maps on request."""
    generator = torch.Generator().manual_seed(rank)
    maps = [block.output_map for block in bound.blocks if isinstance(block, DenseBlock)]
    if attention:
        maps += [block.attention_output for block in bound.blocks if block.attention_output is not None]
    edits = {}
    for linear in maps:
        out, inner = linear.weight.shape
        B, A = (torch.randn(shape, generator=generator) for shape in ((out, rank), (rank, inner)))
        edits[linear.site] = MatrixEdit(LowRank(size * B / rank**0.5, A / inner**0.5))
    return edits


def baked(bound, patch: Patch, rank: int, **options) -> Patch:
    return replace(
        patch, header=replace(patch.header, kind="bake", exact_at=()), edits=random_edits(bound, rank, **options)
    )


def sign(folder: Path) -> None:
    """Make the receipt name the files as they are now, as whoever changes a folder with care would."""
    receipt = json.loads((folder / "receipt.json").read_text())
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "receipt.json"]
    digests = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "receipt.json").write_text(json.dumps({**receipt, "files": digests}))
