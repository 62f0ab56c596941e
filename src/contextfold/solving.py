"""Where float64 is solved: where the operands lie if that is fast there, on the host otherwise.

Matrices are factored in float64 throughout. Most graphics processors have one float64 unit for 32 or 64 of float32,
and some devices have none; there LAPACK on the host is the quicker way. The decision is by the kind of device and not
by a stopwatch, so that the same machine gives the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["has_float64", "is_fast", "solved"]

FAST = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})
"""Compute capabilities of CUDA that do at least 32 float64 operations a clock in each multiprocessor (P100, V100, A100,
H100, B200), after the table of arithmetic throughput in NVIDIA's CUDA programming guide. The others there do 2 or 4."""


def has_float64(device: torch.device) -> bool:
    """Whether tensors of float64 can lie there at all."""
    return device.type != "mps"


def is_fast(device: torch.device) -> bool:
    """Whether float64 is solved on this device; of a device that is not known here it is not."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) in FAST
    return device.type == "cpu"


def solved(function: Callable[..., Any], *operands: Tensor, **options: Any) -> Any:
    """`function(*operands, **options)`, a tensor or several; they lie where the first operand does.

    Float64 operands of a device where that is slow are brought to the host, and what comes of them is taken back. Other
    dtypes are computed where they are.
    """
    home = operands[0].device
    if operands[0].dtype != torch.float64 or is_fast(home):
        return function(*operands, **options)
    found = function(*(operand.cpu() for operand in operands), **options)
    return found.to(home) if isinstance(found, Tensor) else tuple(part.to(home) for part in found)
