"""Where no positive scale serves all positions: another length for some finished sums (equation sheet, free lengths).

In the last block, what follows is a norm, which reads only the direction of the finished sum, up to its eps. So the sum
may become `beta_i t_i` with any `beta_i > 0`, and the wanted branch moves along a line, `g_i + (beta_i − 1) e_i`,
`e_i = t_i / alpha`. For a given scale `m' = M ⊘ sqrt(a)` its reach is a quadratic in `s_i = beta_i − 1`,

    q_i(s) = A_i + 2 B_i s + C_i s² = 1,    (A, B, C)_i = Σ_j a_j (g², g e, e²)_ij / (M_j² d rho_i²),

which grows without bound, so it has a solution as soon as its least value is at most 1; and a scale that is longer by
sqrt(k) divides every q_i by k. So: the least k >= 1 that lets every position in, then for each the length nearest 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fit_lengths"]

SHORTEST = 0.5
"""No sum becomes shorter than this: the eps of the norm that reads it would count for more. What lengths cost is
measured at this one."""


def fit_lengths(a: Tensor, g: Tensor, along: Tensor, M: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """The weights `a (d,)`, divided by k, and the lengths `beta (n,)` with which every position reaches its target.

    `g (n, d)`, `along (n, d)`, `M (d,)`, `rho (n,)`, all float64. The sums must not be zero.
    """
    unit = a / (M.square() * g.shape[1])
    A, B, C = ((left * right * unit).sum(1) / rho.square() for left, right in ((g, g), (g, along), (along, along)))
    least = SHORTEST - 1
    lowest = (-B / C).clamp_min(least)
    k = float((A + 2 * B * lowest + C * lowest.square()).max().clamp_min(1))
    # Roots of q(s) = k; where the line only touches the reach, rounding must not make the discriminant negative.
    spread = (B.square() - C * (A - k)).clamp_min(0).sqrt()
    roots = torch.stack([-B - spread, -B + spread]) / C
    far = torch.where(roots < least - 1e-9, torch.inf, roots.clamp_min(least).log1p().abs())
    nearest = far.argmin(0, keepdim=True)
    return a / k, 1 + roots.gather(0, nearest)[0].clamp_min(least)
