"""Fold a text context into the weights of a language model, exactly and in closed form, and prove it.

The public names, listed. They are imported on first use, so that `import contextfold` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from contextfold.anatomy import Bound, bind
    from contextfold.compare import compare_patches
    from contextfold.fold import SINK, Folded, fold_token, split
    from contextfold.models import Loaded, load
    from contextfold.patch import Patch, combine
    from contextfold.patchfile import load as load_patch
    from contextfold.patchfile import save as save_patch
    from contextfold.prompts import encode
    from contextfold.runtime import applied, materialised, run
    from contextfold.stepwise import generate
    from contextfold.verify import Prompt, Verdict, fold_and_prove, verify_patch, verify_prompts

_HOME = {
    "SINK": ("fold", "SINK"),
    "Bound": ("anatomy", "Bound"),
    "Folded": ("fold", "Folded"),
    "Loaded": ("models", "Loaded"),
    "Patch": ("patch", "Patch"),
    "Prompt": ("verify", "Prompt"),
    "Verdict": ("verify", "Verdict"),
    "applied": ("runtime", "applied"),
    "bind": ("anatomy", "bind"),
    "combine": ("patch", "combine"),
    "compare_patches": ("compare", "compare_patches"),
    "encode": ("prompts", "encode"),
    "fold_and_prove": ("verify", "fold_and_prove"),
    "fold_token": ("fold", "fold_token"),
    "generate": ("stepwise", "generate"),
    "load": ("models", "load"),
    "load_patch": ("patchfile", "load"),
    "materialised": ("runtime", "materialised"),
    "run": ("runtime", "run"),
    "save_patch": ("patchfile", "save"),
    "verify_prompts": ("verify", "verify_prompts"),
    "split": ("fold", "split"),
    "verify_patch": ("verify", "verify_patch"),
}

__all__ = [
    "SINK",
    "Bound",
    "Folded",
    "Loaded",
    "Patch",
    "Prompt",
    "Verdict",
    "applied",
    "bind",
    "combine",
    "compare_patches",
    "encode",
    "fold_and_prove",
    "fold_token",
    "generate",
    "load",
    "load_patch",
    "materialised",
    "run",
    "save_patch",
    "split",
    "verify_patch",
    "verify_prompts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'contextfold' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(f"contextfold.{module}"), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
