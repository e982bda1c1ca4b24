"""Partial sums that are added share one all-reduce.

before  %g1 : reduce_from_region(%attention)      two branches beside each other
        %g2 : reduce_from_region(%mlp)
        %y : add(add(%g1, %g2), %x)
after   %p : add(%attention, %mlp)
        %g : reduce_from_region(%p)
        %y : add(%g, %x)

The sum over ranks of a sum is the sum of the sums. Only sums are looked through, and only where
nothing else reads a branch, in one grad and autocast region: a partial value never meets an
operator that is not linear, and a bias keeps its gradient. Models with parallel attention and MLP,
or with shared beside routed experts, issue one all-reduce less a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.planning import Collectives
from autotp.program import Program, copied, overwrites, regions
from autotp.runtime.collectives import reduce_from_region

aten = torch.ops.aten


def merge(program: Program, counts: Collectives) -> tuple[Program, Collectives]:
    """The program with fewer all-reduces, and how many it issues."""
    places = regions(program.graph)
    if not any(_is_root(node, places) and _mergeable(node, places) for node in places):
        return program, counts
    graph = copied(program.graph)
    places = regions(graph)
    nodes = reversed(list(graph.nodes))
    saved = sum(_merge(graph, node, places) for node in nodes if _is_root(node, places))
    note = f"{saved} all-reduces were merged with others"
    merged = replace(program, graph=graph, provenance=(*program.provenance, note))
    return merged, replace(counts, forward=counts.forward - saved)


def _is_sum(node: Any) -> bool:
    """Whether a node adds two tensors, and nothing else."""
    return (
        isinstance(node, Node)
        and (node.target is aten.add.Tensor or _is_sum_in_place(node))
        and not node.kwargs
        and all(isinstance(arg, Node) and _is_tensor(arg) for arg in node.args)
    )


def _is_sum_in_place(node: Node) -> bool:
    if node.target is not aten.add_.Tensor or not overwrites(node):
        return False
    return len({_dtype(arg) for arg in node.all_input_nodes}) == 1


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_root(node: Node, places: Mapping[Node, int]) -> bool:
    """Whether a node is a sum that is not an operand of another one alone."""
    return _is_sum(node) and not any(_is_inner(node, user, places) for user in node.users)


def _is_inner(node: Node, of: Node, places: Mapping[Node, int]) -> bool:
    """Whether a sum is read by one other sum alone, in the same grad and autocast region."""
    return _is_sum(node) and len(node.users) == 1 and _is_sum(of) and places[node] == places[of]


def _terms(node: Node, places: Mapping[Node, int]) -> list[Node]:
    """What a sum adds, looking through sums that it alone reads."""
    found: list[Node] = []
    for arg in node.args:
        assert isinstance(arg, Node)
        found += _terms(arg, places) if _is_inner(arg, node, places) else [arg]
    return found


def _merge(graph: Graph, root: Node, places: dict[Node, int]) -> int:
    """Give the partial sums among the terms of a sum one all-reduce; how many that saves."""
    terms, merged = _terms(root, places), _mergeable(root, places)
    if not merged:
        return 0
    with graph.inserting_before(root):
        total = merged[0].args[0]
        assert isinstance(total, Node)
        first = total
        for term in merged[1:]:
            total = _add(graph, total, term.args[0], root, first)
        whole = graph.call_function(reduce_from_region, (total,))
        whole.name = f"g_{root.name}"
        whole.meta = {**root.meta, "placement": "I"}
        rest = [term for term in terms if term not in merged]
        last = whole
        for term in rest:
            last = _add(graph, last, term, root, root)
    made = root.prev
    while made not in places:
        places[made], made = places[root], made.prev
    last.meta["source"] = root.meta.get("source", root.name)
    root.replace_all_uses_with(last)
    _erase(graph, root)
    return len(merged) - 1


def _mergeable(root: Node, places: Mapping[Node, int]) -> list[Node]:
    """The terms of a sum that can share one all-reduce."""
    merged = [term for term in _terms(root, places) if _is_partial(term, root)]
    return merged if len(merged) == len(set(merged)) > 1 else []


def _is_partial(term: Node, root: Node) -> bool:
    """Whether a term is an all-reduced partial sum of the sum's own shape that nothing else
    reads."""
    if term.target is not reduce_from_region or len(term.users) > 1:
        return False
    mine, whole = term.meta["val"], root.meta["val"]
    return mine.dtype == whole.dtype and sizes.shape_of(mine) == sizes.shape_of(whole)


def _add(graph: Graph, a: Any, b: Any, root: Node, like: Node) -> Node:
    made = graph.call_function(aten.add.Tensor, (a, b))
    made.meta = dict(like.meta)
    made.meta.update((key, root.meta[key]) for key in ("calls", "stack_trace") if key in root.meta)
    made.meta.pop("source", None)
    return made


def _erase(graph: Graph, node: Node) -> None:
    """Remove a node and what only it read, down to the partial sums."""
    operands = [arg for arg in node.args if isinstance(arg, Node)]
    graph.erase_node(node)
    for arg in operands:
        if not arg.users and (_is_sum(arg) or arg.target is reduce_from_region):
            _erase(graph, arg)
