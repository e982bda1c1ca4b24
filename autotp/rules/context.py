"""What a rule sees: the dims of operands, the sizes of results, and the statements it may make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from autotp import sizes
from autotp.sizes import ONE, Size
from autotp.unify import AxisTable, Factors

Dims: TypeAlias = tuple[Factors, ...]
# a rule that does not understand a call returns NotImplemented: it is treated as having no rule
Value: TypeAlias = "Dims | list[Value | None] | None"


@dataclass(frozen=True)
class Use:
    """A statement of a rule about axes at a node, other than "is the same" and "is barred".

    `contract`: the node sums over the axes, so a sharded one leaves a partial sum.
    `gemm`: the columns of a matrix product, which come from `operand` (a weight or an activation).
    `attend`: a batch dim of an attention, or of a product with `operand`.
    `norm`: the sum is one of few numbers for each token, and needs an all-reduce of its own.
    `part`: an axis that begins where a whole value is taken in parts.
    `lookup`: rows of a table that are looked up by index. `classes`: the classes of a loss.
    """

    kind: str
    node: Node
    dims: Factors
    operand: Node | None = None


@dataclass
class Context:
    """The state of inference while it walks the graph."""

    table: AxisTable = field(default_factory=AxisTable)
    values: dict[Node, Value] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)

    def dims(self, node: Any) -> Dims:
        """The dims of a tensor operand; () for Python numbers."""
        value = self.values.get(node) if isinstance(node, Node) else None
        return value if isinstance(value, tuple) else ()

    def fresh(self, shape: Sequence[Size]) -> Dims:
        """A new axis for each dim."""
        return tuple(self.table.new(size) for size in shape)

    def barred(self, shape: Sequence[Size], reason: str) -> Dims:
        """New axes that may not be sharded."""
        dims = self.fresh(shape)
        self.bar(dims, reason)
        return dims

    def bar(self, dims: Sequence[Factors], reason: str) -> None:
        """Forbid sharding every axis in these dims."""
        for dim in dims:
            self.table.bar(dim, reason)

    def use(self, kind: str, node: Node, dims: Factors, operand: Node | None = None) -> None:
        """Record a statement for the matcher and the rewriter."""
        self.uses.append(Use(kind, node, dims, operand))

    def same(self, one: Dims, other: Dims) -> None:
        """Two tensors have the same dims."""
        for a, b in zip(one, other, strict=True):
            self.table.unify(a, b)

    def broadcast(self, operands: Sequence[Dims], rank: int) -> Dims:
        """Dims of the result of broadcasting: aligned at the right, dims of size 1 stretched."""
        result: list[Factors] = []
        for position in range(rank):
            dim: Factors = ()
            for dims in operands:
                index = position - rank + len(dims)
                other = dims[index] if index >= 0 else ()
                if not other or self.table.size(other) == ONE:
                    continue
                if dim:
                    self.table.unify(dim, other)
                dim = dim or other
            result.append(dim)
        return tuple(result)


def tensors(node: Node) -> list[Node]:
    """Operands that are tensors, in order of the arguments."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def shape(node: Node) -> tuple[Size, ...]:
    """The sizes of a node's (single tensor) result."""
    return sizes.shape_of(node.meta["val"])


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by keyword."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def position(dim: int, rank: int) -> int:
    """A dim counted from the left."""
    return dim + rank if dim < 0 else dim
