"""What the checker knows of one value, and what an operator's rule sees of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from autotp import sizes
from autotp.proof.layout import Layout
from autotp.sizes import Size


class Refused(Exception):
    """A step that the checker cannot prove, with the rule that it breaks."""


@dataclass(frozen=True)
class Value:
    """A tensor on one rank. `kind` is I, R, S or P (see autotp.placement).

    `whole` is the shape of the original's tensor, `shape` the rank's for the example's batch and
    length (None where that is unknown). `grad`: whether it may get a gradient.
    """

    kind: str
    whole: tuple[Any, ...]
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    grad: bool
    dim: int = 0  # of S
    layout: Layout | None = None  # of S

    def __str__(self) -> str:
        return f"S({self.dim}: {self.layout})" if self.kind == "S" else self.kind

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The whole shape as monomials."""
        return tuple(sizes.size_of(size) for size in self.whole)

    def split_at(self, dim: int) -> Layout | None:
        """The layout of a dim, None if it is not the split one."""
        return self.layout if self.kind == "S" and dim == self.dim else None


@dataclass(frozen=True)
class Place:
    """Where a result is split."""

    dim: int
    layout: Layout


PARTIAL = "P"
UNLIKE = "operands are split in different ways"
WHOLE = "an operand is whole where another one is split"
Result: TypeAlias = "Place | str | list[Any] | None"


@dataclass(frozen=True)
class Call:
    """A call of an ATen operator: its arguments by name, its operands' values, its whole result.

    `spec` is the node of the captured program that this one stands for.
    """

    name: str
    given: Mapping[str, Any]
    values: Mapping[Node, Any]
    out: Any
    rank: int
    spec: Node | None = None

    def value(self, name: str) -> Value | None:
        """The tensor that an argument is; None for numbers and arguments that are not given."""
        return self.of(self.given.get(name))

    def of(self, argument: Any) -> Value | None:
        """The value of a node that is a tensor."""
        found = self.values.get(argument) if isinstance(argument, Node) else None
        return found if isinstance(found, Value) else None

    def all(self) -> list[Value]:
        """Every tensor operand, in order."""
        found: list[Value] = []
        for argument in self.given.values():
            items = argument if isinstance(argument, (list, tuple)) else (argument,)
            found += [value for value in map(self.of, items) if value is not None]
        return found

    def input(self) -> Value:
        """The first tensor operand, which must be the only one that is split."""
        first, *others = self.all()
        if first.kind != "S" or any(other.kind == "S" for other in others):
            raise Refused(f"{self.name} is known for a split first operand alone")
        return first

    def out_sizes(self) -> tuple[Size, ...]:
        """The whole shape of a single result."""
        return sizes.shape_of(self.out)


def position(dim: int, rank: int) -> int:
    """A dim counted from the left."""
    return dim + rank if dim < 0 else dim


def name_of(target: Any) -> str:
    """`aten.softmax` of `aten.softmax.int`."""
    return ".".join(str(target).split(".")[:2])


def bind(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by the names of its schema, with defaults."""
    found: dict[str, Any] = {}
    for i, argument in enumerate(target._schema.arguments):
        if i < len(args):
            found[argument.name] = args[i]
        else:
            found[argument.name] = kwargs.get(argument.name, argument.default_value)
    return found


def layout_in(x: Value) -> Layout:
    """The layout of a split value."""
    assert x.layout is not None
    return x.layout


def aligned(operands: Sequence[Value], rank: int) -> Place:
    """Where the result of operands that broadcast against each other is split."""
    places = {(x.dim - len(x.shape), x.layout) for x in operands if x.kind == "S"}
    if len(places) != 1:
        raise Refused(UNLIKE)
    at, layout = places.pop()
    assert layout is not None
    for x in operands:
        if x.kind != "S" and len(x.shape) >= -at and x.shape[at] != 1:
            raise Refused(WHOLE)
    return Place(rank + at, layout)
