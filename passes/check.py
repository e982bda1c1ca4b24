"""The program of a rank is proved to compute what the original computes, forward and backward.

accepted  %f : R = copy_to_region(%x)                   %x is I, and may get a gradient
          %up : S(1: 0:4 | 4:8) = linear(%f, up.weight)     up.weight is S(0: 0:4 | 4:8)
          %down : P = linear(%up, down.weight)            down.weight is S(1: 0:4 | 4:8)
          %g : I = reduce_from_region(%down)
rejected  gelu(%down)                                   a partial sum enters an operator that is
not ...

Every value is typed anew as I, R, S or P (see autotp.placement), from what the ranks hold of each
parameter and from what operators do; nothing that the rewriting passes noted is believed. (Along a
dim of a new tensor of uniform values any split is right; there alone the noted one is taken.)
Between them the ranks hold every row of a split tensor once. Operators are run on meta tensors of
the rank's sizes, so that each size literal is tried. What operators do is in `autotp.proof`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from autotp.errors import CheckError, message
from autotp.placement import locate
from autotp.planning import Plan
from autotp.program import Program
from autotp.proof import calls, conversions
from autotp.proof.layout import layout_of
from autotp.proof.state import State
from autotp.proof.values import Place, Refused, Value

LEAVES = {
    "R": "a value behind f leaves the module, so its gradient counts once for each rank",
    "S": "a sharded value leaves the module; it must be gathered",
    "P": "a partial sum leaves the module; g must come first",
}


def check(program: Program, plan: Plan, *, rank: int) -> None:
    """Raise CheckError, with the node, its source line and the rule, unless the program is
    proved."""
    captured = plan.stages[0][1].graph.nodes if plan.stages else ()
    state = State(plan, rank, {node.name: node for node in captured})
    places = {name: _place(name, program, plan) for name in program.tensors}
    for node in program.graph.nodes:
        try:
            state.values[node] = _visit(state, node, program, places)
        except Refused as refused:
            raise _error(state, node, str(refused)) from None


def collectives(program: Program) -> tuple[tuple[Any, ...], ...]:
    """The collectives that a rank issues, in order: each with its whole shape and its ranges."""
    found = []
    for node in program.graph.nodes:
        if node.target in conversions.COLLECTIVES:
            literals = [arg for arg in node.args if not isinstance(arg, Node)]
            val = node.meta.get("val")
            shape = () if val is None else tuple(map(str, val.shape))
            found.append((getattr(node.target, "__name__", ""), shape, *literals))
    return tuple(found)


def same_order(programs: Sequence[Program]) -> None:
    """Raise CheckError unless all ranks issue the same collectives in the same order."""
    lists = [collectives(program) for program in programs]
    for rank, other in enumerate(lists):
        if other != lists[0]:
            pairs = enumerate(zip(lists[0], other, strict=False))
            end = min(len(lists[0]), len(other))
            at = next((i for i, (a, b) in pairs if a != b), end)
            raise CheckError(
                message(
                    f"ranks 0 and {rank} issue different collectives",
                    values=f"number {at}: {lists[0][at : at + 1]} and {other[at : at + 1]}",
                    because="ranks that wait for different collectives wait for ever",
                )
            )


def _place(name: str, program: Program, plan: Plan) -> Place | None:
    """Where a tensor is split, if it is: the ranks hold every row once, or else all of them."""
    shape, places = program.tensors[name].shape, []
    try:
        if name not in plan.by_name or plan.by_name[name].shape != shape:
            raise ValueError("the plan has no tensor of this name and shape")
        if plan.is_sharded(name):
            by_rank = [plan.ranges(name, rank) for rank in range(plan.tp)]
            for dim, held in enumerate(zip(*by_rank, strict=True)):
                if set(held) != {((0, shape[dim]),)}:
                    places.append(Place(dim, layout_of(held, shape[dim])))
        if len(places) > 1:
            raise ValueError("it is split along two dims")
    except ValueError as error:
        raise CheckError(
            message(
                f"the shards of {name} are not a partition",
                values=f"{name} {list(shape)} on {plan.tp} ranks",
                because=f"every row belongs to one rank: {error}",
            )
        ) from None
    return places[0] if places else None


def _visit(state: State, node: Node, program: Program, places: dict[str, Place | None]) -> Any:
    if node.op == "placeholder":
        noted = program.inputs.get(node.name)  # a cache comes as an earlier call left it
        split = None if noted is None else Place(noted.dim, layout_of(noted.ranges, noted.size))
        return state.new(node.meta.get("val"), True, split)
    if node.op == "get_attr":
        name = str(node.target)
        is_parameter = program.tensors[name].kind == "parameter"
        return state.new(node.meta["val"], is_parameter, places[name])
    if node.op == "output":
        leaves = node.args[0]
        assert isinstance(leaves, (list, tuple))
        for index, leaf in enumerate(leaves):
            value = state.values.get(leaf) if isinstance(leaf, Node) else None
            if isinstance(value, Value):
                _check_leaves(state, index, value, program)
        return None
    conversion = conversions.TABLE.get(node.target)
    return conversion(state, node) if conversion else calls.visit(state, node)


def _check_leaves(state: State, index: int, value: Value, program: Program) -> None:
    """Results are whole, except those that are noted to stay split, with the noted parts."""
    noted = program.outputs.get(index)
    if noted is not None:
        if value.split_at(noted.dim) != state.layout(noted.ranges, value, noted.dim):
            raise Refused(f"result {index} is noted to stay split, but is {value}")
    elif value.kind != "I":
        raise Refused(f"{LEAVES[value.kind]} (result {index})")


def _error(state: State, node: Node, rule: str) -> CheckError:
    operands = ", ".join(f"{n.name}: {state.values.get(n)}" for n in node.all_input_nodes)
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    source = f"\n{locate(node)}: {trace[-1].strip()}" if trace else ""
    return CheckError(
        message(
            f"the graph of rank {state.rank} is not proved at {node.name}",
            values=f"{getattr(node.target, '__name__', node.target)}({operands}){source}",
            because=rule,
        )
    )
