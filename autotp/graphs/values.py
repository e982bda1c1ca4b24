"""Every value of a plan's graph as plain facts: what made it, where it stands, how it lies."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from autotp import axes as ax
from autotp import sizes
from autotp.axes import Dim
from autotp.errors import PlanError, message
from autotp.graphs.arguments import arguments_of
from autotp.graphs.symbols import display, symbol_names
from autotp.placement import locate
from autotp.planning import Plan, WholeAxis
from autotp.printing import target_text
from autotp.program import Program
from autotp.rules import rule_for
from autotp.runtime import vocabulary
from autotp.runtime.collectives import (
    copy_all_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)
from autotp.runtime.sequence import (
    gather_from_sequence,
    gather_sequence_to_region,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
)

ROLES = {
    copy_to_region: "f",
    copy_all_to_region: "f",
    reduce_from_region: "g",
    gather_from_region: "gather",
    scatter_to_region: "scatter",
    reduce_scatter_to_sequence: "reduce-scatter",
    gather_sequence_to_region: "gather slices for a region",
    gather_from_sequence: "gather slices",
    scatter_to_sequence: "slice",
}
NOTES = {
    "f": "identity; an all-reduce in backward",
    "g": "all-reduce; identity in backward",
    "gather": "all-gather; own part in backward",
    "scatter": "own part; an all-gather in backward",
    "reduce-scatter": "reduce-scatter; an all-gather in backward",
    "gather slices for a region": "all-gather; a reduce-scatter in backward",
    "gather slices": "all-gather; own slice in backward",
    "slice": "own slice; an all-gather in backward",
}


@dataclass(frozen=True)
class Value:
    """One value. `dims` are trees over the names that the plan shows; of an operator with several
    results those of the first."""

    name: str
    role: str  # input, parameter, buffer, constant, f, g, gather, scatter, product, operator, size
    operator: str
    arguments: tuple[Any, ...]  # texts, and `Operand`s where values stand
    operands: tuple[str, ...]
    module: str = ""
    kind: str = ""  # the module's class
    source: str = ""
    dtype: str = ""
    shape: tuple[str, ...] = ()
    dims: tuple[Dim, ...] = ()
    results: int = 1
    placement: str = ""  # I, R, S or P; empty before the plan, and for sizes
    axis: str = ""  # the axis that splits it, makes it, or that it sums over
    pair: str = ""  # of a product: attention, mlp, vocabulary or input
    part: str = ""  # of a product: column or row
    rule: str = ""
    bars: tuple[str, ...] = ()  # what this operator bars
    whole: tuple[str, ...] = ()  # why its dims are not split
    slice: int | None = None  # the dim of which ranks hold slices: sequence parallelism


@dataclass(frozen=True)
class View:
    """The values of a graph in order, and what it returns."""

    title: str
    values: tuple[Value, ...]
    returned: tuple[str, ...]
    symbols: Mapping[str, str] = field(default_factory=dict)  # display name -> where it comes from

    def by_name(self) -> dict[str, Value]:
        """Values by name."""
        return {value.name: value for value in self.values}


def view(plan: Plan, which: str) -> View:
    """The graph `before`, `after`, or of one rank (`0`, `1`, ...)."""
    if which == "before":
        program, title = plan.stages[0][1] if plan.stages else plan.program(), "before"
    elif which == "after":
        program, title = plan.program(), f"after, tp={plan.tp}"
    elif which.isascii() and which.isdigit() and len(which) < 9 and int(which) < plan.tp:
        from autotp.pipeline import rank_program

        program = rank_program(plan, int(which), shapes=True)
        title = f"rank {which} of {plan.tp}"
    else:
        raise PlanError(
            message(
                f"there is no graph {which[:40]!r}",
                values=f"{which[:40]!r}, tp={plan.tp}",
                because="a graph is the one before or after, or that of one rank",
                try_=f"before, after, or a rank from 0 to {plan.tp - 1}",
            )
        )
    found = _Describe(plan, program, placed=which != "before").view(f"{plan.model}, {title}")
    if not which.isdigit():
        return found
    values = tuple(_with_local_shape(value, plan, int(which)) for value in found.values)
    return replace(found, values=values)


def _with_local_shape(value: Value, plan: Plan, rank: int) -> Value:
    """Operators with several results have the whole shape in a rank's program."""
    return replace(value, shape=local_shape(value, plan, rank)) if value.results > 1 else value


class _Describe:
    def __init__(self, plan: Plan, program: Program, *, placed: bool) -> None:
        self._plan, self._program, self._placed = plan, program, placed
        self._captured = {n.name: n for n in plan.stages[0][1].graph.nodes}
        self._dims = {
            node.meta.get("source", node.name): node.meta.get("dims")
            for node in plan.program().graph.nodes
            if node.target not in ROLES
        }
        self._symbols, self._where = symbol_names(plan.stages[0][1])
        self._pairs: dict[str, tuple[str, str, str]] = {}  # weight -> kind, part, axis
        for axis in plan.axes:
            for part, weights in (("row", axis.rows), ("column", axis.columns)):
                self._pairs.update({w: (axis.kind, part, axis.name) for w in weights})
        self._views: dict[Node, str] = {}  # views of weights
        self._barred: dict[str, list[str]] = {}
        for whole in plan.facts.whole.values():
            if whole.node:
                self._barred.setdefault(whole.node, []).append(_bar(whole))

    def view(self, title: str) -> View:
        nodes = list(self._program.graph.nodes)
        names = {node: self._name(node) for node in nodes}
        values = [self._value(node, names) for node in nodes if node.op != "output"]
        returned = tuple(names[n] for n in nodes[-1].all_input_nodes)
        return View(title, tuple(values), returned, self._where)

    def _name(self, node: Node) -> str:
        """The name; a symbol for a size that is one."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and node.op == "call_function":
            return display(value, self._symbols)
        return node.name

    def _value(self, node: Node, names: Mapping[Node, str]) -> Value:
        calls = node.meta.get("calls") or ()
        shape, dtype, results = self._shape(node.meta.get("val"))
        dims = self._dims.get(node.name) if not self._placed else node.meta.get("dims")
        dims = dims[0] if isinstance(dims, list) else dims
        role = self._role(node)
        kind, part, axis = self._pair(node)
        placement = (node.meta.get("placement") or "")[:1] if self._placed and dtype else ""
        captured = self._captured.get(node.meta.get("source", node.name))
        of_operator = captured is not None and role not in NOTES
        return Value(
            node.name if role != "size" else names[node],
            "product" if part else role,
            _operator(node),
            arguments_of(node, names),
            tuple(dict.fromkeys(names[n] for n in node.all_input_nodes)),
            _module(node, calls),
            calls[-1][1].rpartition(".")[2] if calls else "",
            locate(node),
            dtype,
            shape,
            tuple(dims or ()),
            results,
            placement,
            axis or self._axis(dims),
            kind,
            part,
            _rule(captured) if of_operator and captured is not None else "",
            tuple(self._barred.get(captured.name, ())) if of_operator and captured else (),
            self._why_whole(captured, placement, dtype),
            node.meta.get("sliced") if placement == "S" else None,
        )

    def _shape(self, value: Any) -> tuple[tuple[str, ...], str, int]:
        results = 1
        if isinstance(value, (tuple, list)):
            tensors = [item for item in value if isinstance(item, torch.Tensor)]
            value, results = next(iter(tensors), None), len(value)
        if not isinstance(value, torch.Tensor):
            return (), "", results
        shape = tuple(display(size, self._symbols) for size in value.shape)
        return shape, str(value.dtype).removeprefix("torch."), results

    def _role(self, node: Node) -> str:
        if node.op == "placeholder":
            return "input"
        if node.op == "get_attr":
            return self._program.tensors[str(node.target)].kind
        if node.target in ROLES:
            return ROLES[node.target]
        return "operator" if _has_tensor(node.meta.get("val")) else "size"

    def _pair(self, node: Node) -> tuple[str, str, str]:
        """Kind, part and axis of a product with a weight of a pair; remembers views of weights."""
        if node.op == "get_attr":
            self._views[node] = str(node.target)
        sources = node.all_input_nodes
        weights = [self._views[n] for n in sources if n in self._views]
        if node.op != "call_function" or not weights or not _has_tensor(node.meta.get("val")):
            return "", "", ""
        if len(weights) == len(sources) == 1:
            self._views[node] = weights[0]
            return "", "", ""
        found = [self._pairs[w] for w in weights if w in self._pairs]
        if not found or node.target in ROLES:
            return "", "", ""
        kind, part, axis = found[0]
        if kind == "vocabulary":  # a tied table is both
            lookup = node.target is vocabulary.embedding or "embedding" in str(node.target)
            part = "row" if lookup else "column"
        return kind, part, axis

    def _axis(self, dims: Any) -> str:
        found = (leaf.name for dim in dims or () for leaf in ax.leaves(dim))
        return next((name for name in found if name in self._plan.shares), "")

    def _why_whole(self, node: Node | None, placement: str, dtype: str) -> tuple[str, ...]:
        if node is None or placement not in ("I", "R") or not dtype:
            return ()
        dims = self._plan.facts.dims.get(node.name)
        result = []
        for at, dim in enumerate(dims if isinstance(dims, tuple) else ()):
            for leaf in ax.leaves(dim):
                whole = self._plan.facts.whole.get(leaf.name)
                if whole is not None and leaf.size is not None:
                    at_node = f" ({self._place(whole.node)})" if whole.node else ""
                    result.append(f"dim {at}: {whole.reason}{at_node}")
        return tuple(dict.fromkeys(result))

    def _place(self, name: str) -> str:
        node = self._captured.get(name)
        where = locate(node) if node is not None else ""
        return f"{name}, {where}" if where else name


def _bar(whole: WholeAxis) -> str:
    what = f"a pair of {whole.units} units ({whole.kind}): " if whole.kind else ""
    return what + whole.reason


def _operator(node: Node) -> str:
    if node.op == "call_function":
        if node.target is operator.getitem:
            return "getitem"
        if getattr(node.target, "__name__", "") == "draw":
            return re.sub(r"\.(default|Tensor|Scalar|int)$", "", target_text(node.args[0]))
        return re.sub(r"\.(default|Tensor|Scalar|int)$", "", target_text(node.target))
    return str(node.target)


def _module(node: Node, calls: Iterable[Any]) -> str:
    found = list(calls)
    if found:
        return str(found[-1][0]).split("@")[0]
    return str(node.target).rpartition(".")[0] if node.op == "get_attr" else ""


def _rule(node: Node) -> str:
    if node.op != "call_function":
        return ""
    rule = rule_for(node)
    if rule is None:
        return "" if node.target is operator.getitem else "no rule: bars all that it touches"
    about = (rule.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    home = rule.__module__.rpartition(".")[2]
    return f"{home}.{rule.__name__}: {re.sub(' +', ' ', about)}".rstrip(": ")


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def local_shape(value: Value, plan: Plan, rank: int) -> tuple[str, ...]:
    """The shape that a value has on a rank."""
    if value.placement != "S":
        return value.shape
    if value.slice is not None:
        size = value.shape[value.slice]
        here = _share(size, plan.tp, rank)
        return (*value.shape[: value.slice], here, *value.shape[value.slice + 1 :])
    return tuple(
        _local(whole, dim, plan, rank) for whole, dim in zip(value.shape, value.dims, strict=False)
    )


def _share(size: str, ranks: int, rank: int) -> str:
    """A rank's slice of a sequence; of a length that is not fixed about `seq/8`."""
    if not size.isdigit():
        return f"{size}/{ranks}"
    start, stop = ax.slice_edges(int(size), ranks)[rank : rank + 2]
    return str(stop - start)


def _local(whole: str, dim: Dim, plan: Plan, rank: int) -> str:
    if not ax.is_sharded(dim, plan.shares):
        return whole
    here, pair = ax.local_size(dim, plan.shares, rank), ax.ratio(dim, plan.shares, rank)
    if here is not None:
        return str(here)
    if pair is None:
        return "?"
    symbols = [part for part in whole.split("*") if not part.isdigit()]
    return sizes.text((pair[0], tuple(symbols)))
