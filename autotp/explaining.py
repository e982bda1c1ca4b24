"""Why a parameter lies as it does, in sentences: its axis, its GEMM pair, the values between."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Graph, Node

from autotp import axes as ax
from autotp.errors import PlanError, message
from autotp.placement import locate
from autotp.planning import Kept, Plan, ShardedAxis, WholeAxis

_MAKES = {
    "attention": "makes the heads",
    "mlp": "makes the features",
    "vocabulary": "makes a score for every word",
    "value": "makes the features",
}


def explain(plan: Plan, name: str, *, chain: bool = True) -> str:
    """The text of `Plan.explain`; with `chain` the values between are named."""
    aliases = plan.stages[0][1].aliases if plan.stages else {}
    first = aliases.get(name, name)
    if first not in plan.by_name:
        raise _unknown(name, [*plan.by_name, *aliases])
    lines = [] if first == name else [f"{name} is the same tensor as {first}."]
    lines += (_split if plan.is_sharded(first) else _whole)(plan, first, chain)
    return "\n".join(lines)


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Names that begin or end like a name, or are spelled like it; five at most."""
    known = list(names)
    below = [n for n in known if n.startswith(name.rstrip(".") + ".") or n.endswith("." + name)]
    return (below or difflib.get_close_matches(name, known, 5, 0.4))[:5]


def _unknown(name: str, names: list[str]) -> PlanError:
    return PlanError(
        message(
            f"there is no parameter or buffer {name!r}",
            values=f"{len(names)} names",
            because="none has this name",
            try_=", ".join(nearest(name, names)) or "a name from model.named_parameters()",
        )
    )


# ---- split


def _split(plan: Plan, name: str, chain: bool) -> list[str]:
    tensor = plan.by_name[name]
    at = next(i for i, dim in enumerate(tensor.dims) if ax.is_sharded(dim, plan.shares))
    inside = {leaf.name for leaf in ax.leaves(tensor.dims[at])}
    axis = next(axis for axis in plan.axes if axis.name in inside)
    held = _list([plan.local_shape(name, rank)[at] for rank in range(plan.tp)])
    positions = (
        "" if held == _list(axis.widths) else f", so of the {tensor.shape[at]} positions {held}"
    )
    lines = [
        f"{_label(plan, name)} is split along dim {at}, which is {tensor.dims[at]}. "
        f"Of the {axis.units} units of {axis.name} the ranks hold {_list(axis.widths)}{positions}."
    ]
    if name in plan.held:
        return [*lines, "This call needs it in another way: it is gathered for each call."]
    lines.append(_role(name, axis))
    lines.append(_pair(axis))
    if plan.stages and chain:
        lines += _between(plan, axis, name)
    return lines


def _role(name: str, axis: ShardedAxis) -> str:
    column, row = name in axis.columns, name in axis.rows
    if axis.kind == "vocabulary" and (column or row):
        looked_up = "a rank looks up its own rows and gives zeros for other words; g adds them"
        scores = "a rank computes the scores of its own words"
        return f"It holds words: {'; '.join([looked_up] * row + [scores] * column)}."
    if row:
        return (
            "It is row-parallel: its product sums over the axis, so each rank has a summand, "
            "and g (an all-reduce) adds them."
        )
    if column:
        return (
            f"It is column-parallel: its product {_MAKES.get(axis.kind, 'makes the axis')}, each "
            "rank its own; its input enters through f (identity; an all-reduce in backward)."
        )
    return "It meets values that carry the axis (a bias or a scale), so each rank holds its part."


def _pair(axis: ShardedAxis) -> str:
    if axis.kind == "input":
        return (
            f"No GEMM pair splits {_names(axis.rows)}, so it takes its whole input in parts: "
            "every rank contracts its own features."
        )
    many = "make" if len(axis.columns) > 1 else "makes"
    made = f"{_names(axis.columns) or 'nothing'} {many} {axis.name} (column-parallel)"
    if axis.kind == "vocabulary":
        made = f"{_names(axis.columns) or 'no head'} {many} its scores"
        looked_up = f"{_names(axis.rows) or 'no table'} is looked up along it"
        return f"Words are the axis {axis.name}: {made}, {looked_up}."
    many = "contract" if len(axis.rows) > 1 else "contracts"
    return f"The {axis.kind} pair: {made}, {_names(axis.rows)} {many} it (row-parallel)."


def _between(plan: Plan, axis: ShardedAxis, name: str) -> list[str]:
    graph = plan.program().graph
    carried = [node for node in graph.nodes if _carries(node, axis.name)]
    rows = _products(graph, [name] if name in axis.rows else axis.rows)
    if axis.kind == "vocabulary":
        ends = [node for node in carried if node.op == "call_function"]
        where = ", ".join(_at(node) for node in ends[:4])
        return [f"Values split along it: {where}."] if ends else []
    columns = _products(graph, [name] if name in axis.columns else axis.columns)
    path = _path(columns, set(rows), set(carried))
    if not path:
        return [f"It is contracted by {', '.join(_at(node) for node in rows)}."] if rows else []
    chain = " -> ".join(node.name for node in path)
    return [
        f"From {_at(path[0])} to {_at(path[-1])} no operator mixes the units of {axis.name}: "
        f"{chain}."
    ]


def _carries(node: Node, axis: str) -> bool:
    return any(leaf.name == axis for leaf in leaves_of(node.meta.get("dims")))


def leaves_of(dims: Any) -> Iterator[ax.Axis]:
    """Every axis in the dims of a value, or of several."""
    if isinstance(dims, list):
        for item in dims:
            yield from leaves_of(item)
    else:
        for dim in dims or ():
            yield from ax.leaves(dim)


def _products(graph: Graph, weights: Iterable[str]) -> list[Node]:
    """The operators that read the weights, behind views of them."""
    wanted, found = set(weights), []
    views: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" and node.target in wanted:
            views.add(node)
        elif node.op == "call_function" and any(n in views for n in node.all_input_nodes):
            if all(n in views for n in node.all_input_nodes):
                views.add(node)
            else:
                found.append(node)
    return found


def _path(starts: Iterable[Node], ends: set[Node], allowed: set[Node]) -> list[Node]:
    """The shortest way along uses, over allowed values, to one of the ends."""
    before: dict[Node, Node | None] = dict.fromkeys(starts)
    queue = list(before)
    for node in queue:
        if node in ends and before[node] is not None:
            return _walk(before, node)
        for user in node.users:
            if user not in before and (user in allowed or user in ends):
                before[user] = node
                queue.append(user)
    return []


def _walk(before: dict[Node, Node | None], node: Node | None) -> list[Node]:
    found = []
    while node is not None:
        found.append(node)
        node = before[node]
    return found[::-1]


# ---- whole


def _whole(plan: Plan, name: str, chain: bool) -> list[str]:
    lines = [f"{_label(plan, name)} is whole on every rank."]
    if plan.tp == 1:
        return [*lines, "There is one rank: nothing is split."]
    kept = next((kept for kept in plan.kept if kept.name == name), None)
    node = _node(plan, name)
    if kept is None and plan.stages and node is None:
        return [*lines, "The captured call does not use it."]
    axis, why = _barred(plan, node, kept)
    if kept is not None:
        where = f" ({kept.node}, {kept.source})" if kept.source else ""
        lines.append(f"Why: {kept.reason}{where}.")
    elif why is not None:
        lines.append(f"Why: {why.reason}{f' ({why.node})' if why.node else ''}.")
    else:
        lines.append("Why: none of its dims is made by one GEMM and contracted by another.")
    if why is not None and why.kind and not why.node:
        lines.append(
            f"It would have been the {why.kind} pair of {_names(why.columns)} (column-parallel) "
            f"and {_names(why.rows)} (row-parallel), {why.units} units."
        )
    if node is not None and why is not None and why.node:
        path = _to_bar(plan, node, axis, why.node)
        if path:
            names = f": {' -> '.join(path)}" if chain else ""
            lines.append(f"Its dim and that operator's are one axis{names}.")
    return lines


def _node(plan: Plan, name: str) -> Node | None:
    if not plan.stages:
        return None
    nodes = plan.stages[0][1].graph.nodes
    return next((n for n in nodes if n.op == "get_attr" and n.target == name), None)


def _barred(plan: Plan, node: Node | None, kept: Kept | None) -> tuple[str, WholeAxis | None]:
    """The axis of a tensor whose bar is the reason that the plan shows."""
    if node is None:
        return "", None
    whole = plan.facts.whole
    found = [leaf.name for leaf in leaves_of(plan.facts.dims.get(node.name)) if leaf.name in whole]
    if kept is not None:
        found = [axis for axis in found if whole[axis].reason == kept.reason]
    return (found[0], whole[found[0]]) if found else ("", None)


def _to_bar(plan: Plan, node: Node, axis: str, target: str) -> list[str]:
    """Names of values that carry the axis, from a tensor to the operator that barred it."""
    dims = plan.facts.dims
    before: dict[Node, Node | None] = {node: None}
    queue = [node]
    for here in queue:
        if here.name == target:
            return [n.name for n in _walk(before, here)]
        for near in (*here.users, *here.all_input_nodes):
            carries = near.name == target or any(
                leaf.name == axis for leaf in leaves_of(dims.get(near.name))
            )
            if near not in before and carries:
                before[near] = here
                queue.append(near)
    return []


# ---- words


def _label(plan: Plan, name: str) -> str:
    tensor = plan.by_name[name]
    return f"{name} ({tensor.kind}, {tensor.dtype}{[*tensor.shape]})"


def _at(node: Node) -> str:
    where = locate(node)
    return f"{node.name} ({where})" if where else node.name


def _names(names: Iterable[str]) -> str:
    return " and ".join(name.removesuffix(".weight") for name in names)


def _list(values: Iterable[int]) -> str:
    found = list(values)
    if len(found) > 2 and len(set(found)) == 1:
        return f"{found[0]} each"
    return " ".join(map(str, found))
