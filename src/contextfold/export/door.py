"""The door: write, load back, compare; only what is proven gets its place on the disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

from contextfold.errors import InputError
from contextfold.export.base import Exporter, Proof, Source
from contextfold.export.card import write_card
from contextfold.export.checkpoint import Checkpoint
from contextfold.export.folder import receipt_of, staged
from contextfold.export.gguf import GgufAdapter
from contextfold.export.peft import PeftFolder
from contextfold.export.proof import probe_of
from contextfold.runtime import Run, check_match

__all__ = ["EXPORTERS", "check", "export"]

EXPORTERS: tuple[type[Exporter], ...] = (PeftFolder, Checkpoint, GgufAdapter)
"""Every target, by the name of its class; the command line takes its choices from here."""


def export(source: Source, exporter: Exporter, out: Path, probe: Run | None = None) -> Proof:
    """Write the patch for another program, load it back with that program, and put it at `out` if it is proven.

    Nothing stands at `out` before that, and what stood there stays if it is not. `probe`: the tokens on which logits
    are compared; pseudo-random ones when None.

    Raises `PatchMismatch` for a patch of another model, `NotExportable` where the format or its program cannot hold
    the patch, and `InputError` for a place that cannot be written or a program that is not installed.
    """
    check_match(source.bound.model, source.bound.fingerprint, source.patch)
    with staged(out) as stage:
        facts = exporter.write(source, stage.path)
        proof = exporter.check(source, stage.path, probe_of(source.bound) if probe is None else probe)
        if proof.proven:
            write_card(source, exporter, stage.path, facts, proof)
            stage.publish()
    return proof


def check(source: Source, exporter: Exporter, folder: Path, probe: Run | None = None) -> Proof:
    """Prove a folder that an export wrote: its files against its receipt, then as `export` does.

    Raises `InputError` for a folder of something else, or one whose files changed; otherwise as `export`.
    """
    check_match(source.bound.model, source.bound.fingerprint, source.patch)
    receipt = receipt_of(folder)
    if receipt.get("target") != exporter.name:
        raise InputError(f"{folder} is an export to {receipt.get('target')!r}, not to {exporter.name!r}")
    for name, wanted in receipt.get("files", {}).items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            raise InputError(f"{path} is not the file that was written: export the patch again")
    return exporter.check(source, folder, probe_of(source.bound) if probe is None else probe)
