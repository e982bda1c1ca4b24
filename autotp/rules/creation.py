"""Rules of operators that make tensors from sizes: every dim is a new axis."""

from __future__ import annotations

from torch.fx import Node

from autotp.rules.context import Context, Dims, shape


def size(ctx: Context, node: Node) -> None:
    """sym_size: the number is used as a number, so it must be the whole one."""
    ctx.bar([ctx.dims(node.args[0])[node.args[1]]], "its size is read as a number")  # type: ignore


def create(ctx: Context, node: Node) -> Dims:
    """full, zeros, ones: alike everywhere, so a rank makes its local size."""
    return ctx.fresh(shape(node))


def count(ctx: Context, node: Node) -> Dims:
    """arange, linspace: the value is the position, so a rank takes its own part of the whole."""
    return ctx.fresh(shape(node))
