"""Every fault that is planted in a good program is caught, by the checker or by running it.

The checker must refuse each graph with one f or g deleted, doubled or moved, a literal changed,
ranges of ranks exchanged, a random stream exchanged, or a gather dropped, and each plan under
which a fused weight is cut in another way. Weights in the wrong place are not in the graph: those
mutants are run.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

import autotp
from autotp.axes import Axis, Product
from autotp.errors import CheckError
from autotp.planning import Plan
from autotp.program import Program
from autotp.runtime import vocabulary
from autotp.runtime.collectives import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)
from autotp.runtime.random import draw
from passes.check import check
from passes.localize import localize
from tests import small
from tests.models import tiny_gpt2
from tests.oneprocess import refill

TP, RANK = 3, 1
KINDS = ("plain", "positions", "training", "evaluation")
Mutant = tuple[str, Program]


@functools.cache
def plan_of(kind: str) -> Plan:
    if kind in ("plain", "positions"):
        inner = small.Mlp() if kind == "plain" else small.SlopedAttention()
        model: nn.Module = small.Residual(inner)
        return autotp.plan(model, TP, example_inputs=(torch.zeros(3, 5, small.WIDTH),))
    model = tiny_gpt2(resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)
    tokens = torch.zeros(3, 5, dtype=torch.long)
    call: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if kind == "training":
        call["labels"] = tokens.clone()
        return autotp.plan(model.train(), TP, example_inputs=call)
    return autotp.plan(model.eval(), TP, example_inputs=call)


def local(kind: str) -> Program:
    plan = plan_of(kind)
    return localize(plan.program(), plan, rank=RANK)


def rewritten(
    program: Program, number: int, change: Callable[[Graph, Node], bool]
) -> Program | None:
    """A copy of the program with its node of a number changed; None if there is nothing to
    change."""
    graph, new = Graph(), dict[Node, Node]()
    for node in program.graph.nodes:
        new[node] = graph.node_copy(node, lambda n: new[n])
        new[node].meta = dict(node.meta)
    node = list(graph.nodes)[number]
    return replace(program, graph=graph) if change(graph, node) else None


def delete(graph: Graph, node: Node) -> bool:
    """Readers read the operand instead."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    return True


def double(graph: Graph, node: Node) -> bool:
    """The conversion is done twice."""
    with graph.inserting_after(node):
        again = graph.call_function(node.target, (node, *node.args[1:]), node.kwargs)  # type: ignore
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    return True


def later(graph: Graph, node: Node) -> bool:
    """g comes behind its reader: a bias or a residual is counted on every rank, a norm sees a
    part."""
    (reader,) = list(node.users)[:1]
    if reader.op != "call_function" or not isinstance(node.args[0], Node):
        return False
    while reader.target in (torch.ops.aten.view.default, torch.ops.aten.add.Tensor, draw):
        if len(reader.users) != 1 or next(iter(reader.users)).op == "output":
            break
        reader = next(iter(reader.users))
    partial = node.args[0]
    node.replace_all_uses_with(partial)
    with graph.inserting_after(reader):
        moved = graph.call_function(reduce_from_region, (reader,))
    moved.meta = dict(reader.meta)
    reader.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)
    graph.erase_node(node)
    return True


def exchange(graph: Graph, node: Node) -> bool:
    """Two ranks' positions are exchanged."""
    first, second, *rest = node.args[2]  # type: ignore[misc]
    node.update_arg(2, (second, first, *rest))
    return True


def literal(graph: Graph, node: Node) -> bool:
    """A size that is written in the call is off by one."""
    for index, given in enumerate(node.args[1:], 1):
        if isinstance(given, (list, tuple)):
            for place, size in enumerate(given):
                if isinstance(size, int) and not isinstance(size, bool) and size > 1:
                    changed = [*given[:place], size + 1, *given[place + 1 :]]
                    node.update_arg(index, changed)
                    return True
    return False


def stream(graph: Graph, node: Node) -> bool:
    """A random operator draws from the other stream."""
    node.update_arg(1, "replicated" if node.args[1] == "sharded" else "sharded")
    return True


SIZED = {torch.ops.aten.split_with_sizes.default, torch.ops.aten.reshape.default}
BORDERS = {gather_from_region, scatter_to_region}
RULES: dict[Callable[[Graph, Node], bool], set[Any]] = {
    delete: {copy_to_region, reduce_from_region, gather_from_region},
    double: {copy_to_region, reduce_from_region},
    later: {reduce_from_region},
    exchange: {
        vocabulary.embedding,
        vocabulary.cross_entropy,
        gather_from_region,
        scatter_to_region,
    },
    stream: {draw},
    literal: {torch.ops.aten.view.default, *SIZED},
}


def mutants(kind: str) -> Iterator[Mutant]:
    program = local(kind)
    for change, targets in RULES.items():
        for number, node in enumerate(program.graph.nodes):
            if node.target in targets and (change is not literal or _split(node)):
                made = rewritten(program, number, change)
                if made is not None:
                    yield f"{change.__name__} {node.name}", made


def _split(node: Node) -> bool:
    return str(node.meta.get("placement", "I")).startswith("S")


def recut(plan: Plan, name: str) -> Plan:
    """The plan with a fused weight cut as one block, which has the same local shape."""
    shard = plan.by_name[name]
    at = next(i for i, dim in enumerate(shard.dims) if "+" in str(dim))
    axis = next(axis for axis in plan.axes if name in axis.columns or axis.kind == "attention")
    rest = shard.shape[at] // axis.units
    dims = list(shard.dims)
    dims[at] = Product((Axis(axis.name, axis.units), Axis(str(rest), rest)))
    tensors = [replace(t, dims=tuple(dims)) if t.name == name else t for t in plan.tensors]
    return replace(plan, tensors=tuple(tensors))


def survives(program: Program, plan: Plan) -> bool:
    try:
        check(program, plan, rank=RANK)
    except CheckError:
        return False
    return True


def test_the_good_programs_are_proved() -> None:
    for kind in KINDS:
        check(local(kind), plan_of(kind), rank=RANK)


def test_every_mutant_of_a_graph_is_refused() -> None:
    made, alive = [], []
    for kind in KINDS:
        for name, program in mutants(kind):
            made.append(name)
            if survives(program, plan_of(kind)):
                alive.append(f"{kind}: {name}")
    assert not alive, f"{len(alive)} of {len(made)} mutants survive: {alive}"
    assert len(made) >= 100
    assert {name.split()[0] for name in made} == {change.__name__ for change in RULES}


def test_a_fused_weight_that_is_cut_in_another_way_is_refused() -> None:
    plan = plan_of("training")
    names = [t.name for t in plan.tensors if any("+" in str(dim) for dim in t.dims)]
    assert len(names) == 4  # the weight and bias of two layers
    for name in names:
        assert not survives(local("training"), recut(plan, name)), name


def test_shards_on_the_wrong_rank_are_seen_when_run() -> None:
    model = refill(tiny_gpt2()).eval()
    tokens = torch.randint(257, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(tokens, use_cache=False).logits
        lockstep = autotp.parallelize(model, devices=["cpu"] * TP)
        assert (lockstep(tokens, use_cache=False).logits - want).abs().max() < 1e-4
        names = [t.name for t in lockstep.plan.tensors if lockstep.plan.is_sharded(t.name)]
        tried = 0
        for name in names:
            one, other = (dict(rank.named_parameters())[name] for rank in lockstep.ranks[:2])
            if one.shape != other.shape:
                continue
            kept = copy.deepcopy(one.data)
            one.data, other.data = other.data, kept
            wrong = (lockstep(tokens, use_cache=False).logits - want).abs().max()
            one.data, other.data = other.data, one.data
            if "c_attn.bias" in name:  # a key's bias alone changes nothing, the others do
                assert wrong > 1e-6, name
            else:
                assert wrong > 1e-4, name
            tried += 1
        assert tried >= 10
        assert (lockstep(tokens, use_cache=False).logits - want).abs().max() < 1e-4
