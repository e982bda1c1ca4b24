"""Run one operator whole and on shards, along every axis that inference allows for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autotp.axes import Axis, balanced, is_mixed, is_sharded, leaves, overlap, ranges
from autotp.planning import Plan, ShardedAxis
from autotp.program import Guards, Program, Signature
from autotp.runtime.weights import shard, unshard
from passes.infer import Inferred, infer
from passes.localize import localize

BIAS = {
    torch.ops.aten.addmm.default: 0,
    torch.ops.aten.baddbmm.default: 0,
    torch.ops.aten.linear.default: 2,
}
SPECIAL = ("lookup", "classes")  # done by operators of their own, tested with them


@dataclass(frozen=True)
class Outcome:
    """What was tried of one call: axes that were sharded, and those that may not be."""

    sharded: int
    barred: tuple[str, ...]
    special: int


def trace(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Program, list[Tensor]]:
    """A program of one operator; its tensor arguments (in lists too) are placeholders."""
    graph, tensors = Graph(), list[Tensor]()

    def place(value: Any) -> Any:
        if isinstance(value, Tensor):
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = value
            tensors.append(value)
            return node
        if isinstance(value, (list, tuple)):
            return type(value)(place(item) for item in value)
        return value

    placed = [place(arg) for arg in args], {key: place(value) for key, value in kwargs.items()}
    node = graph.call_function(op, tuple(placed[0]), placed[1])
    node.meta["val"] = op(*args, **kwargs)
    graph.output((node,))
    signature = Signature(
        None, None, tuple(f"x{i}" for i in range(len(tensors))), Guards((), {}, ())
    )
    return Program(graph, {}, {}, signature, False), tensors


def prove(op: Any, *args: Any, ranks: Sequence[int] = (2, 3), **kwargs: Any) -> Outcome:
    """Shard every free axis of a call and compare with the whole; AssertionError names the axis."""
    program, tensors = trace(op, args, kwargs)
    inferred = infer(program)
    call = next(n for n in program.graph.nodes if n.op == "call_function")
    axes = {a.name: a for dims in _all(inferred) for dim in dims for a in leaves(dim)}
    special = _named(inferred, SPECIAL)
    free = [a for a in axes.values() if a.name not in inferred.bars and (a.size or 0) > 1]
    tried = 0
    for axis, p in itertools.product(free, ranks):
        if axis.name in special or (axis.size or 0) < p:
            continue
        alone = {axis.name: ()}
        if any(overlap(d, alone) or is_mixed(d, alone) for dims in _all(inferred) for d in dims):
            continue  # refused by passes/choose.py
        compare(program, inferred, call, tensors, axis, p)
        tried += 1
    barred = tuple(name for name in axes if name in inferred.bars and (axes[name].size or 0) > 1)
    return Outcome(tried, barred, len(special))


def unjustified(op: Any, *args: Any, p: int = 2, **kwargs: Any) -> list[str]:
    """Reasons of the barred axes along which shards give the right result all the same."""
    program, tensors = trace(op, args, kwargs)
    inferred = infer(program)
    call = next(n for n in program.graph.nodes if n.op == "call_function")
    axes = {a.name: a for dims in _all(inferred) for dim in dims for a in leaves(dim)}
    found = []
    for name, bar in sorted(inferred.bars.items()):
        if name not in axes or (axes[name].size or 0) < p:
            continue
        try:
            compare(program, inferred, call, tensors, axes[name], p)
        except (AssertionError, RuntimeError, ValueError, IndexError, StopIteration):
            continue
        found.append(bar.reason)
    return found


def compare(
    program: Program, inferred: Inferred, call: Node, tensors: list[Tensor], axis: Axis, p: int
) -> None:
    """One axis over p ranks: results of shards, put together, are the whole result."""
    assert axis.size is not None
    bounds = balanced(axis.size, p)
    plan = Plan("", p, (ShardedAxis(axis.name, "mlp", axis.size, bounds, (), ()),), (), ())
    for node in program.graph.nodes:
        node.meta["dims"], node.meta["placement"] = inferred.dims[node], "I"
    inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
    contracted = axis.name in _named(inferred, ("contract",))
    parts = []
    for rank in range(p):
        local = localize(program, plan, rank=rank)
        node = next(n for n in local.graph.nodes if n.target == call.target or _renamed(n, call))
        env = {}
        for source, tensor in zip(inputs, tensors, strict=True):
            held = [ranges(dim, plan.shares, rank) for dim in inferred.dims[source]]
            env[source.name] = shard(tensor, held)
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n, e=env: e[n.name])
        if rank and contracted and call.target in BIAS:  # it is added once, behind g
            at = BIAS[call.target]
            if len(args) > at:
                args = (*args[:at], torch.zeros_like(args[at]), *args[at + 1 :])
        assert callable(node.target)
        parts.append(node.target(*args, **kwargs))
    outs, whole = inferred.dims[call], call.meta["val"]
    if not isinstance(outs, list):
        outs, whole, parts = [outs], [whole], [[part] for part in parts]
    for index, (dims, want) in enumerate(zip(outs, whole, strict=True)):
        if not isinstance(want, Tensor):
            continue
        mine = [part[index] for part in parts]
        if any(is_sharded(dim, plan.shares) for dim in dims):
            held = [[ranges(dim, plan.shares, r) for dim in dims] for r in range(p)]
            found = [unshard(mine, held)]
        elif contracted:
            found = [torch.stack(mine).sum(0)]
            if call.target is torch.ops.aten.mean.dim:  # the rewriter divides by the whole count
                shares = [length / axis.size for length in _lengths(bounds)]
                found = [torch.stack([m * s for m, s in zip(mine, shares, strict=True)]).sum(0)]
        else:
            found = mine
        for part in found:
            where = f"{call.target} along {axis.name} (size {axis.size}) over {p} ranks"
            assert part.shape == want.shape, f"{where}: {part.shape}, not {want.shape}"
            assert torch.allclose(part, want, rtol=1e-9, atol=1e-9, equal_nan=True), where


def _lengths(bounds: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(bounds)]


def _renamed(node: Node, call: Node) -> bool:
    """`split` is localized to `split_with_sizes`, `squeeze` to `squeeze.dims`."""
    return node.op == "call_function" and node.name == call.name


def _all(inferred: Inferred) -> list[Any]:
    found: list[Any] = []
    for value in inferred.dims.values():
        found += value if isinstance(value, list) else [value or ()]
    return [dims for dims in found if dims is not None]


def _named(inferred: Inferred, kinds: Sequence[str]) -> set[str]:
    """Axes that a rule made a statement of these kinds about."""
    pairs = zip(inferred.uses, inferred.use_dims, strict=True)
    return {axis.name for use, dim in pairs if use.kind in kinds for axis in leaves(dim)}
