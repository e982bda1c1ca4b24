"""f moves above the norms of parallel branches, which then share it.

before  %n1 : layer_norm(%x, norm1.weight)      %f1 : copy_to_region(%n1)      attention
        %n2 : layer_norm(%x, norm2.weight)      %f2 : copy_to_region(%n2)      MLP beside it
after   %f : copy_to_region(%x)
        %w1, %w2 : copy_all_to_region([norm1.weight, norm2.weight])
        %n1 : layer_norm(%f, %w1)
        %n2 : layer_norm(%f, %w2)

The backward of an operator is linear in the gradient of its result, whatever its forward is: ranks
may take their parts of the gradient through it, and add them up behind it. So one all-reduce of
activations is left for each value that branches share, and a small one for the parameters between.
Only operators with small parameters (one dim) are passed, and only where nothing else reads them.
All stays within one grad and autocast region, and f does not cut a module's call in two.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from autotp import sizes
from autotp.gradients import needs_grad
from autotp.planning import Collectives
from autotp.program import Program, affected, common_calls, copied, is_pure, regions
from autotp.runtime.collectives import copy_all_to_region, copy_to_region


def hoist(program: Program, counts: Collectives) -> tuple[Program, Collectives]:
    """The program with fewer all-reduces in its backward, and how many it issues."""
    groups = _groups(program)
    if not groups:
        return program, counts
    does, graph = needs_grad(program), copied(program.graph)
    new = dict(zip(program.graph.nodes, graph.nodes, strict=True))
    saved = small = 0
    for x, copies, place in groups:
        parameters = _parameters(program, x, _made(x, copies))
        saved += sum(does[f] for f in copies) - does[x]
        small += len({_dtype(p) for p in parameters if does[p]})
        old = [new[f] for f in copies]
        _hoist(graph, new[x], old, [new[p] for p in parameters], new[place])
    for _, copies, _ in groups:
        for f in copies:
            graph.erase_node(new[f])
    note = f"{saved} all-reduces of the backward were merged with others"
    changed = replace(program, graph=graph, provenance=(*program.provenance, note))
    return changed, replace(counts, backward=counts.backward - saved, parameters=small)


def _groups(program: Program) -> list[tuple[Node, list[Node], Node]]:
    """Values that several f's are of, of the value itself or of what one operator makes of it, and
    before which node one f of them stands."""
    found: dict[tuple[Node, int], list[Node]] = defaultdict(list)
    changed, places = affected(program.graph), regions(program.graph)
    for node in program.graph.nodes:
        if node.target is copy_to_region and node not in changed:
            norm = _source(node)
            found[norm, places[node]].append(node)
            if _is_passed(norm, program) and places[norm] == places[node]:
                found[_source(norm), places[node]].append(node)
    every = [(x, copies) for (x, _), copies in found.items() if len(copies) > 1]
    stands = [(x, copies, _place(program, x, copies, places)) for x, copies in every]
    return [(x, copies, place) for x, copies, place in stands if place is not None]


def _place(
    program: Program, x: Node, copies: Sequence[Node], places: Mapping[Node, int]
) -> Node | None:
    """Where one f stands: before the whole call of a module that only some of the f's are in, so
    that the call stays one, in the region of all. None if it cannot stand there, or if it would
    read parameters of modules other than the caller's own, which may be gathered there only."""
    made = _made(x, copies)
    calls = common_calls(made)
    if any(len(_calls(norm)) > len(calls) + 1 for norm in made if _parameters(program, x, [norm])):
        return None
    first = min(made)
    depth = len(calls) + 1
    inside = _calls(first)[:depth]
    node = first
    while node.op == "get_attr" or (len(inside) == depth and _calls(node)[:depth] == inside):
        first, node = (first if node.op == "get_attr" else node), node.prev
    return first if x < first and places[first] == places[copies[0]] else None


def _calls(node: Node) -> tuple[Any, ...]:
    return node.meta.get("calls") or ()


def _is_passed(node: Node, program: Program) -> bool:
    """Whether f can be above an operator: it keeps the shape of its first operand, all others are
    small parameters, and nothing but f reads it."""
    source = node.args[0] if node.args else None
    if not is_pure(node) or len(node.users) > 1 or not isinstance(source, Node):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.dtype != after.dtype or sizes.shape_of(before) != sizes.shape_of(after):
        return False
    others = [n for n in node.all_input_nodes if n is not source]
    return all(n.op == "get_attr" and len(program.tensors[str(n.target)].shape) < 2 for n in others)


def _source(node: Node) -> Node:
    assert isinstance(node.args[0], Node)
    return node.args[0]


def _made(x: Node, copies: Sequence[Node]) -> list[Node]:
    """The operators between a value and its f's; the f itself where there is none."""
    return [f if _source(f) is x else _source(f) for f in copies]


def _parameters(program: Program, x: Node, made: Sequence[Node]) -> list[Node]:
    """The parameters of the operators between a value and its f's."""
    found = dict.fromkeys(n for node in made for n in node.all_input_nodes if n is not x)
    return [n for n in found if program.tensors[str(n.target)].kind == "parameter"]


def _dtype(node: Node) -> torch.dtype:
    found = node.meta["val"].dtype
    assert isinstance(found, torch.dtype)
    return found


def _hoist(
    graph: Graph, x: Node, copies: Sequence[Node], parameters: Sequence[Node], first: Node
) -> None:
    """Have one f of a value, and one of the parameters of each dtype, before a node."""
    passed = {f: _source(f) for f in copies if _source(f) is not x}
    made = _made(x, copies)
    facts: dict[str, Any] = {"placement": "R", "calls": common_calls(made)}
    facts["stack_trace"] = min(made).meta.get("stack_trace")

    def call(function: Any, args: Any, name: str, meta: Mapping[str, Any]) -> Node:
        node = graph.create_node("call_function", function, args, name=name)
        node.meta = {**meta, **facts}
        return node

    with graph.inserting_before(first):
        new = {x: call(copy_to_region, (x,), f"f_{x.name}", x.meta)}
        for dtype in dict.fromkeys(map(_dtype, parameters)):
            same = [p for p in parameters if _dtype(p) == dtype]
            for parameter in same:
                if first < parameter:
                    first.prepend(parameter)
            meta = {key: [p.meta[key] for p in same] for key in ("val", "dims")}
            joint = call(copy_all_to_region, (same,), "f_parameters", meta)
            for index, p in enumerate(same):
                new[p] = call(operator.getitem, (joint, index), "f_parameter", p.meta)
    for f in copies:
        f.replace_all_uses_with(passed.get(f, new[x]))
    for norm in passed.values():
        norm.args, norm.kwargs = map_arg((norm.args, norm.kwargs), lambda n: new.get(n, n))
        norm.meta["placement"] = "R"
