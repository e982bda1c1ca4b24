"""Rules of operators that make tensors from sizes: every dim is a new axis."""

from __future__ import annotations

from torch.fx import Node

from autotp.rules.context import Context, Dims, shape


def create(ctx: Context, node: Node) -> Dims:
    """full, zeros, ones: alike everywhere, so a rank makes its local size."""
    return ctx.fresh(shape(node))


def count(ctx: Context, node: Node) -> Dims:
    """arange, linspace: the value is the position, so a rank takes its own part of the whole."""
    return ctx.fresh(shape(node))
