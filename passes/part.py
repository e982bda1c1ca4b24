"""Large products that no pair splits are split along their inputs, which are whole.

before  %q : linear(%x, q_a.weight)              a norm over its output bars the columns
after   %part : parted(%x)                       the input features, a new axis
        %q : linear(%part, q_a.weight)           contracts it: row-parallel

A rank takes its own features of an input that all ranks have; the product is a partial sum, so it
costs an all-reduce forward, and an all-gather of the input's gradient backward. It is worth that
only where much would be computed on every rank: products are taken largest first, until `ENOUGH` of
the GEMM work is split, and those with fewer than `FEWEST` weights never are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.planning import Plan
from autotp.program import Program
from autotp.rules.border import parted
from passes.infer import Inferred

ENOUGH = 0.96
FEWEST = 256
KIND = "input"  # of the axes that begin at a `parted`

aten = torch.ops.aten


@dataclass(frozen=True)
class _Product:
    """A GEMM with a parameter: its weight, its other operand, and its work for each token."""

    node: Node
    weight: str
    source: Node
    work: int


def part(program: Program, inferred: Inferred, plan: Plan, layout: Plan | None) -> Program:
    """The program with its inputs taken in parts where that is worth it; the same one if nowhere.

    With the `layout` of an earlier capture the products are those that it has split in this way.
    """
    found = _products(program, inferred)
    if layout is None:
        chosen = _worth(found, plan) if plan.tp > 1 else []
    else:
        split = {name for axis in layout.axes if axis.kind == KIND for name in axis.rows}
        chosen = [product for product in found if product.weight in split]
    return _with_parts(program, chosen) if chosen else program


def _products(program: Program, inferred: Inferred) -> list[_Product]:
    """The GEMMs of a program with parameters, in graph order."""
    result = []
    for use in inferred.uses:
        weight = program.parameter(use.operand) if use.kind == "gemm" else None
        at = 1 if use.node.target in (aten.addmm.default, aten.baddbmm.default) else 0
        source = use.node.args[at]
        if weight is None or not isinstance(source, Node):
            continue
        out, x = (sizes.shape_of(node.meta["val"]) for node in (use.node, source))
        if not x[-1][1]:
            work = prod(size for size, _ in out) * x[-1][0]
            result.append(_Product(use.node, weight, source, work))
    return result


def _worth(found: list[_Product], plan: Plan) -> list[_Product]:
    total = sum(product.work for product in found)
    whole = [product for product in found if not plan.is_sharded(product.weight)]
    missing = sum(product.work for product in whole) - (1 - ENOUGH) * total
    chosen: list[_Product] = []
    by_weight: dict[str, list[_Product]] = defaultdict(list)
    for product in whole:
        by_weight[product.weight].append(product)
    for name in sorted(by_weight, key=lambda name: -sum(p.work for p in by_weight[name])):
        if missing <= 0:
            break
        if prod(plan.by_name[name].shape) < FEWEST:
            continue
        chosen += by_weight[name]
        missing -= sum(product.work for product in by_weight[name])
    return chosen


def _with_parts(program: Program, chosen: Iterable[_Product]) -> Program:
    source_of = {product.node: product.source for product in chosen}
    graph, new, parts = Graph(), dict[Node, Node](), dict[Node, Node]()
    for node in program.graph.nodes:
        source = source_of.get(node)
        if source is not None and source not in parts:
            made = graph.call_function(parted, (new[source],))
            made.name = f"part_{source.name}"
            kept = ("calls", "stack_trace")
            made.meta = {**{k: node.meta.get(k) for k in kept}, "val": source.meta["val"]}
            parts[source] = made
        operands = new if source is None else {**new, source: parts[source]}
        made = graph.node_copy(node, operands.__getitem__)
        made.meta = dict(node.meta)
        new[node] = made
    note = f"{len(parts)} inputs of products are taken in parts"
    return replace(program, graph=graph, provenance=(*program.provenance, note))
