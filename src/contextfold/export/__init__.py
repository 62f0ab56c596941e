"""Patches that other people's software loads, each folder proven by loading it with the program that it is for."""

from contextfold.export.base import Exporter, Proof, Source
from contextfold.export.checkpoint import Checkpoint
from contextfold.export.door import EXPORTERS, check, export
from contextfold.export.gguf import GgufAdapter
from contextfold.export.peft import PeftFolder
from contextfold.export.ranks import SERVED_RANKS

__all__ = [
    "EXPORTERS",
    "SERVED_RANKS",
    "Checkpoint",
    "Exporter",
    "GgufAdapter",
    "PeftFolder",
    "Proof",
    "Source",
    "check",
    "export",
]
