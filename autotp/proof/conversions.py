"""What turns one placement into another: f, g, scatter, gather, and the operators of a vocabulary.

TABLE holds a function for each; a new conversion is a new entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from autotp.program import regions
from autotp.proof import shapes
from autotp.proof.layout import Layout, slices_of
from autotp.proof.state import State
from autotp.proof.values import Place, Refused, Value
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
from autotp.sizes import Size


def _operand(state: State, node: Node, kind: str) -> Value:
    return _of_kind(state, node, node.args[0], kind)


def _of_kind(state: State, node: Node, source: Any, kind: str) -> Value:
    value = state.values.get(source) if isinstance(source, Node) else None
    if not isinstance(value, Value) or value.kind != kind:
        name = getattr(node.target, "__name__", node.target)
        raise Refused(f"{name} takes a value of placement {kind}, and is given {value}")
    return value


def copy(state: State, node: Node) -> Value:
    """f: I to R. A value without a gradient is as good before as behind it."""
    return _copied(state, node, _operand(state, node, "I"))


def copy_all(state: State, node: Node) -> list[Value]:
    """f of several values."""
    sources = node.args[0]
    assert isinstance(sources, (list, tuple))
    return [_copied(state, node, _of_kind(state, node, source, "I")) for source in sources]


def _copied(state: State, node: Node, value: Value) -> Value:
    if value.grad and any(state.no_grad):
        places = regions(node.graph)
        if any(places[reader] != places[node] for reader in node.users):
            raise Refused("f in a region without gradients is read behind it: the gradient is lost")
        return replace(value, grad=False)
    return replace(value, kind="R") if value.grad else value


def reduce(state: State, node: Node) -> Value:
    """g: P to I."""
    return replace(_operand(state, node, "P"), kind="I")


def gather(state: State, node: Node) -> Value:
    """S to I."""
    value = _operand(state, node, "S")
    if (value.dim, value.layout) != _where(state, node, value):
        raise Refused("a gather takes other parts than the ranks hold")
    shape = tuple(map(shapes.example, value.whole))
    return replace(value, kind="I", shape=shape, dim=0, layout=None)


def scatter(state: State, node: Node) -> Value:
    """I to S."""
    value = _operand(state, node, "I")
    return state.split(value, Place(*_where(state, node, value)))


def reduce_scatter(state: State, node: Node) -> Value:
    """P to S, in slices."""
    return _sliced(state, node, replace(_operand(state, node, "P"), kind="I"))


def slice_up(state: State, node: Node) -> Value:
    """I to S, in slices."""
    return _sliced(state, node, _operand(state, node, "I"))


def join(state: State, node: Node) -> Value:
    """S to I, of slices."""
    value, (dim, size) = _operand(state, node, "S"), node.args[1:3]
    assert isinstance(dim, int)
    slices = slices_of(value.sizes[dim], state.plan.tp)
    if value.split_at(dim) != slices or _size(state, size) != slices.size:
        raise Refused("a gather takes other slices than the ranks hold")
    shape = tuple(map(shapes.example, value.whole))
    return replace(value, kind="I", shape=shape, dim=0, layout=None)


def join_to_region(state: State, node: Node) -> Value:
    """S to R, of slices. A value without a gradient is as good as an I."""
    value = join(state, node)
    return replace(value, kind="R") if value.grad else value


def _sliced(state: State, node: Node, value: Value) -> Value:
    dim = node.args[1]
    assert isinstance(dim, int)
    return state.split(value, Place(dim, slices_of(value.sizes[dim], state.plan.tp)))


def _size(state: State, size: Any) -> Size | None:
    """A size that a conversion is given: a number, or read off a value whose dim is whole."""
    if isinstance(size, int):
        return (size, ())
    if size.target is not torch.ops.aten.sym_size.int:
        return None
    source, dim = size.args
    value = state.values[source]
    assert isinstance(value, Value)
    return value.sizes[dim]


def _where(state: State, node: Node, value: Value) -> tuple[int, Layout]:
    dim, held = node.args[1:3]
    assert isinstance(dim, int)
    return dim, state.layout(held, value, dim)


def lookup(state: State, node: Node) -> Value:
    """A look-up in a table with split rows: P."""
    weight, index = (_given(state, node, i) for i in (0, 1))
    assert weight is not None and index is not None
    if weight.split_at(0) != _rows(state, node, weight, 0):
        raise Refused("a look-up in a split table names other rows than the ranks hold")
    if index.kind != "I":
        raise Refused("the index of a look-up is the same on all ranks")
    found = state.new(node.meta["val"], weight.grad)
    assert isinstance(found, Value)
    return replace(found, kind="P")


def loss(state: State, node: Node) -> Value:
    """Cross entropy of logits with split classes: I."""
    logits, target, weight = (_given(state, node, i) for i in (0, 1, 3))
    assert logits is not None and target is not None
    dim = 0 if len(logits.whole) == 1 else 1
    rows = _rows(state, node, logits, dim)
    if logits.split_at(dim) != rows or (weight is not None and weight.split_at(0) != rows):
        raise Refused("a loss of split logits names other classes than the ranks hold")
    if target.kind != "I" or (weight is not None and weight.grad):
        raise Refused("targets and class weights of a split loss get no gradient")
    found = state.new(node.meta["val"], logits.grad)
    assert isinstance(found, Value)
    return found


def _given(state: State, node: Node, index: int) -> Value | None:
    argument = node.args[index] if len(node.args) > index else None
    value = state.values.get(argument) if isinstance(argument, Node) else None
    return value if isinstance(value, Value) else None


def _rows(state: State, node: Node, value: Value, dim: int) -> Layout:
    rows = node.args[2]
    assert isinstance(rows, (list, tuple))
    return state.layout([(piece,) for piece in rows], value, dim)


TABLE: dict[Any, Callable[[State, Node], Any]] = {
    copy_to_region: copy,
    copy_all_to_region: copy_all,
    reduce_from_region: reduce,
    gather_from_region: gather,
    scatter_to_region: scatter,
    reduce_scatter_to_sequence: reduce_scatter,
    gather_sequence_to_region: join_to_region,
    scatter_to_sequence: slice_up,
    gather_from_sequence: join,
    vocabulary.embedding: lookup,
    vocabulary.cross_entropy: loss,
}

# Those that wait for other ranks in their forward or backward.
COLLECTIVES = set(TABLE) - {vocabulary.embedding}
