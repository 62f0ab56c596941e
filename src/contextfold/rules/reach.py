"""What a scaled RMS norm can give of many wanted branches at once, its scale left as it is."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["nearest_reachable"]

HALVINGS = 60
"""Of the bracket of the multiplier: more than float64 can tell apart."""


def nearest_reachable(
    g: Tensor, m: Tensor, weights: Tensor | None = None, present: Tensor | None = None, pull: float = 0.0
) -> Tensor:
    """Unit-RMS rows `y (n, d)` for which `m ⊙ y` comes nearest to the wanted branches `g (n, d)`, scale `m (d,)`.

    They minimise `Σ_k w_k (m_k y_k − g_k)² + pull Σ_k (y_k − u_k)²` for `weights` w `(d,)`, 1 by default, and `present`
    rows u `(n, d)`: a coordinate that the scale makes small is not moved for what it can hardly bring. [ours]

    The stationary points of [E] App. B.2, `y_k ∝ (w_k g_k m_k + pull u_k) / (w_k m_k² + pull − mu)`, with the
    multiplier kept at `mu ≤ 0`: minus mu is a floor under the squared scale, as high as the length of y asks. A branch
    that is shorter than what the norm gives at least would want mu > 0, and then what is left of the norm goes to
    coordinates of the smallest scale, on which nothing depends and which no fit over many rows can hit; its direction
    is taken instead (mu = 0). [ours]
    """
    m = m.double()
    w = torch.ones_like(m) if weights is None else weights.double()
    a, b = w * g.double() * m, w * m.square()
    if present is not None:
        a, b = a + pull * present.double(), b + pull
    low = -a.square().mean(-1, keepdim=True).sqrt()
    high = torch.zeros_like(low)
    tiny = torch.finfo(torch.float64).tiny
    for _ in range(HALVINGS):
        mu = (low + high) / 2
        long = (a / (b - mu + tiny)).square().mean(-1, keepdim=True) > 1
        low, high = torch.where(long, low, mu), torch.where(long, mu, high)
    y = a / (b - low + tiny)
    return y / y.square().mean(-1, keepdim=True).sqrt().clamp_min(tiny)
