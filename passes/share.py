"""What is computed again from the same values is computed once; steps that change nothing go.

before  %u0 : unsqueeze(%cos, 1)        in layer 0
        %u1 : unsqueeze(%cos, 1)        in layer 1
        %m : mul(%sin, 1.0)
after   %u : unsqueeze(%cos, 1)         before the layers, which all read it
        %sin

Operators that draw numbers, write to memory, talk to other ranks or stand in another grad or
autocast region are each left alone, and so are values that something writes to. What blocks share
is computed by the module that holds them all, before the first of them; where it cannot be, because
a block makes its operand, every block keeps its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.program import Program, affected, copied, is_pure, is_returned
from autotp.runtime.regions import SIDE_EFFECTS

aten = torch.ops.aten


def share(program: Program) -> Program:
    """The program without what it computes twice or in vain."""
    graph = copied(program.graph)
    changed = affected(graph)
    region, count = 0, 0
    known: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        region += node.target in SIDE_EFFECTS
        if node in changed or not is_pure(node) or is_returned(node):
            continue
        source = _unchanged(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            count += 1
            continue
        key = (region, node.target, _key(node.args), _key(node.kwargs))
        first = known.setdefault(key, node)
        if first is node:
            continue
        if _lifted(graph, first, node):
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            count += 1
        else:
            known[key] = node
    if not count:
        return program
    note = f"{count} values were computed already"
    return replace(program, graph=graph, provenance=(*program.provenance, note))


def _key(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_key, value))
    if isinstance(value, Mapping):
        return tuple(sorted((name, _key(item)) for name, item in value.items()))
    if isinstance(value, slice):
        return (slice, _key(value.start), _key(value.stop), _key(value.step))
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))  # 0.0 == -0.0
    return (type(value), value)  # 1, 1.0 and True are different operands


def _unchanged(node: Node) -> Node | None:
    """The operand that a node returns as it is: a value inside the model of the same shape and
    dtype."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or source.op != "call_function":
        return None
    if node.kwargs:
        return None
    one = {aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.add.Tensor: 0, aten.sub.Tensor: 0}
    if node.target not in one or isinstance(node.args[1], (Node, bool)):
        return None
    if node.args[1] != one[node.target]:
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    signed = before.is_floating_point() and one[node.target] == 0  # -0.0 + 0 is 0.0
    same = before.dtype == after.dtype and sizes.shape_of(before) == sizes.shape_of(after)
    return source if same and not signed else None


def _lifted(graph: Graph, first: Node, node: Node) -> bool:
    """Have a value be made where every reader is below; whether that is possible."""
    mine, other = first.meta.get("calls") or (), node.meta.get("calls") or ()
    depth = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
    depth = min(len(mine), len(other)) if depth is None else depth
    if depth == len(mine):
        return True
    start = first
    while (before := start.prev).op not in ("root", "placeholder"):
        calls = before.meta.get("calls") or ()
        if before.op != "get_attr" and calls[: depth + 1] != mine[: depth + 1]:
            break
        start = before
    inside = set()
    step = start
    while step is not first:
        inside.add(step)
        step = step.next
    if any(n in inside or n.op == "get_attr" for n in first.all_input_nodes):
        return False
    if any(n.target in SIDE_EFFECTS for n in inside):
        return False
    start.prepend(first)
    first.meta["calls"] = mine[:depth]
    return True
