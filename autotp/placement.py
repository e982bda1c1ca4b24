"""Placements: how one value lies on the ranks, as text.

I  the same on every rank, its gradient too (invariant)
R  the same on every rank, but used differently: its gradient is a partial sum (replicated)
S  each rank holds its part of one dim: `S(2: heads0*64)`
P  each rank holds a summand (partial)

The four meet only in f (I to R), g (P to I), and the gather and scatter of borders (S to I, I to S).
"""

from __future__ import annotations

from typing import Any

from autotp.axes import Shares, is_sharded


def text(dims: Any, shares: Shares) -> str:
    """`I`, or `S(dim: axes)` for the dim that carries a sharded axis."""
    if isinstance(dims, list):
        return ", ".join(text(item, shares) for item in dims)
    for index, dim in enumerate(dims or ()):
        if is_sharded(dim, shares):
            return f"S({index}: {dim})"
    return "I"
