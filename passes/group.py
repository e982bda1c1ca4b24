"""Attention reads keys and values that serve several heads as they are, not repeated.

before  %many : reshape(expand(unsqueeze(%k, 2), [b, 2, 3, s, 64]), [b, 6, s, 64])   and so for %v
        %y : scaled_dot_product_attention(%q, %many, %many_1, None, 0.0, True)
after   %y : scaled_dot_product_attention(%q, %k, %v, None, 0.0, True, enable_gqa=True)

Repeating copies all keys and values, a whole cache for each token. With a mask, or with heads that
are wider than 256, kernels on accelerators take no groups, and on CUDA those for half precision
alone do: other dtypes stay as they are where there is CUDA. So this is a rank's matter and no part
of the plan, which is the same everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.program import Program, affected, copied, regions
from autotp.rules.context import argument, position
from autotp.runtime.regions import SIDE_EFFECTS

aten = torch.ops.aten
_WIDEST = 256
_HALF = {torch.float16, torch.bfloat16}
_JOINS = {aten.flatten.using_ints, aten.reshape.default, aten._unsafe_view.default}


def group(program: Program) -> Program:
    """One rank's program, with attention over groups of heads where keys were repeated."""
    if not any(_shared(node) for node in program.graph.nodes):
        return program
    graph = copied(program.graph)
    count = _group(graph)
    if not count:
        return program
    graph.eliminate_dead_code(lambda n: n.is_impure() or n.target in SIDE_EFFECTS)
    note = f"{count} attentions read keys and values that were repeated"
    return replace(program, graph=graph, provenance=(*program.provenance, note))


def _group(graph: Graph) -> int:
    changed, places, count = affected(graph), regions(graph), 0
    for node in graph.nodes:
        found = _shared(node)
        if found is None:
            continue
        k, v, steps = found
        inside = [node, *steps]
        if changed & {k, v, *inside} or len({n.meta.get("calls") for n in inside}) > 1:
            continue  # or a hook of a module would see other values
        if len({places[n] for n in inside}) > 1:
            continue
        node.args = (node.args[0], k, v, *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}
        count += 1
    return count


def _shared(node: Node) -> tuple[Node, Node, list[Node]] | None:
    """Of an attention its keys and values before they were repeated, and the steps between."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    q, many_k, many_v = node.args[:3]
    assert isinstance(q, Node) and isinstance(many_k, Node) and isinstance(many_v, Node)
    if argument(node, 3, "attn_mask") is not None or argument(node, 7, "enable_gqa", False):
        return None
    dtype = q.meta["val"].dtype
    if dtype not in _HALF and torch.cuda.is_available():
        return None
    keys, values = _repeated(many_k), _repeated(many_v)
    if keys is None or values is None:
        return None
    (k, times, steps), (v, again, more) = keys, values
    heads = [sizes.constant(x.meta["val"].shape[-3]) for x in (q, k, v)]
    widths = [sizes.constant(x.meta["val"].shape[-1]) for x in (q, k, v)]
    if None in (*heads, *widths) or len(set(widths)) > 1 or widths[0] > _WIDEST:  # type: ignore
        return None
    if times != again or heads[1] != heads[2] or heads[0] != heads[1] * times:  # type: ignore
        return None
    return k, v, [*steps, *more]


def _repeated(node: Node) -> tuple[Node, int, list[Node]] | None:
    """A value each of whose heads is there several times in a row: the value, how many times, and
    the steps in between."""
    found = _steps(node)
    if found is None:
        return None
    steps, at = found
    x = steps[0].args[0]
    assert isinstance(x, Node)
    shape, many = x.meta["val"].shape, node.meta["val"].shape
    if len(shape) < 3 or len(many) != len(shape) or at != len(shape) - 2:
        return None
    *batch, heads, length, width = shape
    of, to = sizes.constant(heads), sizes.constant(many[-3])
    if not of or not to:
        return None
    times = to // of
    if not _is(node, (*batch, heads * times, length, width)):
        return None
    if len(steps) > 1 and not _is(steps[1], (*batch, heads, times, length, width)):
        return None
    return x, times, steps


def _steps(node: Node) -> tuple[list[Node], int] | None:
    """The operators that repeat items, in order, and the dim in front of which copies are made."""
    match node.target, node.args:
        case aten.repeat_interleave.self_int, (Node() as x, int(), int(dim)):
            return [node], position(dim, x.meta["val"].dim()) + 1
        case target, (Node(target=aten.expand.default, args=(Node() as one, *_)) as wide, *_):
            match one.target, one.args:
                case aten.unsqueeze.default, (Node() as x, int(dim)) if target in _JOINS:
                    return [one, wide, node], position(dim, x.meta["val"].dim() + 1)
    return None


def _is(node: Node, shape: tuple[int | torch.SymInt, ...]) -> bool:
    found = node.meta["val"].shape
    pairs = zip(found, shape, strict=False)
    return len(found) == len(shape) and all(sizes.constant(a - b) == 0 for a, b in pairs)
