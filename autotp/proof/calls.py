"""The type of an operator's result from those of its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from autotp import axes, sizes
from autotp.proof import elementwise, operators, products, shapes, views
from autotp.proof.layout import layout_of
from autotp.proof.state import State, each, flat
from autotp.proof.values import PARTIAL, Call, Place, Refused, Value, bind, name_of
from autotp.runtime.random import draw, next_seed
from autotp.runtime.regions import SIDE_EFFECTS, enter_grad_mode, leave_grad_mode

NO_F = "a replicated value that may need a gradient enters sharded computation without f"
MIXES = "a value behind f meets one that is the same on all ranks, so it counts once for each rank"
EARLY = "a partial sum enters an operator that is not linear; g must come first"
SIZE = "a size contradicts what this rank holds"
STREAM = (
    "inside a region random operators draw from the sharded stream, outside from the replicated one"
)
UNDRAWN = "a random operator does not draw from a stream that the ranks agree on"
SHAPED = ("expand_as", "reshape_as", "type_as", "view_as")  # read no value of `other`

_aten = torch.ops.aten


def visit(state: State, node: Node) -> Any:
    """The value of a call; Refused if the step is not proved."""
    target: Any = node.target
    args, kwargs = node.args, dict(node.kwargs)
    if target is next_seed or target in SIDE_EFFECTS:
        _grad_mode(state, node)
        return None
    if target is draw:
        _draw(state, node)
        target, args = args[0], args[4:]
    if not isinstance(target, torch._ops.OpOverload):
        return _python(state, node)
    given = bind(target, args, kwargs)
    if str(target).split(".")[1] in SHAPED:
        del given["other"]
    if node.target is not draw and _is_random(target, given):
        raise Refused(UNDRAWN)
    if target is _aten.sym_size.int:
        return _sym_size(state, given)
    name = name_of(target)
    spec = state.captured.get(node.meta.get("source", ""))
    call = Call(name, given, state.values, node.meta.get("val"), state.rank, spec)
    return _typed(state, node, call, target, _run(state, call, target, args, kwargs))


def _typed(state: State, node: Node, call: Call, target: Any, found: Any) -> Any:
    rule = operators.rule_of(call.name, target)
    made = rule is elementwise.create  # its operands give a dtype and a device
    operands = [] if made else call.all()
    grad = any(value.grad for value in operands) and target is not _aten.detach.default
    results = state.new(call.out, grad)
    kinds = {value.kind for value in operands}
    if "P" in kinds:
        _check_linear(call, operands, results)
        results = each(results, lambda value: replace(value, kind="P"))
    elif "S" in kinds:
        if rule is None:
            raise Refused(f"no rule says what {call.name} does to a split operand")
        results = _placed(state, results, rule(call))
    elif _differs(results, found) and (made or rule in operators.UNIFORM):
        results = _claimed(state, node, call, results)
    if _differs(results, found):
        raise Refused(f"{SIZE}: {[v.shape for v in flat(results)]} is made as {list(found)}")
    if "P" in kinds:
        return results
    _check_f(operands, results)
    if "R" in kinds:
        return each(results, lambda v: replace(v, kind="R") if v.kind == "I" and v.grad else v)
    return results


def _placed(state: State, results: Any, places: Any) -> Any:
    if isinstance(results, list):
        each_its = places if isinstance(places, list) else [places] * len(results)
        return [_placed(state, v, p) for v, p in zip(results, each_its, strict=True)]
    if places is None or not isinstance(results, Value):
        return results
    return replace(results, kind="P") if places == PARTIAL else state.split(results, places)


def _claimed(state: State, node: Node, call: Call, value: Value) -> Value:
    """Along a dim that is made here the value is uniform: any split is right that has this size, so
    the noted one is taken."""
    noted, shares = node.meta.get("dims") or (), state.plan.shares
    at = [i for i, dim in enumerate(noted) if axes.is_sharded(dim, shares)]
    if len(at) != 1:
        raise Refused(SIZE)
    tail = _static_tail(noted[at[0]])
    copies = sizes.divide(sizes.size_of(value.whole[at[0]]), (axes.size(tail) or 0, ()))
    if copies is None or not axes.is_sharded(tail, shares):
        raise Refused(SIZE)
    held = tuple(axes.ranges(tail, shares, rank) for rank in range(state.plan.tp))
    layout = layout_of(held, axes.size(tail) or 0).repeated(copies)
    uniform = operators.TABLE[call.name] in operators.UNIFORM
    if layout is None or (uniform and not views.is_uniform(call, at[0], layout)):
        raise Refused(SIZE)
    return state.split(value, Place(at[0], layout))


def _static_tail(dim: axes.Dim) -> axes.Dim:
    """The factors behind the last dynamic one: heads, of batch times heads."""
    parts = dim.parts if isinstance(dim, axes.Product) else (dim,)
    dynamic = [i for i, part in enumerate(parts) if axes.size(part) is None]
    return axes.Product(parts[dynamic[-1] + 1 if dynamic else 0 :])


def _check_linear(call: Call, operands: Sequence[Value], results: Any) -> None:
    """Every operand is partial, or the only one is and the other one is a number that scales it."""
    if not all(value.dtype.is_floating_point or value.dtype.is_complex for value in flat(results)):
        raise Refused(EARLY)  # conversion to integers rounds
    if any(value.kind != "P" for value in operands):
        raise Refused(products.BIAS if call.name in ("aten.add", "aten.sub") else EARLY)
    one = len(operands) == 1
    if call.name in operators.SCALED and one:
        return
    if call.name not in operators.LINEAR or (call.name in ("aten.add", "aten.sub") and one):
        raise Refused(EARLY)


def _check_f(operands: Sequence[Value], results: Any) -> None:
    """A value that is the same on all ranks enters a region through f, and only there goes through
    f."""
    made = [value for value in flat(results) if value.grad]
    if made and any(value.kind == "I" and value.grad for value in operands):
        if any(value.kind != "I" for value in made):
            raise Refused(NO_F)
        if any(value.kind == "R" for value in operands):
            raise Refused(MIXES)


# ---- sizes


def _run(state: State, call: Call, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    try:
        return shapes.outcome(target, args, kwargs, state.values)
    except Exception as error:  # whatever an operator says about sizes that do not fit
        if all(value.kind == "I" for value in call.all()) and not operators.has_sizes(call.name):
            return None
        raise Refused(f"{SIZE}: {str(error).splitlines()[0]}") from None


def _differs(results: Any, found: list[shapes.Shape] | None) -> bool:
    tensors = flat(results)
    if found is None or not tensors:
        return False
    return len(tensors) != len(found) or any(
        len(value.shape) != len(shape)
        or any(a is not None and a != b for a, b in zip(value.shape, shape, strict=True))
        for value, shape in zip(tensors, found, strict=True)
    )


def _sym_size(state: State, given: Mapping[str, Any]) -> Any:
    value, dim = state.values[given["self"]], given["dim"]
    if value.split_at(dim % len(value.whole)) is not None:
        raise Refused("the size of a split dim is read: it differs between ranks")
    return value.shape[dim]


# ---- other calls


def _python(state: State, node: Node) -> Any:
    """Python functions of numbers and of lists of results; others are known on whole operands."""
    args = [state.values.get(arg) if isinstance(arg, Node) else arg for arg in node.args]
    if node.target is getattr:
        return torch.device("meta") if args[1] == "device" else None
    operands = [state.values.get(source) for source in node.all_input_nodes]
    tensors = [value for value in operands if isinstance(value, Value)]
    if any(value.kind != "I" for value in tensors):
        raise Refused(f"no rule says what {node.target} does to a split or partial operand")
    module = getattr(node.target, "__module__", "")
    if tensors or module not in ("_operator", "math", "torch"):
        return state.new(node.meta.get("val"), any(value.grad for value in tensors))
    assert callable(node.target)
    return None if any(arg is None for arg in args) else node.target(*args)


def _is_random(target: Any, given: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if given.get("train", True) is False or given.get("training", True) is False:
        return False
    return 0 not in (given.get("p"), given.get("dropout_p"))


def _draw(state: State, node: Node) -> None:
    stream, seed, number = node.args[1:4]
    operands = [state.values.get(source) for source in node.all_input_nodes]
    split = any(isinstance(value, Value) and value.kind == "S" for value in operands)
    if (stream == "sharded") != split:
        raise Refused(STREAM)
    if stream == "whole":
        return
    if not isinstance(seed, Node) or seed.target is not next_seed:
        raise Refused(UNDRAWN)
    if not isinstance(number, int) or number in state.draws:
        raise Refused("two random operators draw the same numbers")
    state.draws.add(number)


def _grad_mode(state: State, node: Node) -> None:
    if node.target is enter_grad_mode:
        state.no_grad.append(node.args[0] is False)
    elif node.target is leave_grad_mode:
        state.no_grad.pop()
