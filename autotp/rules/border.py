"""The rule of a place where a whole value is taken in parts.

`parted(x)` is x. It stands in a captured graph before a product whose weight is split along its
input while the input is whole: the last dim behind it is a new axis, and a rank that splits it
takes its own part of x. `passes/part.py` puts it there, `passes/insert.py` replaces it.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from autotp.rules.context import Context, Dims


def parted(value: Tensor) -> Tensor:
    """The value itself, in a graph that nothing was inserted into yet."""
    return value


def part(ctx: Context, node: Node) -> Dims:
    """The last dim begins a new axis, the others pass."""
    dims = ctx.dims(node.args[0])
    made = (*dims[:-1], ctx.table.new(ctx.table.size(dims[-1])))
    ctx.use("part", node, made[-1])
    return made
