"""Rules of operators that treat every element alike: dims pass through, broadcasting included."""

from __future__ import annotations

from torch.fx import Node

from autotp.rules.context import Context, Dims, shape, tensors
from autotp.rules.notation import name


def pointwise(ctx: Context, node: Node) -> Dims:
    """Element by element, operands broadcast against each other."""
    return ctx.broadcast([ctx.dims(operand) for operand in tensors(node)], len(shape(node)))


def like(ctx: Context, node: Node) -> Dims:
    """The result has the dims of the first operand; the others give a dtype or nothing."""
    return ctx.dims(node.args[0])


def prelu(ctx: Context, node: Node) -> Dims:
    """prelu: slopes lie along the second dim, not along the last; one slope serves every item."""
    dims, slopes = ctx.dims(node.args[0]), ctx.dims(node.args[1])
    if any(slopes):
        ctx.bar([*dims[1:2], *slopes], f"{name(node)} has a slope for each item of it")
    return dims


def isin(ctx: Context, node: Node) -> Dims:
    """Whether each element is in a set: pointwise in the elements, the set is read whole."""
    if len(node.args) > 1 and isinstance(node.args[1], Node):
        ctx.bar(ctx.dims(node.args[1]), "aten.isin reads the whole set")
    return ctx.dims(node.args[0])
