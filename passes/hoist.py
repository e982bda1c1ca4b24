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
from autotp.program import Program, affected, common_calls, copied, is_pure
from autotp.runtime.collectives import copy_all_to_region, copy_to_region


def hoist(program: Program, counts: Collectives) -> tuple[Program, Collectives]:
    """The program with fewer all-reduces in its backward, and how many it issues."""
    groups = _groups(program)
    if not groups:
        return program, counts
    does, graph = needs_grad(program), copied(program.graph)
    new = dict(zip(program.graph.nodes, graph.nodes, strict=True))
    saved = small = 0
    for x, copies in groups:
        parameters = _parameters(program, x, copies)
        saved += sum(does[f] for f in copies) - does[x]
        small += len({_dtype(p) for p in parameters if does[p]})
        _hoist(graph, new[x], [new[f] for f in copies], [new[p] for p in parameters])
    note = f"{saved} all-reduces of the backward were merged with others"
    changed = replace(program, graph=graph, provenance=(*program.provenance, note))
    return changed, replace(counts, backward=counts.backward - saved, parameters=small)


def _groups(program: Program) -> list[tuple[Node, list[Node]]]:
    """Values that several f's are of: of the value itself, or of what one operator makes of it."""
    found: dict[Node, list[Node]] = defaultdict(list)
    changed = affected(program.graph)
    for node in program.graph.nodes:
        if node.target is copy_to_region and node not in changed:
            norm = _source(node)
            found[norm].append(node)
            if _is_passed(norm, program):
                found[_source(norm)].append(node)
    return [(x, copies) for x, copies in found.items() if len(copies) > 1]


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


def _parameters(program: Program, x: Node, copies: Sequence[Node]) -> list[Node]:
    """The parameters of the operators between a value and its f's."""
    passed = [_source(f) for f in copies if _source(f) is not x]
    found = dict.fromkeys(n for node in passed for n in node.all_input_nodes if n is not x)
    return [n for n in found if program.tensors[str(n.target)].kind == "parameter"]


def _dtype(node: Node) -> torch.dtype:
    found = node.meta["val"].dtype
    assert isinstance(found, torch.dtype)
    return found


def _hoist(graph: Graph, x: Node, copies: Sequence[Node], parameters: Sequence[Node]) -> None:
    """Have one f of a value, and one of the parameters of each dtype."""
    passed = {f: _source(f) for f in copies if _source(f) is not x}
    made = [passed.get(f, f) for f in copies]
    first = min(made)
    facts: dict[str, Any] = {"placement": "R", "calls": common_calls(made)}
    facts["stack_trace"] = first.meta.get("stack_trace")

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
        graph.erase_node(f)
    for norm in passed.values():
        norm.args, norm.kwargs = map_arg((norm.args, norm.kwargs), lambda n: new.get(n, n))
        norm.meta["placement"] = "R"
