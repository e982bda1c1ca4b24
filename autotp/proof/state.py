"""State: what is known while one rank's program is walked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from autotp import sizes
from autotp.planning import Plan
from autotp.proof import shapes
from autotp.proof.layout import Layout, layout_of
from autotp.proof.values import Place, Refused, Value


@dataclass
class State:
    """`values` holds for each node a Value, a number, a list of those, or None.

    `captured` are the nodes of the original's program by name.
    """

    plan: Plan
    rank: int
    captured: dict[str, Node]
    values: dict[Node, Any] = field(default_factory=dict)
    draws: set[int] = field(default_factory=set)
    no_grad: list[bool] = field(default_factory=list)

    def new(self, val: Any, grad: bool, place: Place | None = None) -> Any:
        """A value from the original's example: whole, unless a place is given."""
        if isinstance(val, (list, tuple)):
            return [self.new(item, grad) for item in val]
        if isinstance(val, torch.Tensor):
            floating = val.is_floating_point() or val.is_complex()
            grad = grad and floating and not any(self.no_grad)
            whole = tuple(val.shape)
            value = Value("I", whole, tuple(map(shapes.example, whole)), val.dtype, grad)
            return value if place is None else self.split(value, place)
        return shapes.example(val) if isinstance(val, torch.SymInt) else val

    def split(self, value: Value, place: Place) -> Value:
        """The same value, split, with the rank's shape."""
        if place.layout.size != value.sizes[place.dim]:
            raise Refused(
                f"a split dim of {sizes.text(place.layout.size)} items is another size here"
            )
        shape, whole = list(value.shape), shapes.example(value.whole[place.dim])
        shape[place.dim] = None if whole is None else place.layout.local(whole, self.rank)
        return replace(value, kind="S", shape=tuple(shape), dim=place.dim, layout=place.layout)

    def layout(self, held: Any, value: Value, dim: int) -> Layout:
        """The layout of a dim from every rank's ranges; Refused unless they are a partition."""
        size, symbols = sizes.size_of(value.whole[dim])
        try:
            if symbols or len(held) != self.plan.tp:
                raise ValueError("the dim is dynamic, or ranks are left out")
            return layout_of(tuple(tuple(map(tuple, ranges)) for ranges in held), size)
        except ValueError as error:
            raise Refused(f"every position belongs to one rank, but {error}") from None


def each(values: Any, change: Callable[[Value], Value]) -> Any:
    """A result, or each of several, changed."""
    if isinstance(values, list):
        return [each(value, change) for value in values]
    return change(values) if isinstance(values, Value) else values


def flat(values: Any) -> list[Value]:
    """The tensors among results."""
    several = values if isinstance(values, list) else [values]
    return [value for value in several if isinstance(value, Value)]
