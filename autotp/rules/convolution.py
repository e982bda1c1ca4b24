"""Rules of convolutions: spatial dims are mixed, channels pass where each has a filter of its
own."""

from __future__ import annotations

from torch.fx import Node

from autotp.rules.context import Context, Dims, argument, shape
from autotp.rules.notation import name

GROUPS = 6  # the place of the argument that says how many groups of channels there are


def convolution(ctx: Context, node: Node) -> Dims:
    """Depthwise: channels are independent. Otherwise they are made of all input channels."""
    x, weight = ctx.dims(node.args[0]), ctx.dims(node.args[1])
    if len(x) != len(weight):
        return NotImplemented
    reason = f"{name(node)} mixes the items of it"
    ctx.bar((*x[2:], *weight[1:]), reason)
    made = ctx.barred(shape(node)[2:], reason)
    groups = argument(node, GROUPS, "groups", 1)
    if ctx.table.size(x[1]) == ctx.table.size(weight[0]) == (groups, ()):
        ctx.table.unify(x[1], weight[0])
    else:
        ctx.bar((x[1],) if groups == 1 else (x[1], weight[0]), reason)
    ctx.same(ctx.dims(argument(node, 2, "bias")), (weight[0],) if argument(node, 2, "bias") else ())
    return (x[0], weight[0], *made)
