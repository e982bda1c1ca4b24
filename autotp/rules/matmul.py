"""Rules of matrix products: which dims are contracted, which come from the weight."""

from __future__ import annotations

from torch.fx import Node

from autotp.rules.context import Context, Dims, argument
from autotp.rules.notation import apply


def linear(ctx: Context, node: Node) -> Dims:
    """`x @ weight.T + bias`."""
    x, weight = node.args[0], node.args[1]
    bias = node.args[2] if len(node.args) > 2 else None
    assert isinstance(x, Node) and isinstance(weight, Node)
    out = apply(ctx, node, "... k, n k, n -> ... n", (x, weight, _node(bias)))
    ctx.use("gemm", node, out[-1], weight)
    return out


def addmm(ctx: Context, node: Node) -> Dims:
    """`bias + x @ weight`."""
    bias, x, weight = (_node(arg) for arg in node.args[:3])
    assert weight is not None
    out = apply(ctx, node, "m k, k n, m n -> m n", (x, weight, bias))
    ctx.use("gemm", node, out[-1], weight)
    return out


def baddbmm(ctx: Context, node: Node) -> Dims:
    """`bias + x @ y`, batched."""
    bias, x, y = (_node(arg) for arg in node.args[:3])
    out = apply(ctx, node, "b m k, b k n, b m n -> b m n", (x, y, bias))
    ctx.use("attend", node, out[0], y)
    ctx.use("gemm", node, out[-1], y)
    return out


def matmul(ctx: Context, node: Node) -> Dims:
    """`x @ y` of any rank: a GEMM where y is a matrix, a batched product otherwise."""
    x, y = (_node(arg) for arg in node.args[:2])
    assert x is not None and y is not None
    left, right = len(ctx.dims(x)), len(ctx.dims(y))
    match min(left, 2), min(right, 2):
        case 1, 1:
            return apply(ctx, node, "k, k ->", (x, y))
        case 1, _:
            out = apply(ctx, node, "k, ... k n -> ... n", (x, y))
        case _, 1:
            out = apply(ctx, node, "... m k, k -> ... m", (x, y))
        case _:
            out = apply(ctx, node, "... m k, ... k n -> ... m n", (x, y))
    ctx.use("gemm", node, out[-1], y)
    for dim in out[:-2] if right > 2 else ():
        ctx.use("attend", node, dim, y)
    return out


def grouped(ctx: Context, node: Node) -> Dims:
    """A product for each group of rows with the group's matrix: `x[rows of e] @ weights[e]`."""
    x, weights, ends = (_node(argument(node, i, n)) for i, n in enumerate(("self", "mat2", "offs")))
    assert x is not None and weights is not None
    if (len(ctx.dims(x)), len(ctx.dims(weights))) != (2, 3):
        return NotImplemented
    ctx.bar(ctx.dims(weights)[:1], "rows are sorted by it")
    ctx.bar((*ctx.dims(x)[:1], *ctx.dims(ends)), "rows are sorted by it")
    out = apply(ctx, node, "m k, e k n, e -> m n", (x, weights, ends))
    ctx.use("gemm", node, out[-1], weights)
    return out


def einsum(ctx: Context, node: Node) -> Dims:
    """Any contraction that is written out; a letter twice in one operand bars it."""
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    equation = equation.replace(" ", "")
    if "." in equation or "->" not in equation:
        return NotImplemented
    left, right = equation.split("->")
    specs = left.split(",")
    text = ", ".join(" ".join(spec) for spec in specs) + " -> " + " ".join(right)
    nodes = [_node(operand) for operand in operands]
    out = apply(ctx, node, text, nodes)
    for spec, operand in zip(specs, nodes, strict=True):
        assert operand is not None
        for letter in {letter for letter in spec if spec.count(letter) > 1}:
            ctx.bar([ctx.dims(operand)[spec.index(letter)]], "einsum takes a diagonal over it")
    if len(nodes) == 2:
        for letter in right:
            if letter in specs[1] and letter not in specs[0]:
                ctx.use("gemm", node, out[right.index(letter)], nodes[1])
            elif letter in specs[0] and letter in specs[1]:
                ctx.use("attend", node, out[right.index(letter)], nodes[1])
    return out


def _node(value: object) -> Node | None:
    return value if isinstance(value, Node) else None
