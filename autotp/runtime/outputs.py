"""Results that stay split over the ranks when a call returns.

Logits beside a loss in training: gathering them would cost what the split loss saved, so it is done
only where it is asked for, by every rank (`logits.gather()`). Anything else that reads them raises
an error that says so; a value that gathered itself when it is first read would hang if one rank
alone reads it. Key and value caches hold each rank's heads and are passed back as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from autotp.errors import AutoTPError, message
from autotp.runtime.collectives import Ranges, gather_from_region
from autotp.runtime.group import Group


class ShardedOutputError(AutoTPError, AttributeError, TypeError):
    """A split result was used as if it were whole."""


@dataclass(frozen=True)
class LocalOutput:
    """Where a result of a graph is split: its dim, and the positions that each rank holds."""

    dim: int
    ranges: tuple[Ranges, ...]
    cache: bool  # a cache is handed out as it is, a logits tensor as a ShardedOutput

    @property
    def size(self) -> int:
        """The whole size of the dim."""
        return sum(map(self.local_size, range(len(self.ranges))))

    def local_size(self, rank: int) -> int:
        """The size of the dim on a rank."""
        return sum(stop - start for start, stop in self.ranges[rank])


class ShardedOutput:
    """A result of which each rank holds a part: `local`. `gather()` makes it whole on every
    rank."""

    def __init__(self, local: Tensor, where: LocalOutput, group: Group) -> None:
        self.local = local
        self.dim = where.dim
        self.shape = torch.Size(
            where.size if i == where.dim else size for i, size in enumerate(local.shape)
        )
        self._where, self._group = where, group

    def gather(self) -> Tensor:
        """The whole tensor, differentiable. Every rank of the group must call it."""
        return gather_from_region(self.local, self.dim, self._where.ranges, self._group)

    def __repr__(self) -> str:
        return f"ShardedOutput(shape={tuple(self.shape)}, local={tuple(self.local.shape)})"

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"its attribute {name!r} was read")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls._refuse(f"it was given to {getattr(func, '__name__', func)}")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("it was indexed")

    def __len__(self) -> NoReturn:
        self._refuse("its length was read")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tensor):
            self._refuse("it was compared")
        return self is other

    __hash__ = object.__hash__

    def _operand(self, *others: Any) -> NoReturn:
        self._refuse("it was computed with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _operand
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __array__ = _operand
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = _operand

    @staticmethod
    def _refuse(how: str) -> NoReturn:
        raise ShardedOutputError(
            message(
                "the logits of a training step with a loss are split over the ranks",
                values=how,
                because="a gather would cost more than the loss, and must happen on all ranks",
                try_="output.logits.gather() on every rank, or parallelize(..., logits='gather')",
            )
        )
