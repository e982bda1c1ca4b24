"""f and g work together with a neighbour, where that saves the copy that they make alone.

before  %f : copy_to_region(%x)              one product reads it
        %y : linear(%f, w, b)
after   %y : column_product(%x, w, b, False)

before  %p : linear(%x, w)                   g alone reads it
        %g : reduce_from_region(%p)
        %y : add(%g, b)                      a bias, if there is one
after   %y : row_product(%x, w, b, False)

before  %f : copy_to_region(%x)              several operators read it
after   %f : copy_each_to_region(%x, 2)
        %f_1 : getitem(%f, 0)                one for each of them, or for the module that it is in

On one rank's graph, after the proof: what is computed and what is sent stays as it is.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.program import Program, copied, regions, written
from autotp.runtime.collectives import copy_to_region, reduce_from_region
from autotp.runtime.folded import column_product, copy_each_to_region, row_product

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
            if not _into_column(graph, node, places) and len(node.users) > 1:
                _one_for_each(graph, node)
        elif node.target is reduce_from_region:
            _into_row(graph, node, places)
    return replace(program, graph=graph)


def _into_column(graph: Graph, f: Node, places: Mapping[Node, int]) -> bool:
    """Have the one product that reads an f, or a view of it, do what f does. What modules on the
    way are given is then in front of f: its gradient is the whole one, as the model's."""
    value, reader = f, _reader(f, places)
    while reader is not None and reader.target in _VIEWS and reader.args[0] is value:
        value, reader = reader, _reader(reader, places)
    found = _product(reader)
    if reader is None or found is None:
        return False
    x, weight, bias, transposed = found
    if x is not value or weight is value or bias is value:
        return False
    reader.target, reader.args = column_product, (x, weight, bias, transposed)
    f.replace_all_uses_with(f.args[0])  # type: ignore[arg-type]
    graph.erase_node(f)
    return True


def _into_row(graph: Graph, g: Node, places: Mapping[Node, int]) -> None:
    """Have a product do what g does, and add the bias that follows."""
    product = g.args[0]
    assert isinstance(product, Node)
    found = _product(product)
    if found is None or _reader(product, places) is not g or _next(product) is not g:
        return
    x, weight, bias, transposed = found
    if bias is not None or _calls(product) != _calls(g):
        return  # or a hook of a module sees what is between
    result, total = g, _next(g)
    if total.target is aten.add.Tensor and _reader(g, places) is total and not total.kwargs:
        one, other = total.args
        is_own = isinstance(other, Node) and other.op == "get_attr" and _is_bias(other, g)
        if one is g and is_own and _calls(g) == _calls(total):
            result, bias = total, other
    result.target, result.args = row_product, (x, weight, bias, transposed)
    if result is not g:
        graph.erase_node(g)
    graph.erase_node(product)


def _one_for_each(graph: Graph, f: Node) -> None:
    """Give each operator of f's own module that reads it a value of its own, and each module that
    it calls one: its hooks see one input, as the model's."""
    depth = len(_calls(f))
    readers: dict[Any, list[Node]] = defaultdict(list)
    for reader in sorted(f.users):
        calls = _calls(reader)
        readers[calls[: depth + 1] if len(calls) > depth else reader].append(reader)
    if len(readers) == 1:
        return
    with graph.inserting_before(f):
        copies = graph.call_function(copy_each_to_region, (f.args[0], len(readers)))
        copies.meta = {**f.meta, "val": [f.meta["val"]] * len(readers)}
        for index, same in enumerate(readers.values()):
            item = graph.call_function(operator.getitem, (copies, index))
            item.meta = dict(f.meta)
            for reader in same:
                reader.replace_input_with(f, item)
    graph.erase_node(f)


def _product(node: Node | None) -> tuple[Node, Node, Any, bool] | None:
    """Of a product of rows with a weight the two, its bias, and whether the weight is [in, out]."""
    if node is None or node.kwargs:
        return None
    bias: Any = None
    match node.target, node.args:
        case aten.linear.default, (x, weight, *rest):
            bias, transposed = rest[0] if rest else None, False
        case aten.addmm.default, (summand, x, weight):
            bias, transposed = summand, True
        case ((aten.mm.default | aten.matmul.default), (x, weight)):
            transposed = True
        case _:
            return None
    assert isinstance(x, Node) and isinstance(weight, Node)
    fits = _dim(x) > 1 and _dim(weight) == 2 and (bias is None or _is_bias(bias, node))
    return (x, weight, bias, transposed) if fits else None


def _reader(node: Node, places: Mapping[Node, int]) -> Node | None:
    """The only reader of a value, if it is in the same region."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    return reader if places[reader] == places[node] else None


def _next(node: Node) -> Node:
    """The operator after this one."""
    node = node.next
    while node.op == "get_attr":
        node = node.next
    return node


def _calls(node: Node) -> tuple[Any, ...]:
    return node.meta.get("calls") or ()


def _is_bias(bias: Any, result: Node) -> bool:
    """Whether it is a number for each feature of a result of at least two dims, of its dtype."""
    if not isinstance(bias, Node) or _dim(bias) != 1 or _dim(result) < 2:
        return False
    one, many = bias.meta["val"], result.meta["val"]
    return one.dtype == many.dtype and sizes.constant(one.shape[0] - many.shape[-1]) == 0


def _dim(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0
