"""Every dim of every value is named: which logical axes it is made of, and which may be sharded.

before  %linear : f32[b, s, 192] = linear(%x, %qkv.weight, %qkv.bias)
after   [batch, seq, heads0*dim0 + heads0*dim0 + heads0*dim1]

The graph is walked once, and each operator's rule unifies the dims of its operands and results. An
operator without a rule bars every axis that it touches, and so does one that returns a view or a
copy, as sizes have it, of memory that is written to further on: with one head left on a rank, a
reshape may be a view that is none in the model, and the write would show in it. This is an
analysis: the graph is not changed.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autotp import sizes
from autotp.axes import Axis, Dim, Product, Sum
from autotp.program import Program, uncertain
from autotp.rules import ENTERED, Context, Use, Value, creation, name, rule_for
from autotp.runtime.regions import SIDE_EFFECTS
from autotp.unify import Bar, Factors


@dataclass(frozen=True)
class Inferred:
    """The dims of all values as trees over leaf axes, what rules said about axes, and the bars."""

    dims: dict[Node, Any]  # Node -> tuple[Dim, ...], or a list of those where it returns several
    uses: tuple[Use, ...]
    use_dims: tuple[Dim, ...]  # the dims that the uses speak of, in the same order
    bars: dict[str, Bar]
    no_rule: dict[str, int]  # operators without a rule that were met, with counts
    entered: frozenset[Node]  # values that every rank has whole, and takes its part of if split


def infer(program: Program) -> Inferred:
    """Name every dim of a program."""
    ctx, no_rule, counted = Context(), Counter[str](), _counted(program)
    unsure = uncertain(program.graph)
    for node in program.graph.nodes:
        ctx.table.node = node.name
        fresh = node in counted
        made = ctx.fresh(sizes.shape_of(node.meta["val"])) if fresh else None
        ctx.values[node] = made or _visit(ctx, node, no_rule)
        if node in unsure:  # on ranks of other sizes it may be the other one
            reason = f"{name(node)} returns a view or a copy, and {name(unsure[node])} writes to it"
            ctx.bar([d for n in (node, node.args[0]) for d in _all(ctx.values[n])], reason)
    names: dict[int, str] = {}
    bars = {f"a{axis}": bar for axis, bar in ctx.table.bars().items()}
    trees = {node: _trees(ctx, value, names) for node, value in ctx.values.items()}
    for node, dims in trees.items():
        for axis in _repeated(dims):
            bars.setdefault(axis, Bar("it is in two dims of one tensor", node.name))
    used = tuple(ctx.table.tree(use.dims, names) for use in ctx.uses)
    entered = counted | {node for node in program.graph.nodes if rule_for(node) in ENTERED}
    return Inferred(trees, tuple(ctx.uses), used, bars, dict(no_rule), frozenset(entered))


def _counted(program: Program) -> set[Node]:
    """Values made by counting and from numbers alone, of fixed sizes: slopes of heads. They are
    small and need no rule to be split: every rank computes them whole."""
    found: set[Node] = set()
    for node in program.graph.nodes:
        operands = [n for n in node.all_input_nodes if n.target is not getattr]  # a device
        if rule_for(node) is creation.count:
            known = not operands
        else:
            known = any(n in found for n in operands) and all(
                n in found or _is_number(program, n) for n in operands
            )
        if known and _is_fixed(node):
            found.add(node)
    written = {
        source
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for source in node.all_input_nodes
    }
    # a value that is written into later, perhaps through a view, is not computed twice
    return found if not found & written else set()


def _is_number(program: Program, node: Node) -> bool:
    """Whether a value is one number that no input and no parameter takes part in."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 0 or node.op == "placeholder":
        return False
    if node.op == "get_attr":
        return program.tensors[str(node.target)].kind == "constant"
    operands = [n for n in node.all_input_nodes if n.target is not getattr]
    return all(_is_number(program, n) for n in operands)


def _is_fixed(node: Node) -> bool:
    value, target = node.meta.get("val"), node.target
    if not isinstance(value, torch.Tensor) or not isinstance(target, torch._ops.OpOverload):
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return not any(symbols for _, symbols in sizes.shape_of(value))


def _visit(ctx: Context, node: Node, no_rule: Counter[str]) -> Value:
    value = node.meta.get("val")
    if node.op in ("placeholder", "get_attr"):
        return ctx.fresh(sizes.shape_of(value)) if isinstance(value, torch.Tensor) else None
    if node.op == "output":
        return None
    if node.target is operator.getitem:
        source = ctx.values[node.args[0]]  # type: ignore[index]
        return source[node.args[1]] if isinstance(source, list) else None  # type: ignore[index]
    if not _is_tensor(value) and node.target in (getattr, *SIDE_EFFECTS):
        return None
    rule = rule_for(node)
    found = rule(ctx, node) if rule else NotImplemented
    if found is NotImplemented:
        return _unknown(ctx, node, no_rule)
    if isinstance(value, (tuple, list)) and not isinstance(found, list):
        return [found for _ in value]
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _unknown(ctx: Context, node: Node, no_rule: Counter[str]) -> Value:
    reason = f"there is no rule for {name(node)}"
    touched = [dim for operand in node.all_input_nodes for dim in _all(ctx.values[operand])]
    if touched:
        no_rule[name(node)] += 1
    ctx.bar(touched, reason)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return ctx.barred(sizes.shape_of(value), reason)
    if isinstance(value, (tuple, list)):
        return [
            ctx.barred(sizes.shape_of(item), reason) if isinstance(item, torch.Tensor) else None
            for item in value
        ]
    return None


def _all(value: Value) -> list[Factors]:
    if isinstance(value, list):
        return [dim for item in value for dim in _all(item)]
    return list(value or ())


def _trees(ctx: Context, value: Value, names: dict[int, str]) -> Any:
    if isinstance(value, list):
        return [_trees(ctx, item, names) for item in value]
    return None if value is None else tuple(ctx.table.tree(dim, names) for dim in value)


def _repeated(dims: Any) -> set[str]:
    """Axes that split one tensor twice: in two dims, or twice in one product."""
    if isinstance(dims, list):
        return set().union(*(_repeated(item) for item in dims)) if dims else set()
    counts: Counter[str] = Counter()
    for dim in dims or ():
        counts.update(_multiplicity(dim))
    return {axis for axis, times in counts.items() if times > 1}


def _multiplicity(dim: Dim) -> Counter[str]:
    match dim:
        case Axis(name, _):
            return Counter({name: 1})
        case Product(parts):
            total: Counter[str] = Counter()
            for part in parts:
                total.update(_multiplicity(part))
            return total
        case Sum(parts):
            most: Counter[str] = Counter()
            for part in parts:
                most |= _multiplicity(part)
            return most
