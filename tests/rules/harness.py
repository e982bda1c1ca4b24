"""Run operators whole and on shards, along every axis that inference allows for them.

The oracle shares nothing with the product but the ranges of a dim: shards are taken and put
together by positions, ranks run side by side in one autograd graph, and a value that an operator
contracts is summed over the ranks at once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autotp.axes import Axis, Dim, balanced, is_mixed, is_sharded, leaves, overlap
from autotp.planning import Plan, ShardedAxis
from autotp.program import Guards, Program, Signature
from autotp.rules import name
from passes.infer import Inferred, infer
from passes.localize import localize
from tests.rules.ranks import copied, joined, leaf, positions, reduce, run

aten = torch.ops.aten
NO_VALUES = {f"aten.{op}" for op in ("empty", "new_empty", "empty_like", "rand_like", "randn_like")}
SPECIAL = ("lookup", "classes")  # done by operators of their own, tested with them


@dataclass
class Trace:
    """A program under construction: operators are run on whole values as they are called."""

    graph: Graph = field(default_factory=Graph)
    inputs: dict[Node, Tensor] = field(default_factory=dict)

    def input(self, value: Tensor) -> Node:
        """An operand of the program."""
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = value
        self.inputs[node] = value
        return node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A call; tensors among the arguments (in lists too) become inputs."""
        given = pytree.tree_map_only(Tensor, self.input, (args, kwargs))
        node = self.graph.call_function(op, *given)
        values = torch.fx.map_arg((node.args, node.kwargs), lambda n: copied(n.meta["val"]))
        node.meta["val"] = op(*values[0], **values[1])
        return node

    def case(self, *results: Node) -> Case:
        """What was called, inferred."""
        self.graph.output(results)
        signature = Signature(None, None, (), Guards((), {}, ()))
        program = Program(self.graph, {}, {}, signature, False)
        return Case(program, self.inputs, results, infer(program))


@dataclass(frozen=True)
class Case:
    """A program, its operands and results, and what inference found."""

    program: Program
    inputs: Mapping[Node, Tensor]
    results: tuple[Node, ...]
    inferred: Inferred

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """Leaf axes with at least two items, by name."""
        found = {a.name: a for dims in self.dims() for dim in dims for a in leaves(dim)}
        return {name: axis for name, axis in found.items() if (axis.size or 0) > 1}

    def dims(self) -> Iterator[tuple[Dim, ...]]:
        """The dims of every value."""
        for value in self.inferred.dims.values():
            yield from (dims or () for dims in (value if isinstance(value, list) else [value]))

    def used(self, *kinds: str) -> dict[str, set[Node]]:
        """Axes that a rule made a statement of these kinds about, with the nodes."""
        found: dict[str, set[Node]] = {}
        for use, dim in zip(self.inferred.uses, self.inferred.use_dims, strict=True):
            for axis in leaves(dim) if use.kind in kinds else ():
                found.setdefault(axis.name, set()).add(use.node)
        return found

    def refused(self, axis: str) -> bool:
        """Whether passes/choose.py does not take it: a dim is split twice, or only in part."""
        alone = {axis: ()}
        return any(overlap(d, alone) or is_mixed(d, alone) for dims in self.dims() for d in dims)

    @cached_property
    def whole(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Operands as leaves of autograd, and results."""
        env = {node.name: leaf(value, _fixed(value)) for node, value in self.inputs.items()}
        for _ in run([self.program.graph], [env]):
            pass
        return env, [env[node.name] for node in self.results]


@dataclass(frozen=True)
class Outcome:
    """How many axes (times numbers of ranks) were sharded, and which were not."""

    sharded: int
    barred: tuple[str, ...]
    special: int
    refused: int


def one(op: Any, *args: Any, **kwargs: Any) -> Case:
    """A program of one operator."""
    trace = Trace()
    node = trace.call(op, *args, **kwargs)
    if not isinstance(node.meta["val"], (list, tuple)):
        return trace.case(node)
    parts = range(len(node.meta["val"]))
    return trace.case(*(trace.call(operator.getitem, node, i) for i in parts))


def prove(case: Case, ranks: Sequence[int] = (2, 3)) -> Outcome:
    """Shard every free axis and compare with the whole; AssertionError names the axis."""
    special = case.used(*SPECIAL)
    free = [a for a in case.axes.values() if a.name not in case.inferred.bars]
    free = [a for a in free if a.name not in special]
    taken = [axis for axis in free if not case.refused(axis.name)]
    pairs = [(axis, p) for axis, p in itertools.product(taken, ranks) if (axis.size or 0) >= p]
    for axis, p in pairs:
        try:
            compare(case, axis, p)
        except AssertionError as error:
            place = f"{case.program.graph}\nalong {axis.name} (size {axis.size}) over {p} ranks"
            raise AssertionError(f"{place}: {error}") from error
    barred = tuple(name for name in case.axes if name in case.inferred.bars)
    return Outcome(len(pairs), barred, len(special), len(free) - len(taken))


def compare(case: Case, axis: Axis, p: int) -> None:
    """One axis over p ranks: results and gradients of shards are those of the whole."""
    plan = plan_of(axis, p)
    envs = split(case, plan, graded=True)
    contracts = {node.name for node in case.used("contract").get(axis.name, ())}
    for node in run(localized(case, plan), envs, contracts):
        if node.name in contracts:
            reduce(node, envs)
    for result, want in zip(case.results, case.whole[1], strict=True):
        mine = [env[result.name] for env in envs]
        held = _held(case.inferred.dims[result], plan)
        found = joined(mine, held) if held else mine[0]
        for part in [found] if held else mine:
            assert part.shape == want.shape, f"{part.shape}, not {want.shape}"
            if name(result) not in NO_VALUES:
                assert_close(part, want, result.name)
        assert found.requires_grad == want.requires_grad
        if want.requires_grad and "NotImplemented" not in str(want.grad_fn):
            _compare_gradients(case, plan, envs, found, want)


def _compare_gradients(
    case: Case, plan: Plan, envs: list[dict[str, Tensor]], found: Tensor, want: Tensor
) -> None:
    """Gradients of shards lie as the shards do; those of an operand that all hold add up."""
    operands, _ = case.whole
    nodes = [node for node in case.inputs if operands[node.name].requires_grad]
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(want)
    whole = torch.autograd.grad(
        want, [operands[n.name] for n in nodes], weight, retain_graph=True, allow_unused=True
    )
    local = torch.autograd.grad(
        found,
        [env[f"leaf_{n.name}"] for n in nodes for env in envs],
        weight,
        retain_graph=True,
        allow_unused=True,
    )
    for i, (node, expected) in enumerate(zip(nodes, whole, strict=True)):
        some = [
            torch.zeros_like(env[f"leaf_{node.name}"]) if grad is None else grad
            for env, grad in zip(envs, local[i * plan.tp : (i + 1) * plan.tp], strict=True)
        ]
        held = _held(case.inferred.dims[node], plan)
        total = joined(some, held) if held else torch.stack(some).sum(0)
        if expected is None:
            expected = torch.zeros_like(total)
        assert_close(total, expected, f"gradient of {node.name}")


def plan_of(axis: Axis, p: int) -> Plan:
    """A plan that shards one axis."""
    assert axis.size is not None
    sharded = ShardedAxis(axis.name, "mlp", axis.size, balanced(axis.size, p), (), ())
    return Plan("", p, (sharded,), (), ())


def localized(case: Case, plan: Plan) -> list[Graph]:
    """The graph of each rank."""
    for node in case.program.graph.nodes:
        node.meta["dims"], node.meta["placement"] = case.inferred.dims[node], "I"
    return [localize(case.program, plan, rank=rank).graph for rank in range(plan.tp)]


def split(case: Case, plan: Plan, graded: bool = False) -> list[dict[str, Tensor]]:
    """The operands of each rank, by name: its own leaves of autograd if `graded`."""
    envs: list[dict[str, Tensor]] = [{} for _ in range(plan.tp)]
    for node, value in case.inputs.items():
        for rank, env in enumerate(envs):
            part = value
            for i, dim in enumerate(case.inferred.dims[node]):
                if is_sharded(dim, plan.shares):
                    part = part.index_select(i, positions(dim, plan.shares, rank))
            env[node.name] = env[f"leaf_{node.name}"] = leaf(part, not graded or _fixed(value))
    return envs


def _held(dims: Any, plan: Plan) -> tuple[int, list[Tensor]] | None:
    """The dim that is split, and the positions of each rank; None for a value that is whole."""
    for i, dim in enumerate(dims):
        if is_sharded(dim, plan.shares):
            return i, [positions(dim, plan.shares, rank) for rank in range(plan.tp)]
    return None


def _fixed(value: Tensor) -> bool:
    """Whether a test says that an operator has no derivative by this operand."""
    return getattr(value, "fixed", False)


def assert_close(found: Tensor, want: Tensor, what: str) -> None:
    """Equal but for rounding."""
    if found.dtype == want.dtype and torch.allclose(found, want, 1e-9, 1e-9, equal_nan=True):
        return
    raise AssertionError(f"{what} is\n{found}\nnot\n{want}")
