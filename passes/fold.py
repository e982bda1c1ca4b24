"""f and g work together with a neighbour, where that saves the copy that they make alone.

before  %f : copy_to_region(%x)              one product reads it
        %y : linear(%f, w, b)
after   %y : column_product(%x, w, b, False)

before  %f : copy_to_region(%x)              several operators read it
after   %f : copy_each_to_region(%x, 2)
        %f_1 : getitem(%f, 0)                one for each of them

before  %g : reduce_from_region(%p)
        %y : add(%g, b)                      a bias
after   %y : reduce_with_bias(%p, b)

On one rank's graph, after the proof: what is computed and what is sent stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.program import Program, copied, regions, written
from autotp.runtime.collectives import copy_to_region, reduce_from_region
from autotp.runtime.folded import column_product, copy_each_to_region, reduce_with_bias

aten = torch.ops.aten
_VIEWS = {aten.flatten.using_ints, aten.reshape.default, aten.view.default}


def fold(program: Program) -> Program:
    """One rank's program with f's and g's folded into their neighbours."""
    graph = copied(program.graph)
    kept, places = written(graph), regions(graph)
    for node in list(graph.nodes):
        if node in kept:
            continue
        if node.target is copy_to_region:
            if not _into_product(graph, node, places) and len(node.users) > 1:
                _one_for_each(graph, node)
        elif node.target is reduce_from_region:
            _with_bias(graph, node, places)
    return replace(program, graph=graph)


def _into_product(graph: Graph, f: Node, places: Mapping[Node, int]) -> bool:
    """Have the one product that reads an f, or a view of it, do what f does. What modules on the
    way are given is then in front of f: its gradient is the whole one, as the model's."""
    value, reader = f, _reader(f, places)
    while reader is not None and reader.target in _VIEWS and reader.args[0] is value:
        value, reader = reader, _reader(reader, places)
    if reader is None or reader.kwargs:
        return False
    match reader.target, reader.args:
        case aten.linear.default, (x, weight, *rest):
            bias, transposed = rest[0] if rest else None, False
        case aten.addmm.default, (summand, x, weight):
            bias, transposed = summand, True
        case ((aten.mm.default | aten.matmul.default), (x, weight)):
            bias, transposed = None, True
        case _:
            return False
    if x is not value or weight is value or bias is value or _dim(x) < 2 or _dim(weight) != 2:
        return False
    if bias is not None and not _is_bias(bias, reader):
        return False
    reader.target, reader.args = column_product, (x, weight, bias, transposed)
    f.replace_all_uses_with(f.args[0])  # type: ignore[arg-type]
    graph.erase_node(f)
    return True


def _one_for_each(graph: Graph, f: Node) -> None:
    """Give each reader of an f a value of its own."""
    readers = sorted(f.users)
    with graph.inserting_before(f):
        copies = graph.call_function(copy_each_to_region, (f.args[0], len(readers)))
        copies.meta = {**f.meta, "val": [f.meta["val"]] * len(readers)}
        for index, reader in enumerate(readers):
            item = graph.call_function(operator.getitem, (copies, index))
            item.meta = dict(f.meta)
            reader.replace_input_with(f, item)
    graph.erase_node(f)


def _with_bias(graph: Graph, g: Node, places: Mapping[Node, int]) -> None:
    """Have g add the bias that follows it."""
    total, after = _reader(g, places), g.next
    while after.op == "get_attr":
        after = after.next
    if total is not after or total.target is not aten.add.Tensor or total.kwargs:
        return
    if total.meta.get("calls") != g.meta.get("calls"):
        return  # a hook of a module sees what is between
    first, bias = total.args
    if first is g and isinstance(bias, Node) and bias.op == "get_attr" and _is_bias(bias, g):
        total.target, total.args = reduce_with_bias, (g.args[0], bias)
        graph.erase_node(g)


def _reader(node: Node, places: Mapping[Node, int]) -> Node | None:
    """The only reader of a value, if it is in the same region."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    return reader if places[reader] == places[node] else None


def _is_bias(bias: object, result: Node) -> bool:
    """Whether it is a number for each feature of a result of at least two dims, of its dtype."""
    if not isinstance(bias, Node) or _dim(bias) != 1 or _dim(result) < 2:
        return False
    one, many = bias.meta["val"], result.meta["val"]
    return one.dtype == many.dtype and sizes.constant(one.shape[0] - many.shape[-1]) == 0


def _dim(node: object) -> int:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else 0
