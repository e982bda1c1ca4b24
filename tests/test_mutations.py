"""Every fault that is planted in a good program is caught, by the checker or by running it.

The checker must refuse each graph with one f or g deleted, doubled or moved, a bias added before g
as well, a value outside of a region read behind f, a size or a slice changed, ranges of ranks
exchanged or shifted, a random stream or number exchanged, or a gather dropped, and each plan under
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
from autotp.runtime.folded import row_product
from autotp.runtime.random import draw
from passes.check import check
from passes.localize import localize
from tests import small
from tests.models import tiny_gpt2
from tests.oneprocess import refill

TP = 3
INNER: dict[str, Callable[[], nn.Module]] = {
    "plain": small.Mlp,
    "positions": small.SlopedAttention,
    "normed": small.NormedAttention,
}
KINDS = (*INNER, "sliced", "training", "evaluation")
Mutant = tuple[str, Program]
aten = torch.ops.aten


class Sliced(nn.Module):
    """A fused gate, taken apart by slices; no norm before and no bias after, but another tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(small.WIDTH, 16), nn.Linear(8, small.WIDTH, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        return x + torch.tanh(self.down(torch.relu(both[..., 8:]) * both[..., :8]))


@functools.cache
def plan_of(kind: str) -> Plan:
    if kind in (*INNER, "sliced"):
        model: nn.Module = Sliced() if kind == "sliced" else small.Residual(INNER[kind]())
        return autotp.plan(model, TP, example_inputs=(torch.zeros(3, 5, small.WIDTH),))
    model = tiny_gpt2(resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)
    tokens = torch.zeros(3, 5, dtype=torch.long)
    call: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if kind == "training":
        call["labels"] = tokens.clone()
        return autotp.plan(model.train(), TP, example_inputs=call)
    return autotp.plan(model.eval(), TP, example_inputs=call)


def local(kind: str, rank: int) -> Program:
    plan = plan_of(kind)
    return localize(plan.program(), plan, rank=rank)


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


def sooner(graph: Graph, node: Node) -> bool:
    """f comes before the norm whose result it copied."""
    norm = node.args[0]
    if not isinstance(norm, Node) or norm.target is not aten.layer_norm.default:
        return False
    node.replace_all_uses_with(norm)
    with graph.inserting_before(norm):
        moved = graph.call_function(copy_to_region, (norm.args[0],))
    moved.meta = dict(node.meta)
    norm.replace_input_with(norm.args[0], moved)  # type: ignore[arg-type]
    return True


def spread(graph: Graph, node: Node) -> bool:
    """All readers of a value read it behind f, those outside of the region too."""
    source, order = node.args[0], list(graph.nodes)
    assert isinstance(source, Node)
    others = [n for n in source.users if n is not node and order.index(n) > order.index(node)]
    for reader in others:
        reader.replace_input_with(source, node)
    return bool(others)


def bias_early(graph: Graph, node: Node) -> bool:
    """A row bias is added to the partial sum before g, and after it as well."""
    readers = [n for n in node.users if n.target is aten.add.Tensor and n.args[0] is node]
    if not readers or not isinstance(readers[0].args[1], Node):
        return False
    partial, bias = node.args[0], readers[0].args[1]
    assert isinstance(partial, Node)
    if bias.op != "get_attr":
        return False
    with graph.inserting_before(node):
        again = graph.call_function(aten.add.Tensor, (partial, bias))
    node.prepend(bias)
    again.prepend(bias)
    again.meta = dict(partial.meta)
    node.update_arg(0, again)
    return True


def shift(graph: Graph, node: Node) -> bool:
    """One position goes from the second rank to the first, or to both."""
    first, second, *rest = node.args[2]  # type: ignore[misc]
    if isinstance(first[0], int):
        node.update_arg(2, ((first[0], first[1] + 1), (second[0] + 1, second[1]), *rest))
    else:
        wider = (*first[:-1], (first[-1][0], first[-1][1] + 1))
        node.update_arg(2, (wider, second, *rest))
    return True


def border(graph: Graph, node: Node) -> bool:
    """A slice takes as many other items."""
    x, dim, start, stop, *rest = node.args
    if not isinstance(start, int) or not isinstance(stop, int) or stop > 1000:
        return False
    by = 1 if start == 0 else -1
    node.args = (x, dim, start + by, stop + by, *rest)
    return True


def same_draw(graph: Graph, node: Node) -> bool:
    """Two random operators draw the same numbers."""
    others = [n for n in graph.nodes if n.target is draw and n is not node]
    node.update_arg(3, others[0].args[3])
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


def uneven(graph: Graph, node: Node) -> bool:
    """One item goes from a part of a split to the next."""
    first, second, *rest = node.args[1]  # type: ignore[misc]
    node.update_arg(1, [first + 1, second - 1, *rest])
    return True


def stream(graph: Graph, node: Node) -> bool:
    """A random operator draws from the other stream."""
    node.update_arg(1, "replicated" if node.args[1] == "sharded" else "sharded")
    return True


SIZED = {torch.ops.aten.split_with_sizes.default, torch.ops.aten.reshape.default}
BORDERS = {gather_from_region, scatter_to_region}
RULES: dict[Callable[[Graph, Node], bool], set[Any]] = {
    bias_early: {reduce_from_region},
    border: {aten.slice.Tensor},
    delete: {copy_to_region, reduce_from_region, gather_from_region},
    double: {copy_to_region, reduce_from_region},
    later: {reduce_from_region},
    exchange: {
        vocabulary.embedding,
        vocabulary.cross_entropy,
        gather_from_region,
        scatter_to_region,
    },
    same_draw: {draw},
    shift: {
        vocabulary.embedding,
        vocabulary.cross_entropy,
        gather_from_region,
        scatter_to_region,
    },
    sooner: {copy_to_region},
    spread: {copy_to_region},
    stream: {draw},
    uneven: {aten.split_with_sizes.default},
    literal: {torch.ops.aten.view.default, *SIZED},
}


def mutants(kind: str, rank: int) -> Iterator[Mutant]:
    program = local(kind, rank)
    for change, targets in RULES.items():
        for number, node in enumerate(program.graph.nodes):
            if node.target in targets and (change not in (literal, border) or _split(node)):
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


def survives(program: Program, plan: Plan, rank: int) -> bool:
    try:
        check(program, plan, rank=rank)
    except CheckError:
        return False
    return True


RANKED = [(kind, rank) for kind in KINDS for rank in range(TP)]


def test_the_good_programs_are_proved() -> None:
    for kind, rank in RANKED:
        check(local(kind, rank), plan_of(kind), rank=rank)


def test_every_mutant_of_a_graph_is_refused() -> None:
    made, alive = [], []
    for kind, rank in RANKED:
        for name, program in mutants(kind, rank):
            made.append(name)
            if survives(program, plan_of(kind), rank):
                alive.append(f"{kind} on rank {rank}: {name}")
    assert not alive, f"{len(alive)} of {len(made)} mutants survive: {alive}"
    assert len(made) >= 500
    assert {name.split()[0] for name in made} == {change.__name__ for change in RULES}


def test_a_fused_weight_that_is_cut_in_another_way_is_refused() -> None:
    plan = plan_of("training")
    names = [t.name for t in plan.tensors if any("+" in str(dim) for dim in t.dims)]
    assert len(names) == 4  # the weight and bias of two layers
    for name in names:
        cut = recut(plan, name)
        assert not any(survives(local("training", rank), cut, rank) for rank in range(TP)), name


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


def test_a_bias_that_is_added_twice_behind_g_is_seen_when_run() -> None:
    """The checker proves where values lie, not that an operator was asked for."""
    model = refill(small.Mlp()).double()
    x = torch.randn(2, 3, small.WIDTH, dtype=torch.float64)
    lockstep = autotp.parallelize(model, devices=["cpu"] * TP, example_inputs=(x,))
    assert torch.allclose(lockstep(x), model(x))
    for rank in lockstep.ranks:
        (code,) = rank.down._tp_codes
        (row,) = code.graph.find_nodes(op="call_function", target=row_product)
        with code.graph.inserting_after(row):
            again = code.graph.call_function(aten.add.Tensor, (row, row.args[2]))
        row.replace_all_uses_with(again, delete_user_cb=lambda user, again=again: user is not again)
    assert not torch.allclose(lockstep(x), model(x))
