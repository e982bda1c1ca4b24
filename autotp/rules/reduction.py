"""Rules of operators that reduce or normalize a dim, and of attention."""

from __future__ import annotations

import math

from torch.fx import Node

from autotp import sizes
from autotp.rules.context import Context, Dims, Value, argument, position, shape
from autotp.rules.notation import apply, name
from autotp.unify import Factors


def along(ctx: Context, node: Node) -> Dims:
    """softmax, cumsum, flip, ...: the items of one dim (or several) are mixed, the rest passes."""
    dims = ctx.dims(node.args[0])
    ctx.bar([dims[i] for i in _reduced(node, len(dims))], f"{name(node)} mixes the items of it")
    return dims


def last(ctx: Context, node: Node) -> Dims:
    """layer_norm and rms_norm: the normalized dims are mixed, weights lie along them."""
    dims, count = ctx.dims(node.args[0]), len(argument(node, 1, "normalized_shape"))
    ctx.bar(dims[len(dims) - count :], f"{name(node)} normalizes over it")
    for index in (2, 3):
        operand = ctx.dims(argument(node, index, "weight" if index == 2 else "bias"))
        ctx.same(operand, dims[len(dims) - len(operand) :])
    return dims


def differences(ctx: Context, node: Node) -> Dims:
    """diff: neighbours along one dim are subtracted, also from what is put before and behind."""
    operands = [dims for dims in map(ctx.dims, node.all_input_nodes) if dims]
    at = position(argument(node, 2, "dim", -1), len(operands[0]))
    reason = f"{name(node)} subtracts neighbours along it"
    ctx.bar([dims[at] for dims in operands], reason)
    for dims in operands[1:]:
        ctx.same(operands[0][:at] + operands[0][at + 1 :], dims[:at] + dims[at + 1 :])
    made = ctx.barred([shape(node)[at]], reason)
    return (*operands[0][:at], *made, *operands[0][at + 1 :])


def histogram(ctx: Context, node: Node) -> Dims:
    """histc, bincount: every item is counted."""
    reason = f"{name(node)} counts all items"
    for operand in node.all_input_nodes:
        ctx.bar(ctx.dims(operand), reason)
    return ctx.barred(shape(node), reason)


def triangle(ctx: Context, node: Node) -> Dims:
    """triu and tril: positions of the last two dims are compared."""
    dims = ctx.dims(node.args[0])
    ctx.bar(dims[-2:], f"{name(node)} compares positions of it")
    return dims


def total(ctx: Context, node: Node) -> Dims:
    """sum: linear, so a sharded dim leaves a partial sum."""
    dims = ctx.dims(node.args[0])
    reduced = _reduced(node, len(dims))
    for i in reduced:
        ctx.use("contract", node, dims[i])
    return _kept(node, dims, reduced)


def mean(ctx: Context, node: Node) -> Dims:
    """mean: a sum over a number of items, which is linear too, but as a part of a norm costs an
    all-reduce of its own (`norm`), so it is worth it for some axes only."""
    dims = ctx.dims(node.args[0])
    reduced = _reduced(node, len(dims))
    for i in reduced:
        if str(node.target) != "aten.mean.dim" or ctx.table.size(dims[i])[1]:
            ctx.bar([dims[i]], f"{name(node)} reduces over it")
        else:
            ctx.use("contract", node, dims[i])
            ctx.use("norm", node, dims[i])
    return _kept(node, dims, reduced)


def count(node: Node) -> int:
    """The number of items that a mean is over."""
    source = node.args[0]
    assert isinstance(source, Node)
    whole = source.meta["val"].shape
    return math.prod(int(whole[i]) for i in _reduced(node, len(whole)))


def reduce(ctx: Context, node: Node) -> Value:
    """max, argmax, norm, ...: the reduced dims need all their items."""
    dims = ctx.dims(node.args[0])
    reduced = _reduced(node, len(dims))
    ctx.bar([dims[i] for i in reduced], f"{name(node)} reduces over it")
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        return [_resized(ctx, sizes.shape_of(v), dims, reduced) for v in value]
    return _resized(ctx, shape(node), dims, reduced)


def attention(ctx: Context, node: Node) -> Dims:
    """softmax(q k^T + mask) v: heads are independent, head sizes of q and k and keys are mixed."""
    q, k, v = node.args[:3]
    mask = argument(node, 3, "attn_mask")
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    grouped = bool(argument(node, 7, "enable_gqa", False))
    if grouped:
        query, heads = ctx.dims(q), ctx.dims(k)[-3]
        pair = ctx.table.split_minor(query[-3], _ratio(ctx, query[-3], heads))
        if pair is None:
            ctx.bar([query[-3], heads], "its query heads cannot be grouped")
            pair = (heads, ())
        ctx.table.unify(pair[0], heads)
        ctx.table.unify(heads, ctx.dims(v)[-3])
        text = "... h l !e, ... g !s !e, ... g !s v, ... l !s -> ... h l v"
    else:
        text = "... l !e, ... !s !e, ... !s v, ... l !s -> ... l v"
    out = apply(ctx, node, text, (q, k, v, None))
    if isinstance(mask, Node):
        masked = ctx.dims(mask)
        scores = (*out[:-1], ctx.dims(k)[-2])
        ctx.broadcast([masked, scores], len(scores))
    if argument(node, 5, "is_causal", False):
        ctx.bar([out[-2]], "causal attention compares positions of it")
    for dim in out[:-2]:
        ctx.use("attend", node, dim, v)
    ctx.use("gemm", node, out[-1], v)
    # `s` is contracted inside the operator, where softmax has barred it already
    ctx.uses = [use for use in ctx.uses if not (use.node is node and use.kind == "contract")]
    return out


def cross_entropy(ctx: Context, node: Node) -> Dims:
    """The classes of a loss are one dim of logits; targets are indices into it."""
    logits, target = ctx.dims(node.args[0]), node.args[1]
    assert isinstance(target, Node)
    index = 0 if len(logits) == 1 else 1
    rest = logits[:index] + logits[index + 1 :]
    weight = ctx.dims(argument(node, 2, "weight"))
    if weight:
        ctx.same(weight, (logits[index],))
    if target.meta["val"].is_floating_point():
        ctx.bar([logits[index]], "its targets are probabilities of every class")
        ctx.same(ctx.dims(target), logits)
    else:
        ctx.same(ctx.dims(target), rest)
        ctx.use("classes", node, logits[index])
    if argument(node, 3, "reduction", 1) != 0:
        ctx.bar(rest, "the loss averages over it")
        return ()
    return rest


def _ratio(ctx: Context, query: Factors, heads: Factors) -> sizes.Size:
    found = sizes.divide(ctx.table.size(query), ctx.table.size(heads))
    assert found is not None, "query heads are a multiple of key heads"
    return found


def _reduced(node: Node, rank: int) -> list[int]:
    given = None
    for at, spec in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if spec.name in ("dim", "dims"):
            given = argument(node, at, spec.name, spec.default_value)
    if given is None or given == []:
        return list(range(rank))
    found = [given] if isinstance(given, int) else list(given)
    return [position(dim, rank) for dim in found]


def _kept(node: Node, dims: Dims, reduced: list[int]) -> Dims:
    keep = len(shape(node)) == len(dims)
    return tuple(
        () if i in reduced else dim for i, dim in enumerate(dims) if keep or i not in reduced
    )


def _resized(ctx: Context, out: tuple[sizes.Size, ...], dims: Dims, reduced: list[int]) -> Dims:
    if len(out) != len(dims):
        return tuple(dim for i, dim in enumerate(dims) if i not in reduced)
    barred = "its items are chosen from a reduced dim"
    return tuple(
        ctx.barred([size], barred)[0] if i in reduced else dim
        for i, (dim, size) in enumerate(zip(dims, out, strict=True))
    )
