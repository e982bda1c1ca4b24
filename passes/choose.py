"""The pairs to shard are decided for a number of ranks: the Plan, with a reason for all the rest.

before  pairs heads0 (12 units), ffn0 (3072 units), ...
after   Plan(tp=8, axes=(heads0 split 2 2 2 2 1 1 1 1, ffn0 split 384 ...), kept=(...))

Of axes that would split the same tensor twice the one that shards most parameter bytes is taken:
of a grouped-query attention that is the axis of key heads, not the group or the head size. An axis
is refused if it has fewer units than there are ranks, or lies beside whole parts in a fused weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Node

from autotp.axes import (
    Axis,
    Dim,
    Shares,
    balanced,
    is_mixed,
    is_sharded,
    leaves,
    overlap,
    ranges,
    size,
    substitute,
)
from autotp.placement import locate
from autotp.planning import Facts, Kept, Plan, ShardedAxis, TensorShard, WholeAxis
from autotp.program import Program
from autotp.unify import Bar
from passes.infer import Inferred
from passes.match import GemmPair

_PREFIX = {"attention": "heads", "mlp": "ffn", "vocabulary": "vocab", "input": "in"}


def choose(
    program: Program,
    inferred: Inferred,
    pairs: tuple[GemmPair, ...],
    *,
    tp: int,
    model: str,
    layout: Plan | None = None,
) -> Plan:
    """Decide which axes are sharded over `tp` ranks, and note why the others are not.

    With `layout`, of an earlier capture of the model, only axes are taken under which every tensor
    lies as it does there; a tensor that this call needs whole is gathered (`plan.held`).
    """
    if layout is not None and tp > 1:
        pairs = (*pairs, *_held_pairs(inferred, pairs, layout))
    values = _values_by_axis(inferred)
    split_rows = {
        axis.name
        for use, dim in zip(inferred.uses, inferred.use_dims, strict=True)
        if use.kind in ("lookup", "classes") and not isinstance(dim, Axis)
        for axis in leaves(dim)
    }
    weight = {pair.axis: _bytes(program, values[pair.axis]) for pair in pairs}
    shares: dict[str, tuple[int, ...]] = {}
    refused: dict[str, str] = {}
    ordered = sorted(pairs, key=lambda p: _order(layout, p, weight))
    for last in (False, True):  # inputs are taken in parts where no other axis is left
        for pair in (pair for pair in ordered if (pair.kind == "input") == last):
            reason = _refusal(pair, tp, shares, values, inferred.entered)
            if pair.axis in split_rows:
                reason = "rows are looked up by position, and it is only a part of the position"
            if reason:
                refused[pair.axis] = reason
            elif tp > 1:
                shares[pair.axis] = balanced(pair.units, tp)
        _drop_mixed(shares, refused, values)
    if layout is not None:
        _drop_unlike(program, inferred, shares, refused, layout)
    taken = [pair for pair in pairs if pair.axis in shares]
    names = _names(taken)
    axes = tuple(
        ShardedAxis(
            names[pair.axis], pair.kind, pair.units, shares[pair.axis], pair.columns, pair.rows
        )
        for pair in taken
    )
    tensors = _tensors(program, inferred, names)
    kept = _kept(program, inferred, pairs, shares, refused) if tp > 1 else ()
    dims = {node.name: value for node, value in inferred.dims.items()}
    facts = Facts(dims, _whole(inferred, pairs, shares, refused))
    plan = Plan(model, tp, axes, tensors, kept, names=names, facts=facts)
    if layout is not None:
        used = {str(n.target) for n in program.graph.nodes if n.op == "get_attr"}
        plan = _hold(plan, layout, used)
    return plan


def _order(layout: Plan | None, pair: GemmPair, weight: Mapping[str, int]) -> tuple[Any, ...]:
    """What an earlier capture split comes first, then large ones."""
    return not _is_split_in(layout, pair), -weight[pair.axis]


def _is_split_in(layout: Plan | None, pair: GemmPair) -> bool:
    """Whether an earlier capture split this pair, as far as columns or rows tell."""
    return layout is not None and any(
        axis.units == pair.units
        and (set(axis.columns) & set(pair.columns) or set(axis.rows) & set(pair.rows))
        for axis in layout.axes
    )


def _refusal(
    pair: GemmPair,
    tp: int,
    shares: Shares,
    values: dict[str, list[tuple[Node, tuple[Dim, ...]]]],
    entered: frozenset[Node],
) -> str | None:
    if pair.bar:
        return pair.bar.reason
    if pair.kind == "value":
        return "attention would be computed whole on every rank"
    if pair.units < tp:
        return f"it has {pair.units} units, fewer than tp={tp}"
    tried = {**shares, pair.axis: ()}
    for node, dims in values[pair.axis]:
        if _at_border(node, entered) and any(
            size(d) is None and is_sharded(d, tried) for d in dims
        ):
            return "it enters or leaves the module inside a dim of dynamic size"
        if sum(_overlap_count(dim, tried) for dim in dims) > 1:
            return "the tensor is split by another axis already"
    return None


def _at_border(node: Node, entered: frozenset[Node]) -> bool:
    """Whether the rank takes or gives its own part of a whole value here."""
    leaves_module = any(user.op == "output" for user in node.users)
    return node.op == "placeholder" or leaves_module or node in entered


def _overlap_count(dim: Dim, shares: Shares) -> int:
    """How many chosen axes split the dim at one position, at most."""
    return 2 if overlap(dim, shares) else int(any(a.name in shares for a in leaves(dim)))


def _drop_mixed(
    shares: dict[str, tuple[int, ...]],
    refused: dict[str, str],
    values: dict[str, list[tuple[Node, tuple[Dim, ...]]]],
) -> None:
    """Take back axes whose tensors hold whole parts beside split ones, until none is left."""
    changed = True
    while changed:
        changed = False
        for axis in list(shares):
            mixed = [n for n, dims in values[axis] if any(is_mixed(d, shares) for d in dims)]
            if mixed:
                del shares[axis]
                refused[axis] = "it is fused with parts that are not split"
                changed = True


def _drop_unlike(
    program: Program,
    inferred: Inferred,
    shares: dict[str, tuple[int, ...]],
    refused: dict[str, str],
    layout: Plan,
) -> None:
    """Take back axes that would lay a tensor out in another way than it lies already."""
    held = [n for n in program.graph.nodes if n.op == "get_attr"]
    changed = True
    while changed:
        changed = False
        for node in held:
            dims, name = inferred.dims[node], str(node.target)
            mine = {a.name for dim in dims for a in leaves(dim) if a.name in shares}
            if not mine:
                continue
            if name in layout.by_name and all(
                tuple(ranges(dim, shares, rank) for dim in dims) == layout.ranges(name, rank)
                for rank in range(layout.tp)
            ):
                continue
            for axis in mine:
                del shares[axis]
                refused[axis] = f"{name} lies in another way already"
            changed = True


def _held_pairs(
    inferred: Inferred, pairs: tuple[GemmPair, ...], layout: Plan
) -> tuple[GemmPair, ...]:
    """Axes that no pair has here, but along which a parameter lies split already: a head alone."""
    done = {pair.axis for pair in pairs} | set(inferred.bars)
    found: dict[str, GemmPair] = {}
    for node, dims in inferred.dims.items():
        name = str(node.target)
        if node.op != "get_attr" or name not in layout.by_name or not layout.is_sharded(name):
            continue
        for axis in (axis for dim in dims for axis in leaves(dim)):
            if axis.name in done or axis.size is None or axis.size < layout.tp:
                continue
            shares = {axis.name: balanced(axis.size, layout.tp)}
            if all(
                tuple(ranges(dim, shares, rank) for dim in dims) == layout.ranges(name, rank)
                for rank in range(layout.tp)
            ):
                kind = next((a.kind for a in layout.axes if name in (*a.columns, *a.rows)), "mlp")
                found[axis.name] = GemmPair(axis.name, axis.size, kind, (name,), (), None)
    return tuple(found.values())


def _hold(plan: Plan, layout: Plan, used: set[str]) -> Plan:
    """Tensors that this call needs in another way than they lie stay as they are: such a one is
    gathered for each call. Its axes take the layout's names, marked as held."""
    unlike = [
        name
        for name in sorted(used & set(layout.by_name))
        if any(plan.ranges(name, r) != layout.ranges(name, r) for r in range(layout.tp))
    ]
    dims = {name: layout.by_name[name].dims for name in unlike}
    names = {a.name: f"held_{a.name}" for d in dims.values() for dim in d for a in leaves(dim)}
    tensors = tuple(
        replace(t, dims=tuple(substitute(dim, names) for dim in dims[t.name]))
        if t.name in dims
        else t
        for t in plan.tensors
    )
    axes = tuple(replace(a, name=names[a.name]) for a in layout.axes if a.name in names)
    kept = tuple(
        replace(k, reason=f"gathered for each call: {k.reason}") if k.name in dims else k
        for k in plan.kept
    )
    return replace(plan, tensors=tensors, axes=(*plan.axes, *axes), kept=kept, held=tuple(unlike))


def _values_by_axis(inferred: Inferred) -> dict[str, list[tuple[Node, tuple[Dim, ...]]]]:
    found: dict[str, list[tuple[Node, tuple[Dim, ...]]]] = defaultdict(list)
    for node, value in inferred.dims.items():
        for dims in _tuples(value):
            for name in {axis.name for dim in dims for axis in leaves(dim)}:
                found[name].append((node, dims))
    return found


def _tuples(value: Any) -> Iterator[tuple[Dim, ...]]:
    if isinstance(value, list):
        for item in value:
            yield from _tuples(item)
    elif value is not None:
        yield value


def _bytes(program: Program, values: list[tuple[Node, tuple[Dim, ...]]]) -> int:
    names = {str(node.target) for node, _ in values if node.op == "get_attr"}
    return sum(program.tensors[name].nbytes for name in names)


def _names(taken: list[GemmPair]) -> dict[str, str]:
    counts: dict[str, int] = defaultdict(int)
    names = {}
    for pair in taken:
        prefix = _PREFIX[pair.kind]
        names[pair.axis] = f"{prefix}{counts[prefix]}"
        counts[prefix] += 1
    return names


def _tensors(
    program: Program, inferred: Inferred, names: dict[str, str]
) -> tuple[TensorShard, ...]:
    nodes = {str(n.target): n for n in program.graph.nodes if n.op == "get_attr"}
    result = []
    for name, spec in program.tensors.items():
        dims: tuple[Dim, ...] = tuple(Axis(str(n), n) for n in spec.shape)
        if name in nodes:
            found = inferred.dims[nodes[name]]
            dims = tuple(
                substitute(dim, names) if any(a.name in names for a in leaves(dim)) else whole
                for dim, whole in zip(found, dims, strict=True)
            )
            dims = tuple(_plain(dim, set(names.values())) for dim in dims)
        result.append(TensorShard(name, spec.kind, str(spec.dtype).removeprefix("torch."), dims))
    return tuple(result)


def _plain(dim: Dim, chosen: set[str]) -> Dim:
    """Axes that are not sharded go by their size: their numbers mean nothing to a reader."""
    others = {a.name: str(a.size) for a in leaves(dim) if a.name not in chosen}
    return substitute(dim, others)


def _kept(
    program: Program,
    inferred: Inferred,
    pairs: tuple[GemmPair, ...],
    shares: Shares,
    refused: dict[str, str],
) -> tuple[Kept, ...]:
    """A reason for every parameter that stays whole."""
    nodes = {str(n.target): n for n in program.graph.nodes if n.op == "get_attr"}
    by_name = {n.name: n for n in program.graph.nodes}
    paired = {pair.axis for pair in pairs}
    bars = {**{pair.axis: pair.bar for pair in pairs if pair.bar}, **inferred.bars}
    result = []
    for name, spec in program.tensors.items():
        if spec.kind != "parameter":
            continue
        if name not in nodes:
            result.append(Kept(name, "the captured call does not use it", "", ""))
            continue
        axes = {a.name: a for dim in inferred.dims[nodes[name]] for a in leaves(dim)}
        if any(axis in shares for axis in axes):
            continue
        reason, where = _why(axes, bars, refused, paired)
        source = locate(by_name[where]) if where else ""
        result.append(Kept(name, reason, where, source))
    return tuple(result)


def _whole(
    inferred: Inferred, pairs: tuple[GemmPair, ...], shares: Shares, refused: Mapping[str, str]
) -> dict[str, WholeAxis]:
    """Every axis that is barred or refused, as a pair if it is one."""
    found = {axis: WholeAxis(bar.reason, bar.node) for axis, bar in inferred.bars.items()}
    for pair in pairs:
        if pair.axis in refused:
            node = pair.bar.node if pair.bar else ""
            facts = (pair.kind, pair.units, pair.columns, pair.rows)
            found[pair.axis] = WholeAxis(refused[pair.axis], node, *facts)
    return {axis: whole for axis, whole in found.items() if axis not in shares}


def _why(
    axes: Iterable[str], bars: Mapping[str, Bar], refused: Mapping[str, str], paired: set[str]
) -> tuple[str, str]:
    """The reason that a reader looks for first: a pair that could have been, then any bar."""
    for axis in axes:
        if axis in refused and axis not in bars:
            return refused[axis], ""
    for axis in sorted(axes, key=lambda axis: axis not in paired):
        if axis in bars:
            return bars[axis].reason, bars[axis].node
    return "none of its dims is made by one GEMM and contracted by another", ""
