"""What can go wrong, as a tree.

ContextfoldError
├── InputError            the arguments make no sense (lengths, spans, names, dtypes)
│   └── NotWritten        a file cannot be written where it was asked for: no room, no folder, read-only
├── UnsupportedModel      no anatomy is known for this model, or the known one does not hold on it
│   └── ProbeFailed       a block was rebuilt from its form and did not give what the layer computed
├── NotControllable       the mathematics refuses: an outcome that makes an exact edit impossible
├── NoWay                 the calculus refuses: no parameter of the block can do what is asked
├── PatchMismatch         the patch was made for another model or for other weights
├── NotExportable         the target format, or the program that reads it, cannot hold the patch
└── PatchFileError        the file is not a patch that this version can read
    ├── PatchFileDamaged  truncated, corrupted, or inconsistent with its own header
    ├── PatchFileForeign  a valid file of another format
    └── PatchFileNewer    written by a newer version of the format

Every message says what was met, what is supported and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextfold.outcomes import Finding

__all__ = [
    "ContextfoldError",
    "InputError",
    "NoWay",
    "NotControllable",
    "NotExportable",
    "NotWritten",
    "PatchFileDamaged",
    "PatchFileError",
    "PatchFileForeign",
    "PatchFileNewer",
    "PatchMismatch",
    "ProbeFailed",
    "UnsupportedModel",
    "one_line",
]


class ContextfoldError(Exception):
    """Base of everything that contextfold raises on purpose."""


class InputError(ContextfoldError, ValueError):
    """The arguments make no sense."""


class NotWritten(InputError):
    """A file cannot be written where it was asked for; what was solved for it is kept, and the same command goes on."""


class UnsupportedModel(ContextfoldError):
    """No anatomy is known for this model, or the known one does not hold on it."""


class ProbeFailed(UnsupportedModel):
    """A block was rebuilt from its form and did not give what the layer computed."""


class NotControllable(ContextfoldError):
    """An exact edit is impossible; `findings` holds the outcomes that say why."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(str(finding) for finding in self.findings))


class NoWay(ContextfoldError):
    """No parameter of the block can do what is asked; `reasons` is the chain, a cause below what it explains."""

    def __init__(self, asked: str, reasons: Sequence[str]) -> None:
        self.asked, self.reasons = asked, tuple(reasons)
        super().__init__("\n".join((f"{asked}:", *self.reasons)))


class PatchMismatch(ContextfoldError):
    """The patch was made for another model or for other weights."""


class NotExportable(ContextfoldError):
    """The target format, or the program that reads it, cannot hold the patch."""


class PatchFileError(ContextfoldError):
    """The file is not a patch that this version can read."""


class PatchFileDamaged(PatchFileError):
    """Truncated, corrupted, or inconsistent with its own header."""


class PatchFileForeign(PatchFileError):
    """A valid file of another format."""


class PatchFileNewer(PatchFileError):
    """Written by a newer version of the format."""


def one_line(error: object, limit: int = 200) -> str:
    """The message of an error in one line of at most `limit` characters; its type where it says nothing.

    What a file holds may stand in it, at any length: line breaks become spaces, and what a terminal would act on is
    written out.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
