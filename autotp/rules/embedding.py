"""Rules of table look-ups and of indexing by tensors."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from autotp.rules.context import Context, Dims, argument, position
from autotp.rules.notation import name


def embedding(ctx: Context, node: Node) -> Dims:
    """Rows of a table: the row dim is looked up (sharded rows give a masked, partial result)."""
    weight, index = node.args[0], node.args[1]
    assert isinstance(weight, Node)
    rows, *features = ctx.dims(weight)
    if argument(node, 3, "scale_grad_by_freq", False) or argument(node, 4, "sparse", False):
        ctx.bar([rows], "its gradient depends on how often each row is looked up, or is sparse")
    ctx.use("lookup", node, rows, weight)
    return (*ctx.dims(index), *features)


def index(ctx: Context, node: Node) -> Dims:
    """`x[i, :, j]` with tensors: indexed dims need all their items, the others pass."""
    return _indexed(ctx, node)


def index_put(ctx: Context, node: Node) -> Dims:
    """`x[i, :, j] = values`: as `index`, and values broadcast to what is indexed."""
    picked = _indexed(ctx, node)
    if picked is not NotImplemented:
        ctx.broadcast([picked, ctx.dims(node.args[2])], len(picked))
        for item in filter(None, node.args[1]):  # type: ignore[arg-type]
            ctx.bar(ctx.dims(item), f"{name(node)} writes all of these positions")
        return ctx.dims(node.args[0])
    return picked


def index_copy(ctx: Context, node: Node) -> Dims:
    """Items of one dim are replaced by, or added to, those of the source: the others pass."""
    dims, source = ctx.dims(node.args[0]), ctx.dims(node.args[3])
    at = position(argument(node, 1, "dim"), len(dims))
    ctx.bar([dims[at], source[at], *ctx.dims(node.args[2])], f"{name(node)} writes by position")
    ctx.same(dims[:at] + dims[at + 1 :], source[:at] + source[at + 1 :])
    return dims


def _indexed(ctx: Context, node: Node) -> Any:
    dims = ctx.dims(node.args[0])
    given: Any = node.args[1]
    places = [i for i, item in enumerate(given) if item is not None]
    for i in places:
        if given[i].meta["val"].dtype.is_floating_point or given[i].meta["val"].dtype.itemsize == 1:
            return NotImplemented  # a boolean mask: the result's size depends on data
    ctx.bar([dims[i] for i in places], f"{name(node)} looks items up by position")
    indices = [ctx.dims(given[i]) for i in places]
    picked = ctx.broadcast(indices, max(len(d) for d in indices))
    together = places == list(range(places[0], places[-1] + 1))
    first = places[0] if together else 0
    kept = [dim for i, dim in enumerate(dims) if i not in places]
    return (*kept[:first], *picked, *kept[first:])


def index_select(ctx: Context, node: Node) -> Dims:
    """Items of one dim, chosen by position: that dim needs all its items."""
    dims, chosen = ctx.dims(node.args[0]), ctx.dims(node.args[2])
    at = position(argument(node, 1, "dim"), len(dims))
    ctx.bar([dims[at]], f"{name(node)} looks items up by position")
    return (*dims[:at], *chosen, *dims[at + 1 :])


def scatter(ctx: Context, node: Node) -> Dims:
    """Items are written along one dim, by position: that dim needs all its items; other dims are
    the same where nothing is left out."""
    dims = ctx.dims(node.args[0])
    at = position(argument(node, 1, "dim"), len(dims))
    reason = f"{name(node)} writes by position"
    for operand in filter(None, map(ctx.dims, node.all_input_nodes[1:])):
        for i, (a, b) in enumerate(zip(dims, operand, strict=True)):
            if i == at or ctx.table.size(a) != ctx.table.size(b):
                ctx.bar([a, b], reason)
            else:
                ctx.table.unify(a, b)
    return dims


def gather(ctx: Context, node: Node) -> Dims:
    """gather along a dim: that dim needs all its items; index dims of equal size are the same."""
    source, chosen = ctx.dims(node.args[0]), ctx.dims(node.args[2])
    along = position(argument(node, 1, "dim"), len(source))
    for i, (a, b) in enumerate(zip(source, chosen, strict=True)):
        if i == along or ctx.table.size(a) != ctx.table.size(b):
            ctx.bar([a, b], f"{name(node)} looks items up by position")
        else:
            ctx.table.unify(a, b)
    return chosen
