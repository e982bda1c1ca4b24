"""Formulas that are written out become the operators that torch has for them.

before  %tanh : tanh(mul(add(%x, mul(pow(%x, 3.0), 0.044715)), 0.79788...))
        %y : mul(mul(%x, 0.5), add(%tanh, 1.0))
after   %y : gelu(%x, approximate="tanh")

GELU in both forms, SiLU, and RMS norm. A formula is recognised by its polynomial in one value, not
by the order in which it is written; constants must be the operator's own to within the dtype's
rounding. Each saves up to seven reads and writes of an activation, and what their backward keeps.
Done last, on the graph with f and g in it, so it changes nothing of what is split. Under autocast
each step has a dtype of its own, and everything stays as it is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.program import Program, affected, copied, regions
from autotp.runtime.regions import enter_autocast

aten = torch.ops.aten
Polynomial: TypeAlias = dict[int, float]  # coefficients by power
_CUBE = 0.044715
_SCALE = math.sqrt(2 / math.pi)
_MULTIPLY = {aten.mul.Tensor, aten.mul.Scalar}


@dataclass
class Match:
    """An operator, its arguments, and the nodes of the formula that it stands for."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nodes: set[Node] = field(default_factory=set)


def fuse(program: Program) -> Program:
    """The program with known formulas as operators."""
    kinds = ("cpu", "cuda")
    entered = any(n.target is enter_autocast and n.args[1] for n in program.graph.nodes)
    if entered or any(torch.is_autocast_enabled(kind) for kind in kinds):
        return program
    if not any(_found(node) for node in program.graph.nodes):
        return program
    graph = copied(program.graph)
    changed, places = affected(graph), regions(graph)
    fused = set[Node]()
    for node in reversed(list(graph.nodes)):
        found = _found(node)
        if found is not None and _apart(node, found, changed, places):
            fused.add(_replace(graph, node, found))
    if not fused:
        return program
    _name(graph, fused)
    note = f"{len(fused)} formulas became operators"
    return replace(program, graph=graph, provenance=(*program.provenance, note))


def _found(node: Node) -> Match | None:
    """The operator whose formula ends in a node that is read."""
    if node.target not in _MULTIPLY or not node.users:
        return None
    patterns: tuple[Callable[[Node], Match | None], ...] = (_gelu, _silu, _scaled_norm, _norm)
    return next((found for pattern in patterns if (found := pattern(node))), None)


def _apart(node: Node, found: Match, changed: set[Node], places: Mapping[Node, int]) -> bool:
    """Whether a formula computes in one dtype and region, of values that nothing writes to."""
    kept = node.meta["val"].dtype
    operands = {arg for arg in found.args if isinstance(arg, Node)}
    inner = found.nodes | {node}
    return (
        not changed & (inner | operands)
        and len({places[n] for n in inner}) == 1
        and kept.is_floating_point
        and all(n.meta["val"].dtype == kept for n in inner | operands)
    )


def _replace(graph: Graph, node: Node, found: Match) -> Node:
    with graph.inserting_before(node):
        made = graph.call_function(found.target, found.args, found.kwargs)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    dead = {node} | found.nodes
    for old in reversed([n for n in graph.nodes if n in dead]):
        if not old.users:
            graph.erase_node(old)
    return made


def _name(graph: Graph, made: set[Node]) -> None:
    """Name the new nodes in order: gelu, gelu_1, ..., each name once in the graph."""
    taken = {node.name for node in graph.nodes} - {node.name for node in made}
    for node in filter(made.__contains__, graph.nodes):
        base = str(node.target).split(".")[1]
        numbered = (f"{base}_{number}" for number in itertools.count(1))
        node.name = next(name for name in itertools.chain([base], numbered) if name not in taken)
        taken.add(node.name)


# ---- activations


def _gelu(node: Node) -> Match | None:
    """`x / 2 * (1 + tanh(c x + c k x^3))`, `x / 2 * (1 + erf(x / sqrt 2))`."""
    inner: set[Node] = set()
    factors = _factors(node, inner)
    for one in factors:
        call = _plus_one(one)
        if call is None:
            continue
        wanted, kind = (
            ({1: _SCALE, 3: _SCALE * _CUBE}, "tanh")
            if call.target is aten.tanh.default
            else ({1: math.sqrt(0.5)}, "none")
        )
        argument = call.args[0]
        assert isinstance(argument, Node)
        rest = [factor for factor in factors if factor is not one]
        for x in _inside(argument):
            seen = {node, *inner, one, call}
            if _is(_polynomial(argument, x, seen), wanted, x):
                if _is(_product(rest, x, seen), {1: 0.5}, x):
                    return Match(aten.gelu.default, (x,), {"approximate": kind}, seen - {x})
    return None


def _silu(node: Node) -> Match | None:
    """`x * sigmoid(x)`."""
    x, y = node.args[:2]
    for one, other in ((x, y), (y, x)):
        if isinstance(other, Node) and other.target is aten.sigmoid.default:
            if other.args[0] is one and isinstance(one, Node):
                return Match(aten.silu.default, (one,), {}, {other})
    return None


def _factors(node: Node, inner: set[Node]) -> list[Any]:
    """What a product multiplies, products in it included."""
    found: list[Any] = []
    for arg in node.args:
        if isinstance(arg, Node) and arg.target in _MULTIPLY:
            inner.add(arg)
            found += _factors(arg, inner)
        else:
            found.append(arg)
    return found


def _plus_one(node: Any) -> Node | None:
    """tanh or erf, of a node that adds 1 to it."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs:
        return None
    call, one = node.args[:2]
    known = isinstance(call, Node) and call.target in (aten.tanh.default, aten.erf.default)
    return call if known and one == 1 else None  # type: ignore[return-value]


def _inside(node: Node, limit: int = 16) -> list[Node]:
    """The values that a formula is made of, itself first."""
    found = [node]
    for one in found:
        found += [n for n in one.all_input_nodes if n not in found and len(found) < limit]
    return [n for n in found if isinstance(n.meta.get("val"), torch.Tensor)]


def _polynomial(value: Any, x: Node, seen: set[Node]) -> Polynomial | None:
    """A value as a polynomial in `x`, if it is one; notes the nodes that compute it."""
    if value is x:
        return {1: 1.0}
    if isinstance(value, (int, float)):
        return {0: float(value)}
    if not isinstance(value, Node) or value.kwargs or len(value.args) not in (1, 2):
        return None
    seen.add(value)
    parts = [_polynomial(arg, x, seen) for arg in value.args]
    if any(part is None for part in parts):
        return None
    return _calculated(value.target, *parts)  # type: ignore[arg-type]


def _calculated(target: Any, a: Polynomial, b: Polynomial | None = None) -> Polynomial | None:
    if b is None:
        return {n: -c for n, c in a.items()} if target is aten.neg.default else None
    number = b.get(0, 0.0) if set(b) <= {0} else None
    if target in _MULTIPLY:
        return _times(a, b)
    if target is aten.add.Tensor:
        return {n: a.get(n, 0.0) + b.get(n, 0.0) for n in {*a, *b}}
    if target is aten.div.Tensor and number:
        return {n: c / number for n, c in a.items()}
    if target is aten.pow.Tensor_Scalar and number in (2.0, 3.0):
        square = _times(a, a)
        return square if number == 2.0 else _times(square, a)
    return None


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for n, c in a.items():
        for m, d in b.items():
            found[n + m] = found.get(n + m, 0.0) + c * d
    return found


def _product(factors: list[Any], x: Node, seen: set[Node]) -> Polynomial | None:
    found: Polynomial | None = {0: 1.0}
    for factor in factors:
        part = _polynomial(factor, x, seen)
        found = None if part is None or found is None else _times(found, part)
    return found


def _is(found: Polynomial | None, wanted: Polynomial, x: Node) -> bool:
    if found is None or set(found) != set(wanted):
        return False
    rounding = torch.finfo(x.meta["val"].dtype).eps if x.meta["val"].is_floating_point() else 0.0
    return all(math.isclose(found[n], c, rel_tol=2 * rounding) for n, c in wanted.items())


# ---- norms


def _scaled_norm(node: Node) -> Match | None:
    """An RMS norm times a weight of the last dim."""
    for norm, weight in (node.args[:2], node.args[1::-1]):
        if not isinstance(norm, Node) or not isinstance(weight, Node):
            continue
        found = _norm(norm) if norm.target in _MULTIPLY else None
        if found is not None and _shape(weight) == found.args[1]:
            args = (*found.args[:2], weight, found.args[3])
            return Match(found.target, args, {}, found.nodes | {norm})
    return None


def _norm(node: Node) -> Match | None:
    """`x * rsqrt(mean(x^2) + eps)` over the last dim."""
    for x, root in (node.args[:2], node.args[1::-1]):
        nodes = _chain(root, aten.rsqrt.default, aten.add.Tensor, aten.mean.dim)
        if nodes is None or not isinstance(x, Node):
            continue
        added, mean = nodes[1:]
        square, width = mean.args[0], sizes.constant(x.meta["val"].shape[-1])
        last = mean.args[1] in ([-1], [x.meta["val"].dim() - 1]) and mean.args[2:] == (True,)
        fits = last and not mean.kwargs and isinstance(added.args[1], float) and not added.kwargs
        if fits and width is not None and _is_square(square, x):
            assert isinstance(square, Node)
            eps = added.args[1]
            return Match(aten.rms_norm.default, (x, [width], None, eps), {}, {*nodes, square})
    return None


def _chain(node: Any, *targets: Any) -> list[Node] | None:
    """Nodes of these operators, each the first operand of the one before."""
    found: list[Node] = []
    for target in targets:
        if not isinstance(node, Node) or node.target is not target:
            return None
        found.append(node)
        node = node.args[0]
    return found


def _is_square(node: Any, x: Node) -> bool:
    if not isinstance(node, Node) or node.kwargs:
        return False
    power = node.target is aten.pow.Tensor_Scalar and node.args == (x, 2)
    return power or (node.target in _MULTIPLY and node.args == (x, x))


def _shape(node: Node) -> list[Any]:
    value = node.meta.get("val")
    return [*value.shape] if isinstance(value, torch.Tensor) else []
