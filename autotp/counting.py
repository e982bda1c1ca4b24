"""What tensors hold that a model makes by counting: positions, one number everywhere, or which keys
a query may see.

Read off operators alone, so a mask that a model computes from lengths in twenty steps is known as
well as one that it writes as one comparison. A dim that is counted along has more than one item: of
one item it is uniform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from autotp import sizes
from autotp.rules.context import argument

aten = torch.ops.aten
_EXACT = (torch.int64, torch.int32, torch.bool)
_SAME = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.expand.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
}
_ONES = {aten.ones.default, aten.new_ones.default, aten.ones_like.default}
_ANDS = {aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default}
_EQUAL = {aten.eq.Tensor, aten.eq.Scalar}
_UNEQUAL = {aten.ne.Tensor, aten.ne.Scalar}


@dataclass(frozen=True)
class Positions:
    """A tensor of integers that count along one dim (from the right) and begin at `start`."""

    dim: int
    start: Any


@dataclass(frozen=True)
class Uniform:
    """A tensor that holds one integer or truth value everywhere."""

    value: Any


@dataclass(frozen=True)
class Causal:
    """A tensor that says of each pair of query and key whether key <= query + offset."""

    offset: Any


Counted: TypeAlias = Positions | Uniform | Causal


def counted(node: Node, known: Mapping[Node, Counted]) -> Counted | None:
    """What a node's result holds, from what its operands hold; None if it is not known."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in _EXACT:
        return None
    rows = [x.meta["val"] for x in node.all_input_nodes if isinstance(known.get(x), Causal)]
    if any(value.dim() < 2 or not _is(value.shape[-2] - row.shape[-2], 0) for row in rows):
        return None  # one row for all queries
    found = _read(node, value, known)
    if isinstance(found, Positions) and sizes.constant(value.shape[found.dim]) == 1:
        return Uniform(found.start)
    return found


def _read(node: Node, value: torch.Tensor, known: Mapping[Node, Counted]) -> Counted | None:
    first = node.args[0] if node.args else None
    source = known.get(first) if isinstance(first, Node) else None
    match node.target:
        case aten.arange.default:
            return Positions(-1, 0)
        case aten.arange.start:
            begin = _number(first)
            return None if begin is None else Positions(-1, begin)
        case target if target in _ONES:
            return Uniform(1)
        case aten.add.Tensor | aten.sub.Tensor:
            return _moved(node, source)
        case aten.unsqueeze.default if isinstance(source, Positions):
            at = node.args[1]
            assert isinstance(at, int)
            from_right = at - value.dim() if at >= 0 else at
            return replace(source, dim=source.dim - (from_right >= source.dim))
        case aten.slice.Tensor if isinstance(source, (Positions, Uniform)):
            return _sliced(node, source, value.dim())
        case aten.diff.default if isinstance(source, Positions):
            return _steps(node, source, known, value.dim())
        case aten.cumsum.default if isinstance(source, Uniform) and _is(source.value, 0):
            return Uniform(0)
        case aten.index.Tensor:
            return _indexed(node, source, known)
        case aten.le.Tensor | aten.ge.Tensor:
            return _compare(node, value, known)
        case target if target in _EQUAL or target in _UNEQUAL:
            return _equal(node, source, known)
        case target if target in _ANDS and value.dtype is torch.bool:
            return _both(node, known)
        case target if target in _SAME and isinstance(first, Node) and source is not None:
            return source if first.meta["val"].dtype in _kinds(value.dtype) else None
        case aten.unsqueeze.default if isinstance(source, Uniform):
            return source
    return None


def _kinds(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What may be converted to a dtype and hold the same numbers."""
    return (torch.bool,) if dtype is torch.bool else _EXACT


def _number(value: Any) -> Any:
    """An integer, or the symbolic one that a node stands for."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    return value if whole else None


def _moved(node: Node, source: Counted | None) -> Counted | None:
    step = _number(node.args[1])
    if step is None or node.kwargs or isinstance(source, (Causal, type(None))):
        return None
    step = step if node.target is aten.add.Tensor else -step
    if isinstance(source, Uniform):
        return Uniform(source.value + step)
    return replace(source, start=source.start + step)


def _sliced(node: Node, source: Positions | Uniform, rank: int) -> Counted | None:
    dim, begin = argument(node, 1, "dim", 0), argument(node, 2, "start", 0) or 0
    if isinstance(source, Uniform):
        return source
    if dim - rank * (dim >= 0) != source.dim:
        return source
    plain = isinstance(begin, int) and begin >= 0 and argument(node, 4, "step", 1) == 1
    return replace(source, start=source.start + begin) if plain else None


def _steps(
    node: Node, source: Positions, known: Mapping[Node, Counted], rank: int
) -> Counted | None:
    """Differences of neighbours, with what is put before: 1 if that is one less."""
    dim, before = argument(node, 2, "dim", -1), argument(node, 3, "prepend")
    if argument(node, 1, "n", 1) != 1 or argument(node, 4, "append") is not None:
        return None
    if dim - rank * (dim >= 0) != source.dim:
        return None
    if before is not None:
        found = known.get(before)
        if not isinstance(found, Uniform) or not _is(source.start - found.value, 1):
            return None
        if sizes.constant(before.meta["val"].shape[source.dim]) != 1:
            return None
    return Uniform(1)


def _indexed(node: Node, source: Counted | None, known: Mapping[Node, Counted]) -> Counted | None:
    """`x[i, j, ...]` with a position for every dim of x, or its first item."""
    x, given = node.args[:2]
    assert isinstance(x, Node) and isinstance(given, Sequence)
    places = [_place(index, known) for index in given]
    if len(places) != x.meta["val"].dim() or None in places:
        return None
    if isinstance(source, Positions):
        at = places[source.dim]
        one = Uniform(source.start)
        return replace(at, start=source.start) if isinstance(at, Positions) else one
    return source if isinstance(source, Uniform) else None


def _place(index: Any, known: Mapping[Node, Counted]) -> Positions | Uniform | None:
    """Where an index reads: at the first items, in order, or at the first alone."""
    found = known.get(index) if isinstance(index, Node) else None
    match found:
        case Positions(_, start) | Uniform(start) if _is(start, 0):
            # an index of truth values picks the items at the true ones
            return None if index.meta["val"].dtype is torch.bool else found
    return None


def _compare(node: Node, value: torch.Tensor, known: Mapping[Node, Counted]) -> Causal | None:
    left, right = (known.get(arg) if isinstance(arg, Node) else None for arg in node.args[:2])
    if node.target is aten.ge.Tensor:
        left, right = right, left
    if not isinstance(left, Positions) or left.dim != -1 or value.dim() < 2:
        return None
    if isinstance(right, Uniform) and sizes.constant(value.shape[-2]) == 1:
        return Causal(right.value - left.start)
    if isinstance(right, Positions) and right.dim == -2:
        return Causal(right.start - left.start)
    return None


def _equal(node: Node, source: Counted | None, known: Mapping[Node, Counted]) -> Uniform | None:
    other = node.args[1]
    right = known.get(other) if isinstance(other, Node) else None
    number = right.value if isinstance(right, Uniform) else _number(other)
    if not isinstance(source, Uniform) or number is None:
        return None
    apart = sizes.constant(source.value - number)
    return None if apart is None else Uniform((apart == 0) == (node.target in _EQUAL))


def _both(node: Node, known: Mapping[Node, Counted]) -> Counted | None:
    left, right = (known.get(arg) if isinstance(arg, Node) else None for arg in node.args[:2])
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Uniform) and _is(one.value, 1):
            return other
    return None


def _is(value: Any, number: int) -> bool:
    """Whether an integer, perhaps a symbolic one, is a number for every batch and length."""
    return sizes.constant(value) == number
