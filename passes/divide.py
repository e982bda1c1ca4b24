"""Slices that are the parts of one value are one split.

before  %a : slice(%x, 3, 0, 32)          the halves that a rotary embedding turns
        %b : slice(%x, 3, 32, 64)
after   %parts : split_with_sizes(%x, [32, 32], 3)
        %a : getitem(%parts, 0)
        %b : getitem(%parts, 1)

The gradient of a split is one concatenation; that of slices is a tensor of zeros for each, filled
in part, and their sum. Slices of sizes that depend on the call, along a dim that the ranks split,
of values that something writes to, and those that the caller gets stay slices.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.program import Program, affected, copied, is_returned
from autotp.rules.context import argument, position
from autotp.runtime.regions import SIDE_EFFECTS

aten = torch.ops.aten


def divide(program: Program) -> Program:
    """The program with the parts of a value taken at once."""
    if not any(_parts(node) for node in program.graph.nodes):
        return program
    graph = copied(program.graph)
    changed, count = affected(graph), 0
    for node in list(graph.nodes):
        parts = _parts(node)
        if parts and not changed & {node, *parts} and _together(parts):
            _split(graph, node, parts)
            count += 1
    if not count:
        return program
    note = f"{count} values are split instead of sliced"
    return replace(program, graph=graph, provenance=(*program.provenance, note))


def _parts(node: Node) -> list[Node]:
    """The slices of a value along one dim, in order, if each item is in one of them."""
    slices = [user for user in node.users if user.target is aten.slice.Tensor]
    value = node.meta.get("val")
    if len(slices) < 2 or not isinstance(value, torch.Tensor):
        return []
    dims = {position(argument(one, 1, "dim", 0), value.dim()) for one in slices}
    dim = dims.pop()
    size = sizes.constant(value.shape[dim])
    if dims or size is None or str(node.meta.get("placement")).startswith(f"S({dim}:"):
        return []
    bounds = [_bounds(one, size) for one in slices]
    found = sorted((pair, i) for i, pair in enumerate(bounds) if pair is not None)
    edges = [0, *(end for (_, end), _ in found)]
    covered = [begin for (begin, _), _ in found] == edges[:-1] and edges[-1] == size
    if len(found) < len(slices) or not covered or len(set(edges)) < len(edges):
        return []
    return [slices[i] for _, i in found]


def _bounds(node: Node, size: int) -> tuple[int, int] | None:
    """The items that a slice has, if the call does not decide it."""
    begin, end = argument(node, 2, "start", 0) or 0, argument(node, 3, "end")
    end = size if end is None else end
    if type(begin) is not int or type(end) is not int or argument(node, 4, "step", 1) != 1:
        return None
    begin, end, _ = slice(begin, end).indices(size)
    return begin, end


def _together(parts: list[Node]) -> bool:
    """Whether slices are made in one module call and region, for readers inside of the graph."""
    if len({part.meta.get("calls") for part in parts}) > 1:
        return False
    if any(map(is_returned, parts)):
        return False
    first, last = min(parts), max(parts)
    while first is not last:
        if first.target in SIDE_EFFECTS:
            return False
        first = first.next
    return True


def _split(graph: Graph, node: Node, parts: list[Node]) -> None:
    dim = position(argument(parts[0], 1, "dim", 0), node.meta["val"].dim())
    widths = [int(part.meta["val"].shape[dim]) for part in parts]
    first = min(parts)
    with graph.inserting_before(first):
        whole = graph.call_function(aten.split_with_sizes.default, (node, widths, dim))
        whole.meta = {**first.meta, "val": [part.meta["val"] for part in parts]}
        whole.meta["dims"] = [part.meta.get("dims") for part in parts]
        whole.meta.pop("source", None)
        made = [graph.call_function(operator.getitem, (whole, i)) for i in range(len(parts))]
    for part, item in zip(parts, made, strict=True):
        item.meta = dict(part.meta)
        part.replace_all_uses_with(item)
        graph.erase_node(part)
