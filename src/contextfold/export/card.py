"""The receipt and the model card that stand in every folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from contextfold.anatomy.wrapped import value_of
from contextfold.export.base import Exporter, Proof, Source
from contextfold.export.folder import FORMAT, RECEIPT
from contextfold.patch import BiasEdit, MatrixEdit, ScaleEdit, Site
from contextfold.versions import versions

__all__ = ["digest_of", "write_card"]

VERSION = 1


def digest_of(model: nn.Module, names: Collection[str]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of these parameters, in name order, one after the other."""
    digest = hashlib.sha256()
    for name in sorted(names):
        with value_of(model, name) as tensor:
            digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            flat = tensor.detach().contiguous().cpu().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_card(source: Source, exporter: Exporter, folder: Path, facts: Mapping[str, Any], proof: Proof) -> None:
    """Write `receipt.json` and `README.md`. The receipt names every other file of the folder with its SHA-256."""
    config: Any = source.bound.model.config
    touched = {f"{site.module}.{site.parameter}" for site in source.patch.edits}
    receipt = {
        "format": FORMAT,
        "version": VERSION,
        "target": exporter.name,
        "command": source.command,
        "base_model": {
            "name": source.name,
            "revision": getattr(config, "_commit_hash", None),
            "model_type": source.bound.model_type,
            "dtype": str(source.bound.dtype).removeprefix("torch."),
            "weights_sha256": source.bound.fingerprint,
            "touched_weights_sha256": digest_of(source.bound.model, touched),
        },
        "patch": _patch_facts(source),
        "written": dict(facts),
        "loaded": proof.to_json(),
        "verdict": None if source.verdict is None else dict(source.verdict),
        "versions": versions(),
    }
    (folder / "README.md").write_text(_card(receipt, exporter, proof), encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    receipt["files"] = {path.relative_to(folder).as_posix(): _sha256(path) for path in files}
    (folder / RECEIPT).write_text(json.dumps(receipt, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _patch_facts(source: Source) -> dict[str, Any]:
    header, edits = source.patch.header, source.patch.edits
    return {
        "kind": header.kind,
        "plan": list(header.plan),
        "context_sha256": header.context_digest,
        "tokens_sha256": header.tokens_digest,
        "exact_at": list(header.exact_at),
        "factor_dtype": header.factor_dtype,
        "made_with": dict(header.versions),
        "matrix_edits": sum(isinstance(edit, MatrixEdit) for edit in edits.values()),
        "bias_edits": sum(isinstance(edit, BiasEdit) for edit in edits.values()),
        "scale_edits": sum(isinstance(edit, ScaleEdit) for edit in edits.values()),
        "largest_rank": max((edit.delta.rank for edit in edits.values() if isinstance(edit, MatrixEdit)), default=0),
        "layers": sorted({site.layer for site in edits}),
        "sites": [site.name for site in _ordered(edits)],
    }


def _ordered(sites: Iterable[Site]) -> list[Site]:
    return sorted(sites, key=lambda site: (site.layer, site.module, site.parameter, site.expert or 0))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _card(receipt: Mapping[str, Any], exporter: Exporter, proof: Proof) -> str:
    base, patch = receipt["base_model"], receipt["patch"]
    name = base["name"] or f"a {base['model_type']} model"
    head = {"base_model": base["name"], "tags": ["contextfold"], "pipeline_tag": "text-generation"}
    if exporter.name == "peft":
        head["library_name"] = "peft"
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items() if value),
        "---",
        "",
        f"# {name}, with a context in its weights",
        "",
        f"{exporter.title}, written by contextfold from a patch of kind `{patch['kind']}`: what a context did to the "
        f"model, as {patch['matrix_edits']} matrix, {patch['scale_edits']} scale and {patch['bias_edits']} bias edits "
        f"in {len(patch['layers'])} layers, of rank {patch['largest_rank']} at most. {_meant(patch)}",
        "",
        f"- Base model: {name}, type `{base['model_type']}`, {base['dtype']}, "
        f"revision {base['revision'] or 'unknown'}.",
        f"- SHA-256 of all base weights: `{base['weights_sha256']}`; of those that the patch edits: "
        f"`{base['touched_weights_sha256']}`. On other weights the patch means nothing.",
        f"- SHA-256 of the token ids of the context: `{patch['context_sha256'] or 'none'}`. The text is not stored.",
        f"- {proof.sentence()}",
        *(f"- {remark}" for remark in proof.remarks),
        *([f"- When it was made: {receipt['verdict']['verdict']}"] if _said(receipt["verdict"]) else []),
        *([f"- Made by: `{receipt['command']}`"] if receipt["command"] else []),
        "",
        f"All figures, versions and digests of the files are in `{RECEIPT}`.",
        "",
    ]
    return "\n".join(lines)


def _said(verdict: Mapping[str, Any] | None) -> bool:
    return verdict is not None and isinstance(verdict.get("verdict"), str)


def _meant(patch: Mapping[str, Any]) -> str:
    if patch["kind"] == "bake":
        return "It is meant for any text like that on which it was calibrated, and exact on none."
    count = len(patch["exact_at"])
    if count == 0:
        return "It is exact nowhere: it was scaled, added to another, or selected from."
    return f"It is exact at {count} position{'s' if count > 1 else ''} of one token sequence."
