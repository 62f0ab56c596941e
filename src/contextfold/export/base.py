"""What is exported, who writes it, and what loading it back has shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from contextfold.anatomy import Bound
from contextfold.files import plain
from contextfold.patch import Patch
from contextfold.runtime import Run

__all__ = ["Exporter", "Proof", "Source"]


@dataclass(frozen=True, eq=False)
class Source:
    """A patch, the model that it was made for, and what a reader of the folder should know about both."""

    bound: Bound
    patch: Patch
    name: str = ""
    """What the model is called: a hub id or a folder, so that a loader finds it."""
    save_tokenizer: Callable[[str], Any] | None = None
    """Writes the tokenizer and its chat template into the folder that it is given."""
    verdict: Mapping[str, Any] | None = None
    """What was measured when the patch was made."""
    command: str = ""
    """The command that makes the folder."""


@dataclass(frozen=True)
class Proof:
    """A folder, loaded by the program that it is for, against our own run of the patch."""

    target: str
    loader: str
    """Which program loaded it, with its version."""
    expected: int
    """Parameters that the loaded model should hold with their edits; for a checkpoint, all tensors."""
    matched: int
    """Those that it holds, bit by bit."""
    missing: tuple[str, ...]
    """The others, by name."""
    tokens: int
    """Positions of the run on which logits were compared."""
    logit_gap: float
    """Largest absolute difference of the logits, loaded against ours."""
    rounding_gap: float
    """How far single roundings move our own logits: the bound for `logit_gap`. See `proof.rounding_gap`."""
    base_gap: float
    """The same for the model without a patch, against ours."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """By parameter, what a smaller rank cut off: relative, Frobenius."""
    cut_gap: float = 0.0
    """What the cut changes: largest absolute difference of the logits between the whole patch and what is left."""
    remarks: tuple[str, ...] = ()
    """What else a reader should know."""

    def reasons(self) -> list[str]:
        """Why the folder is not proven; empty when it is."""
        found = []
        if self.expected == 0 or self.matched < self.expected:
            names = ", ".join(self.missing[:3])
            found.append(f"{self.loader} loaded {self.matched} of {self.expected} parameters, without {names}")
        if not self.logit_gap <= self.rounding_gap:
            found.append(
                f"its logits are {self.logit_gap:.3g} away from ours, and rounding explains {self.rounding_gap:.3g}"
            )
        if not self.base_gap > max(self.rounding_gap, self.logit_gap):
            found.append(
                f"the model without patch is only {self.base_gap:.3g} away, so equality would say nothing "
                f"(rounding explains {self.rounding_gap:.3g})"
            )
        return found

    @property
    def proven(self) -> bool:
        return not self.reasons()

    def sentence(self) -> str:
        """The proof in words."""
        if not self.proven:
            return f"Not proven: {'; '.join(self.reasons())}."
        return (
            f"Proven: {self.loader} loaded {self.matched} of {self.expected} parameters; its logits are "
            f"{self.logit_gap:.2g} away from ours (rounding explains {self.rounding_gap:.2g}), and "
            f"{self.base_gap:.3g} from the model without patch."
        )

    def to_json(self) -> dict[str, Any]:
        """Stable keys; documented in `docs/json.md`."""
        found = {
            "target": self.target,
            "loader": self.loader,
            "proven": self.proven,
            "verdict": self.sentence(),
            "expected": self.expected,
            "matched": self.matched,
            "missing": list(self.missing),
            "tokens": self.tokens,
            "logit_gap": self.logit_gap,
            "rounding_gap": self.rounding_gap,
            "base_gap": self.base_gap,
            "worst_loss": max(self.losses.values(), default=0.0),
            "losses": dict(self.losses),
            "cut_gap": self.cut_gap,
            "remarks": list(self.remarks),
        }
        return plain(found)


class Exporter(ABC):
    """Writes a patch the way another program reads it, and loads it back with that program.

    A new target is one such class and one line in `EXPORTERS`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """What the folder is, in words."""

    @abstractmethod
    def write(self, source: Source, folder: Path) -> Mapping[str, Any]:
        """Write the files into `folder`, which is there and empty; return what the receipt should say about them.

        Raises `NotExportable` when the format cannot hold the patch.
        """

    @abstractmethod
    def check(self, source: Source, folder: Path, probe: Run) -> Proof:
        """Load `folder` with the program that it is for, and compare on the tokens of `probe`.

        Raises `InputError` when that program is not installed, and `NotExportable` when it refuses the folder.
        """
