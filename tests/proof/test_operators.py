"""The checker's operators, proved by execution: of every call of tests/rules/cases.py each way to
split the operands is tried. What the checker accepts is run on shards, and must give the shards
that it says. What inference allows, and localize writes, it must accept.

Inference has no part in the first: a wrong rule does not make a wrong check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autotp.axes import Axis, is_sharded, ranges
from autotp.planning import Plan
from autotp.proof import calls, operators
from autotp.proof.layout import Layout, layout_of
from autotp.proof.state import State
from autotp.proof.values import Place, Refused, Value
from autotp.rules import RULES
from tests.rules.cases import CASES, Call
from tests.rules.harness import NO_VALUES, Case, localized, one, plan_of
from tests.rules.ranks import BIAS

RANKS = 2
SIZES = (3, 4, 5, 6)
SUMMED = ("aten.mean.dim", "aten.mean.default")  # a sum and a division, once normalized
NUMBERS = {"aten.arange", "aten.linspace", "aten.sym_size"}  # take no tensor, or give none
RANDOM = {"bernoulli", "rand_like", "randn_like"}  # refused outside of a draw
PLAN = Plan("", RANKS, (), (), ())

Split = tuple[int, Layout] | None  # of one operand


def test_every_operator_with_a_rule_is_known_to_the_checker() -> None:
    assert set(RULES) - set(operators.TABLE) == NUMBERS
    assert set(operators.TABLE) <= set(RULES)


@dataclass(frozen=True)
class Trial:
    """One call on the meta of its values: whole operands, and the node."""

    node: Node
    operands: list[Node]
    args: Any
    want: Any

    @staticmethod
    def of(call: Call) -> Trial:
        op, *args = call(SIZES)
        kwargs = args.pop() if isinstance(args[-1], dict) else {}
        graph, operands = Graph(), list[Node]()

        def enter(value: Tensor) -> Node:
            operands.append(graph.placeholder(f"x{len(operands)}"))
            operands[-1].meta["val"] = value
            return operands[-1]

        given = pytree.tree_map_only(Tensor, enter, (tuple(args), kwargs))
        node = graph.call_function(op, *given)
        node.meta = {"source": node.name, "val": op(*_copied(args), **_copied(kwargs))}
        return Trial(node, operands, given, node.meta["val"])

    def ways(self) -> Iterator[tuple[Split, ...]]:
        """Every way to split up to three operands along one dim, in one piece or in several."""
        options: list[list[Split]] = []
        for node in self.operands:
            shape = node.meta["val"].shape
            found: list[Split] = [None]
            for dim, size in enumerate(shape):
                layouts = _layouts(size)[: 1 if len(self.operands) > 2 else 2]
                found += [(dim, layout) for layout in layouts]
            options.append(found)
        for way in itertools.product(*options):
            if 1 <= sum(split is not None for split in way) <= 3:
                yield way

    def verdict(self, way: tuple[Split, ...], rank: int, node: Node) -> Any:
        """What the checker says the result is; None if it refuses."""
        state = State(PLAN, rank, {self.node.name: self.node})
        for operand, split in zip(self.operands, way, strict=True):
            place = None if split is None else Place(*split)
            state.values[operand] = state.new(operand.meta["val"], False, place)
        try:
            return calls.visit(state, node)
        except Refused:
            return None

    def run(self, way: tuple[Split, ...], rank: int, node: Node) -> Any:
        """The operator on one rank's shards."""
        env = {
            operand: _part(operand.meta["val"], split, rank)
            for operand, split in zip(self.operands, way, strict=True)
        }
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: env[n].clone())
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def spellings(self) -> Iterator[Node]:
        """The call as it is, and with each size smaller: one may be right for the rank."""
        yield self.node
        if not operators.has_sizes(".".join(str(self.node.target).split(".")[:2])):
            return
        for at, given in enumerate(self.node.args):
            several = isinstance(given, (list, tuple))
            for i, size in enumerate(given if several else [given]):
                if type(size) is not int or not 1 < size < 40:
                    continue
                for other in range(size):
                    node = self.node.graph.node_copy(self.node)
                    node.meta = dict(self.node.meta)
                    node.update_arg(at, [*given[:i], other, *given[i + 1 :]] if several else other)
                    yield node


def _layouts(size: int) -> list[Layout]:
    """In one piece with an odd share, and alternating."""
    if size < 2:
        return []
    cut = size // 2
    found = [layout_of((((0, cut),), ((cut, size),)), size)]
    if size % 2 == 0 and size > 2:
        evens = tuple((i, i + 1) for i in range(0, size, 2))
        odds = tuple((i, i + 1) for i in range(1, size, 2))
        found.append(layout_of((evens, odds), size))
    return found


def _part(value: Tensor, split: Split, rank: int) -> Tensor:
    if split is None:
        return value
    held = split[1].ranges()
    assert held is not None
    places = [i for start, stop in held[rank] for i in range(start, stop)]
    return value.index_select(split[0], torch.tensor(places, dtype=torch.long))


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, value)


def _same(found: Any, want: Tensor, what: str) -> None:
    assert found.shape == want.shape, f"{what}: {tuple(found.shape)}, not {tuple(want.shape)}"
    assert torch.allclose(found, want, 1e-9, 1e-9, equal_nan=True), f"{what}: {found}, not {want}"


def _confirm(trial: Trial, way: tuple[Split, ...], node: Node, rank: int, verdict: Any) -> None:
    """A rank's result is its part of the whole one, or a summand of it."""
    what = f"{node.format_node()} of {[s and (s[0], str(s[1])) for s in way]} on rank {rank}"
    name = ".".join(str(node.target).split(".")[:2])
    values = verdict if isinstance(verdict, list) else [verdict]
    wants = trial.want if isinstance(trial.want, (list, tuple)) else [trial.want]
    found = trial.run(way, rank, node)
    founds = found if isinstance(found, (list, tuple)) else [found]
    for value, want, mine in zip(values, wants, founds, strict=True):
        assert isinstance(value, Value)
        if name in NO_VALUES:
            assert mine.shape == value.shape, what
        elif value.kind == "P":
            _same(sum(trial.run(way, r, node) for r in range(RANKS)), want, what)
        else:
            split = None if value.layout is None else (value.dim, value.layout)
            _same(mine, _part(want, split, rank), what)


@pytest.mark.parametrize("op", [op for op in CASES if op not in ("full", "empty", "ones", "zeros")])
def test_what_the_checker_accepts_is_right(op: str) -> None:
    for call in CASES[op]:
        trial = Trial.of(call)
        for node in trial.spellings():
            for way, rank in itertools.product(trial.ways(), range(RANKS)):
                verdict = trial.verdict(way, rank, node)
                if verdict is not None:
                    _confirm(trial, way, node, rank, verdict)


def _inference_allows(case: Case) -> Iterator[tuple[Axis, int]]:
    special = case.used("lookup", "classes")
    for axis in case.axes.values():
        barred = axis.name in case.inferred.bars or axis.name in special
        if not barred and not case.refused(axis.name):
            yield from ((axis, p) for p in (2, 3) if (axis.size or 0) >= p)


@pytest.mark.parametrize("op", [op for op in CASES if op not in RANDOM])
def test_what_inference_allows_is_accepted(op: str) -> None:
    for call in CASES[op]:
        target, *args = call(SIZES)
        kwargs = args.pop() if isinstance(args[-1], dict) else {}
        case = one(target, *args, **kwargs)
        for axis, p in _inference_allows(case):
            contracts = bool(case.used("contract").get(axis.name))
            at = BIAS.get(target, len(args))
            if contracts and (str(target) in SUMMED or args[at : at + 1] not in ([], [None])):
                continue  # the rewriter takes a bias off first
            _accept(case, replace(plan_of(axis, p), tp=p))


def _accept(case: Case, plan: Plan) -> None:
    originals = {node.name: node for node in case.program.graph.nodes}
    for rank, graph in enumerate(localized(case, plan)):
        state = State(plan, rank, originals)
        for node in graph.nodes:
            if node.op == "output":
                continue
            if node.op == "call_function":
                node.meta["source"] = node.name
                state.values[node] = calls.visit(state, node)
                continue
            dims, place = case.inferred.dims[originals[node.name]], None
            for i, dim in enumerate(dims):
                if is_sharded(dim, plan.shares):
                    held = tuple(ranges(dim, plan.shares, r) for r in range(plan.tp))
                    place = Place(i, layout_of(held, node.meta["val"].shape[i]))
            state.values[node] = state.new(node.meta["val"], False, place)
