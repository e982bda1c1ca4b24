"""Sizes in the graph are those of one rank.

before  %view : view(%x, [%b, %s, 12, 64])          12 heads over 8 ranks
after   %view : view(%x, [%b, %s, 2, 64])           rank 0;  1 on rank 7

Every literal that states the size of a sharded dim is written anew from the dim's tree: shapes of
views and new tensors, widths of splits, borders of slices. A dynamic size that holds a sharded axis
(batch times heads) is multiplied by local over whole. No collective is added or moved, so graphs of
all ranks have the same operators in the same order.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autotp.axes import (
    Dim,
    Product,
    Shares,
    is_sharded,
    local_size,
    ranges,
    ratio,
    size,
    slice_edges,
)
from autotp.planning import Plan
from autotp.program import Program
from autotp.rules import convolution, creation, rule_for, view
from autotp.rules.context import argument, position

aten = torch.ops.aten


def localize(program: Program, plan: Plan, *, rank: int, shapes: bool = False) -> Program:
    """The program of one rank; with `shapes` the values' example shapes are local too, for
    reading."""
    graph, new = Graph(), dict[Node, Node]()
    for node in program.graph.nodes:
        made = graph.node_copy(node, lambda n: new[n])
        made.meta = dict(node.meta)
        new[node] = made
        if node.op == "call_function" and _concerns(node, plan.shares):
            _rewrite(graph, node, made, plan.shares, rank)
        if shapes and node.op != "output":
            _reshape_example(made, plan.shares, rank, plan.tp)
    return replace(program, graph=graph, provenance=(*program.provenance, f"sizes of rank {rank}"))


def _concerns(node: Node, shares: Shares) -> bool:
    nodes = (node, *node.all_input_nodes)
    return any(_sharded(n.meta.get("dims"), shares) for n in nodes)


def _sharded(dims: Any, shares: Shares) -> bool:
    if isinstance(dims, list):
        return any(_sharded(item, shares) for item in dims)
    return any(is_sharded(dim, shares) for dim in dims or ())


def _rewrite(graph: Graph, old: Node, node: Node, shares: Shares, rank: int) -> None:
    rule, dims = rule_for(node), node.meta.get("dims")
    if node.target is aten.squeeze.default:  # a local size of 1 must not vanish
        before = old.args[0].meta["val"].shape  # type: ignore[union-attr]
        ones = [i for i, count in enumerate(before) if isinstance(count, int) and count == 1]
        node.target, node.args = aten.squeeze.dims, (node.args[0], ones)
    elif rule in (view.regroup, view.expand, creation.create):
        _shape(graph, old, node, dims, shares, rank)
    elif rule is view.split:
        _split(node, dims, shares, rank)
    elif rule is view.slice_:
        _slice(node, _operand_dims(old), shares, rank)
    elif rule is convolution.convolution:
        _convolution(node, dims, shares, rank)
    elif rule in (view.repeat, view.repeat_interleave):
        _repeat(graph, node, _operand_dims(old), dims, shares, rank)


def _operand_dims(node: Node) -> Any:
    source = node.args[0]
    assert isinstance(source, Node)
    return source.meta["dims"]


def _shape(graph: Graph, old: Node, node: Node, dims: Any, shares: Shares, rank: int) -> None:
    """Rewrite the argument that is a shape: of the whole result, or of the dims that are made."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    at = next((i for i, name in enumerate(names) if name in ("size", "shape", "sizes")), None)
    if at is None or at >= len(node.args) or not isinstance(node.args[at], (list, tuple)):
        return
    first = 0
    if node.target is aten.unflatten.int:
        first = position(node.args[1], len(old.args[0].meta["dims"]))  # type: ignore
    given = node.args[at]
    assert isinstance(given, (list, tuple))
    wanted = dims[first : first + len(given)]
    node.update_arg(at, _sizes(graph, node, given, wanted, shares, rank))


def _sizes(graph: Graph, node: Node, given: Any, dims: Any, shares: Shares, rank: int) -> list[Any]:
    result: list[Any] = []
    for literal, dim in zip(given, dims, strict=True):
        if not is_sharded(dim, shares) or (isinstance(literal, int) and literal == -1):
            result.append(literal)
            continue
        here = local_size(dim, shares, rank)
        if here is not None:
            result.append(here)
            continue
        pair = ratio(dim, shares, rank)
        assert pair is not None and isinstance(literal, Node), f"{node}: no local size of {dim}"
        result.append(_scaled(graph, node, literal, *pair))
    return result


def _scaled(graph: Graph, node: Node, size: Any, times: int, over: int) -> Any:
    """A size times a fraction; nodes that compute it go before `node`."""
    if times == over:
        return size
    if isinstance(size, int):
        return size * times // over
    with graph.inserting_before(node):
        scaled = graph.call_function(operator.mul, (size, times))
        result = graph.call_function(operator.floordiv, (scaled, over))
    for made in (scaled, result):
        made.meta = {key: node.meta.get(key) for key in ("calls", "stack_trace")}
    return result


def _split(node: Node, outs: Any, shares: Shares, rank: int) -> None:
    at = position(argument(node, 2, "dim", 0), len(outs[0]))
    if not any(is_sharded(dims[at], shares) for dims in outs):
        return
    widths = [local_size(dims[at], shares, rank) for dims in outs]
    node.target, node.args = aten.split_with_sizes.default, (node.args[0], widths, at)
    node.kwargs = {}


def _slice(node: Node, before: Any, shares: Shares, rank: int) -> None:
    at = position(argument(node, 1, "dim", 0), len(before))
    if not is_sharded(before[at], shares):
        return
    if node.target is aten.narrow.default:
        given = argument(node, 2, "start"), argument(node, 3, "length")
        start = _from_left(given[0], before[at])
        held = ranges(before[at], shares, rank)
        first, last = (_held_before(held, place) for place in (start, start + given[1]))
        node.args, node.kwargs = (node.args[0], at, first, last - first), {}
        return
    step = argument(node, 4, "step", 1)
    start, stop = argument(node, 2, "start", 0) or 0, argument(node, 3, "end", None)
    if step != 1:  # a step picks out of a minor axis, which is whole on every rank
        node.args = (node.args[0], at, start, sys.maxsize, step)
        return
    held = ranges(before[at], shares, rank)
    start, stop = (_held_before(held, _from_left(x, before[at])) for x in (start, stop))
    node.args = (node.args[0], at, start, stop, 1)


def _convolution(node: Node, dims: Any, shares: Shares, rank: int) -> None:
    """A convolution of split channels is depthwise: it has as many groups as channels."""
    if is_sharded(dims[1], shares) and argument(node, convolution.GROUPS, "groups", 1) != 1:
        groups = local_size(dims[1], shares, rank)
        if len(node.args) > convolution.GROUPS:
            node.update_arg(convolution.GROUPS, groups)
        else:
            node.update_kwarg("groups", groups)


def _from_left(place: int | None, dim: Dim) -> int:
    whole = size(dim)
    assert whole is not None
    if place is None:
        return whole
    return max(0, min(place + whole if place < 0 else place, whole))


def _held_before(held: tuple[tuple[int, int], ...], place: int) -> int:
    return sum(max(0, min(stop, place) - start) for start, stop in held)


def _repeat(graph: Graph, node: Node, before: Any, after: Any, shares: Shares, rank: int) -> None:
    before = (Product(()),) * (len(after) - len(before)) + tuple(before)

    def copies(index: int, given: Any) -> Any:
        if not is_sharded(after[index], shares):
            return given
        many, one = local_size(after[index], shares, rank), local_size(before[index], shares, rank)
        pair = ratio(after[index], shares, rank)
        if many is None or one is None:
            inner = ratio(before[index], shares, rank)
            assert pair and inner
            return _scaled(graph, node, given, pair[0] * inner[1], pair[1] * inner[0])
        return many // one

    if rule_for(node) is view.repeat:
        given: Any = node.args[1]  # of the last dims: tile may give fewer than there are
        made = [copies(i, size) for i, size in enumerate(given, len(after) - len(given))]
        node.update_arg(1, made)
    else:
        at = position(argument(node, 2, "dim"), len(after))
        node.update_arg(1, copies(at, node.args[1]))
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "output_size"}


def _reshape_example(node: Node, shares: Shares, rank: int, ranks: int) -> None:
    """Give an example value its local shape."""
    value, dims = node.meta.get("val"), node.meta.get("dims") or ()
    if isinstance(value, torch.Tensor) and "sliced" in node.meta:
        shape: list[Any] = list(value.shape)
        at = node.meta["sliced"]
        start, stop = slice_edges(shape[at], ranks)[rank : rank + 2]
        shape[at] = stop - start
        node.meta["val"] = value.new_empty(shape)
        return
    if not isinstance(value, torch.Tensor) or not _sharded(dims, shares):
        return
    if node.meta.get("placement", "I")[0] != "S":
        return
    shape = list(value.shape)
    for i, dim in enumerate(dims):
        if is_sharded(dim, shares):
            here, pair = local_size(dim, shares, rank), ratio(dim, shares, rank)
            if here is not None:
                shape[i] = here
            elif pair is not None:
                shape[i] = shape[i] * pair[0] // pair[1]
    node.meta["val"] = value.new_empty(shape)
