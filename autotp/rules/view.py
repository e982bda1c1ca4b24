"""Rules of operators that move, split and join dims without touching the elements."""

from __future__ import annotations

import torch
from torch.fx import Node

from autotp import sizes
from autotp.rules.context import Context, Dims, Value, argument, position, shape
from autotp.rules.notation import name
from autotp.sizes import ONE, Size
from autotp.unify import Factors


def regroup(ctx: Context, node: Node) -> Dims:
    """view, reshape, flatten, squeeze, ...: the same items in the same order in another shape."""
    dims, wanted = ctx.dims(node.args[0]), shape(node)
    if node.target is torch.ops.aten.unsqueeze.default:  # whatever the sizes are
        at = position(int(node.args[1]), len(wanted))  # type: ignore[arg-type]
        return (*dims[:at], (), *dims[at:])
    found = ctx.table.regroup(dims, wanted)
    if found is not None:
        return _as_other(ctx, node, tuple(found))
    # where sizes cannot be divided, dims before and behind the changed ones still pass
    before = [ctx.table.size(dim) for dim in dims]
    first, last = sizes.common_ends(before, wanted)
    reason = f"{name(node)} mixes it with other dims"
    ctx.bar(dims[first : len(dims) - last], reason)
    made = ctx.barred(wanted[first : len(wanted) - last], reason)
    return (*dims[:first], *made, *dims[len(dims) - last :])


def _as_other(ctx: Context, node: Node, dims: Dims) -> Dims:
    """view_as, expand_as, ...: the shape is another tensor's, so that is split alike."""
    if str(node.target).endswith("_as.default"):
        ctx.same(dims, ctx.dims(node.args[1]))
    return dims


def as_complex(ctx: Context, node: Node) -> Dims:
    """view_as_complex: the last dim, of two, becomes one number."""
    dims = ctx.dims(node.args[0])
    ctx.bar(dims[-1:], f"{name(node)} makes one number of it")
    return dims[:-1]


def as_real(ctx: Context, node: Node) -> Dims:
    """view_as_real: a last dim of two is added."""
    reason = f"{name(node)} makes it of one number"
    return (*ctx.dims(node.args[0]), *ctx.barred(shape(node)[-1:], reason))


def permute(ctx: Context, node: Node) -> Dims:
    """permute, transpose, t, T: the dims in another order."""
    dims = ctx.dims(node.args[0])
    match node.args[1:]:
        case (int() as a, int() as b):
            order = list(range(len(dims)))
            a, b = position(a, len(dims)), position(b, len(dims))
            order[a], order[b] = order[b], order[a]
        case (list() | tuple() as given,):
            order = [position(int(dim), len(dims)) for dim in given]
        case _:
            order = list(reversed(range(len(dims))))
    return tuple(dims[dim] for dim in order)


def adjoint(ctx: Context, node: Node) -> Dims:
    """mT, adjoint: the last two dims exchanged."""
    dims = ctx.dims(node.args[0])
    return (*dims[:-2], dims[-1], dims[-2])


def expand(ctx: Context, node: Node) -> Dims:
    """expand: dims of size 1 become new axes along which the value is constant."""
    dims, wanted = ctx.dims(node.args[0]), shape(node)
    dims = ((),) * (len(wanted) - len(dims)) + dims
    made = (
        dim if dim or size == ONE else ctx.table.new(size)
        for dim, size in zip(dims, wanted, strict=True)
    )
    return _as_other(ctx, node, tuple(made))


def repeat(ctx: Context, node: Node) -> Dims:
    """repeat: each dim becomes copies, laid end to end: a product of a new axis and the dim."""
    dims, wanted = ctx.dims(node.args[0]), shape(node)
    dims = ((),) * (len(wanted) - len(dims)) + dims
    result = []
    for dim, size in zip(dims, wanted, strict=True):
        copies = sizes.divide(size, ctx.table.size(dim))
        result.append(ctx.table.new(copies) + dim if copies else _lost(ctx, node, dim, size))
    return tuple(result)


def repeat_interleave(ctx: Context, node: Node) -> Dims:
    """repeat_interleave by a number: each item becomes a run of copies."""
    dims, dim = ctx.dims(node.args[0]), argument(node, 2, "dim")
    if dim is None:
        return NotImplemented
    at = position(dim, len(dims))
    copies = sizes.divide(shape(node)[at], ctx.table.size(dims[at]))
    made = (
        dims[at] + ctx.table.new(copies) if copies else _lost(ctx, node, dims[at], shape(node)[at])
    )
    return (*dims[:at], made, *dims[at + 1 :])


def split(ctx: Context, node: Node) -> Value:
    """split, chunk, tensor_split: a dim cut into parts; each part is a dim of its own."""
    dims, outs = ctx.dims(node.args[0]), node.meta["val"]
    at = position(argument(node, 2, "dim", 0), len(dims))
    widths = [sizes.size_of(out.shape[at]) for out in outs]
    parts = ctx.table.cut(dims[at], widths)
    if parts is None:
        parts = [_lost(ctx, node, dims[at], width) for width in widths]
    return [(*dims[:at], part, *dims[at + 1 :]) for part in parts]


def slice_(ctx: Context, node: Node) -> Dims:
    """A slice is a cut whose other parts are dropped; a step picks out of a minor axis."""
    dims = ctx.dims(node.args[0])
    at = position(argument(node, 1, "dim", 0), len(dims))
    whole, part = ctx.table.size(dims[at]), shape(node)[at]
    start, step = argument(node, 2, "start", 0) or 0, argument(node, 4, "step", 1)
    if part == whole and step == 1 and start == 0:
        return dims
    made = None
    if not whole[1] and not part[1] and isinstance(start, int) and isinstance(step, int):
        made = _sliced(ctx, dims[at], start, step, part[0])
    if made is None:
        made = _lost(ctx, node, dims[at], part)
    return (*dims[:at], made, *dims[at + 1 :])


def select(ctx: Context, node: Node) -> Dims:
    """One item of a dim: a cut of width 1, dropped."""
    dims = ctx.dims(node.args[0])
    at, item = position(argument(node, 1, "dim"), len(dims)), argument(node, 2, "index")
    count, symbols = ctx.table.size(dims[at])
    if (
        not isinstance(item, int)
        or symbols
        or _sliced(ctx, dims[at], position(item, count), 1, 1) is None
    ):
        ctx.bar([dims[at]], f"{name(node)} picks one item of it")
    return dims[:at] + dims[at + 1 :]


def unbind(ctx: Context, node: Node) -> Value:
    """One tensor for each item of a dim: every rank needs them all."""
    dims = ctx.dims(node.args[0])
    at = position(argument(node, 1, "dim", 0), len(dims))
    ctx.bar([dims[at]], f"{name(node)} makes a tensor of each item")
    return [dims[:at] + dims[at + 1 :] for _ in node.meta["val"]]


def cat(ctx: Context, node: Node) -> Dims:
    """cat: one dim is the sum of the operands', the others are the same."""
    operands = [ctx.dims(operand) for operand in node.args[0]]  # type: ignore[union-attr]
    rank = len(shape(node))
    operands = [dims for dims in operands if len(dims) == rank]
    at = position(argument(node, 1, "dim", 0), rank)
    for dims in operands[1:]:
        ctx.same(operands[0][:at] + operands[0][at + 1 :], dims[:at] + dims[at + 1 :])
    joined = ctx.table.concat([dims[at] for dims in operands], shape(node)[at])
    return (*operands[0][:at], joined, *operands[0][at + 1 :])


def stack(ctx: Context, node: Node) -> Dims:
    """stack: a new dim that numbers the operands; every rank has them all."""
    operands = [ctx.dims(operand) for operand in node.args[0]]  # type: ignore[union-attr]
    at = position(argument(node, 1, "dim", 0), len(shape(node)))
    for dims in operands[1:]:
        ctx.same(operands[0], dims)
    made = ctx.barred([shape(node)[at]], f"{name(node)} numbers tensors along it")
    return (*operands[0][:at], *made, *operands[0][at:])


def pad(ctx: Context, node: Node) -> Dims:
    """pad: padded dims get items that belong to no axis, the others pass."""
    dims, given = ctx.dims(node.args[0]), argument(node, 1, "pad")
    result = list(dims)
    for pair in range(len(given) // 2):
        at = len(dims) - 1 - pair
        if given[2 * pair] != 0 or given[2 * pair + 1] != 0:
            result[at] = _lost(ctx, node, dims[at], shape(node)[at])
    return tuple(result)


def _sliced(ctx: Context, dim: Factors, start: int, step: int, length: int) -> Factors | None:
    count, _ = ctx.table.size(dim)
    start = max(0, min(position(start, count), count))
    if step == 1:
        widths = [start, length, count - start - length]
        found = ctx.table.cut(dim, [(width, ()) for width in widths if width])
        return found[1 if start else 0] if found and length else None
    if count % step or length != count // step or start >= step:
        return None
    pair = ctx.table.split_minor(dim, (step, ()))
    if pair is None:
        return None
    if _sliced(ctx, pair[1], start, 1, 1) is None:
        return None
    return pair[0]


def _lost(ctx: Context, node: Node, dim: Factors, size: Size) -> Factors:
    reason = f"{name(node)} moves its items where no axis follows"
    ctx.table.bar(dim, reason)
    return ctx.barred([size], reason)[0]
