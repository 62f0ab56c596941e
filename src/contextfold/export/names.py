"""Names in a file of weights, where transformers reads some types under other names than they have in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["stored_names"]


def stored_names(model: Any) -> Callable[[str], str]:
    """How a parameter's name has to be written so that loading gives it back.

    Loaders rename what they read by a table of the model's type. Most names pass it unchanged; one that does not is
    written as transformers itself would, provided that this one comes back.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    table = [entry for entry in get_model_conversion_mapping(model) or () if isinstance(entry, WeightRenaming)]
    back: list[Any] = [entry.reverse_transform() for entry in reversed(table)]

    def stored(name: str) -> str:
        if apply_renamings(name, table) == name:
            return name
        other: str = apply_renamings(name, back)
        return other if apply_renamings(other, table) == name else name

    return stored
