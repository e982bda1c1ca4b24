"""Placements: how one value lies on the ranks, as text.

I  the same on every rank, its gradient too (invariant)
R  the same on every rank, but used differently: its gradient is a partial sum (replicated)
S  each rank holds its part of one dim: `S(2: heads0*64)`
P  each rank holds a summand (partial)

The four meet only in f (I to R), g (P to I), and the gather and scatter of borders (S to I, I to
S).
"""

from __future__ import annotations

import os
from typing import Any

from torch.fx import Node

from autotp.axes import Shares, is_sharded


def text(dims: Any, shares: Shares) -> str:
    """`I`, or `S(dim: axes)` for the dim that carries a sharded axis."""
    if isinstance(dims, list):
        return ", ".join(text(item, shares) for item in dims)
    for index, dim in enumerate(dims or ()):
        if is_sharded(dim, shares):
            return f"S({index}: {dim})"
    return "I"


def locate(node: Node) -> str:
    """`modeling.py:213`: the innermost line outside of torch that led to the node's operator."""
    lines = [line for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    if not lines:
        return ""
    own = [line for line in lines if "/torch/nn/" not in line.replace(os.sep, "/")]
    file, line = (own or lines)[-1].split(", ")[:2]
    return f"{file.split('/')[-1].strip(chr(34))}:{line.removeprefix('line ')}"
