"""The door: write, load back, compare; only what is proven gets its place on the disk."""

from __future__ import annotations

from pathlib import Path

from contextfold.anatomy import Bound
from contextfold.anatomy.block import is_plain
from contextfold.anatomy.sharded import refuse_sharded
from contextfold.anatomy.wrapped import adapters, is_offloaded
from contextfold.errors import InputError, NotExportable, one_line
from contextfold.export.base import Exporter, Proof, Source
from contextfold.export.card import write_card
from contextfold.export.checkpoint import Checkpoint
from contextfold.export.folder import check_files, receipt_of, staged
from contextfold.export.gguf import GgufAdapter
from contextfold.export.peft import PeftFolder
from contextfold.export.proof import probe_of
from contextfold.patch import Patch
from contextfold.runtime import Run, check_match

__all__ = ["EXPORTERS", "check", "export"]

EXPORTERS: tuple[type[Exporter], ...] = (PeftFolder, Checkpoint, GgufAdapter)
"""Every target, by the name of its class; the command line takes its choices from here."""

BESIDE = 2**28
"""Bytes of a file that holds no weights, at most: a tokenizer, a configuration."""


def export(source: Source, exporter: Exporter, out: Path, probe: Run | None = None) -> Proof:
    """Write the patch for another program, load it back with that program, and put it at `out` if it is proven.

    Nothing stands at `out` before that, and what stood there stays if it is not. `probe`: the tokens on which logits
    are compared; pseudo-random ones when None.

    Raises `PatchMismatch` for a patch of another model, `NotExportable` where the format or its program cannot hold
    the patch, `UnsupportedModel` for a model that processes share, and `InputError` for a place that cannot be written
    or a program that is not installed.
    """
    check_match(source.bound.model, source.bound.fingerprint, source.patch)
    _check_plain(source.bound, source.patch)
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
    _check_plain(source.bound, source.patch)
    receipt = receipt_of(folder)
    if receipt.get("target") != exporter.name:
        other = one_line(repr(receipt.get("target")))
        raise InputError(f"{folder} is an export to {other}, not to {exporter.name!r}")
    check_files(folder, receipt, _most(source))
    return exporter.check(source, folder, probe_of(source.bound) if probe is None else probe)


def _most(source: Source) -> int:
    """Bytes that a file of an export can have: a model, what rounding took from it in float32, a tokenizer."""
    weights = sum(parameter.nbytes for parameter in source.bound.model.parameters())
    return 3 * weights + 2 * source.patch.nbytes + BESIDE


def _check_plain(bound: Bound, patch: Patch) -> None:
    """Folders are for plain models, and proven on a second one. Raises as `export`."""
    refuse_sharded(bound.model, "an export")
    wrapped = next((name for name, _ in adapters(bound.model)), None)
    if wrapped is not None:
        raise NotExportable(
            f"{wrapped} is wrapped by PEFT, and the patch holds for model and adapter together, which no folder keeps; "
            "merge the adapter into the model (merge_and_unload), fold on that, and export the new patch"
        )
    for site in patch.edits:
        owner = bound.model.get_submodule(site.module)
        if not is_plain(owner._parameters.get(site.parameter)) and not is_offloaded(owner):
            raise NotExportable(
                f"{site.name} of a {type(owner).__name__} is quantised, and an export is compared with weights that "
                "are written; let the patch act beside the quantised model (`applied`), or fold on the plain one and "
                "export that patch"
            )
