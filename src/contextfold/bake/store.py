"""Sites that are solved already, on disk: a bake that was stopped goes on where it was, with the same bits."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from contextfold.bake.joint import Joint
from contextfold.bake.solve import BakedSite
from contextfold.errors import InputError
from contextfold.lowrank import LowRank

__all__ = ["Store"]


@dataclass(frozen=True)
class Store:
    """A folder with one safetensors file per solved place, all made from what `key` is the digest of."""

    folder: Path
    key: str

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot keep work in {self.folder}: {error.strerror}; choose another folder") from error

    def put(self, joint: Joint, report: BakedSite) -> None:
        """Keep what was solved: the file is there whole, or not at all."""
        assert joint.delta is not None
        tensors = {"B": joint.delta.B, "A": joint.delta.A}
        if joint.scale is not None:
            tensors["scale"] = joint.scale
        target = self._file(joint)
        temporary = target.with_suffix(f".{os.getpid()}")
        metadata = {"key": self.key, "report": json.dumps(asdict(report))}
        save_file({name: part.contiguous().cpu() for name, part in tensors.items()}, temporary, metadata=metadata)
        os.replace(temporary, target)

    def get(self, joint: Joint, device: torch.device) -> BakedSite | None:
        """Give `joint` its edit back, if it was solved under this key; a file of another bake is no help."""
        try:
            with safe_open(self._file(joint), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != self.key:
                    return None
                # Copied: a mapped file is not aligned as fresh memory is, and products then round otherwise.
                parts = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118
        except (FileNotFoundError, SafetensorError):
            return None
        joint.delta, joint.scale = LowRank(parts["B"], parts["A"]), parts.get("scale")
        return BakedSite(**json.loads(metadata["report"]))

    def clear(self) -> None:
        """The work is done: take the files away, and the folder if nothing else is in it."""
        for file in self.folder.glob("*.solved"):
            file.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _file(self, joint: Joint) -> Path:
        return self.folder / f"{joint.layer:04d}-{joint.role.replace(' ', '-')}.solved"
