"""Conversions of sequence parallelism: values outside of regions lie on the ranks in slices.

    reduce_scatter_to_sequence    P -> S(dim)   reduce-scatter   backward: all-gather
    gather_sequence_to_region     S(dim) -> R   all-gather       backward: reduce-scatter
    scatter_to_sequence           I -> S(dim)   take own slice   backward: all-gather
    gather_from_sequence          S(dim) -> I   all-gather       backward: take own slice

As in Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models,
section 4.2.2), where the first two are called g-bar and g: what an all-reduce sends is sent in two
halves, and norms, dropout and residuals between them keep a slice only. A dim of `size` items need
not divide: rank r holds items `size * r // ranks` to `size * (r + 1) // ranks`, which may be none.
Each backward is again one of the four.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.axes import slice_edges
from autotp.runtime.collectives import Ranges, gather_from_region, scatter_to_region, take
from autotp.runtime.group import Group


def slices(size: int, ranks: int) -> tuple[Ranges, ...]:
    """The items of a dim that each rank holds."""
    edges = slice_edges(size, ranks)
    return tuple(((a, b),) for a, b in zip(edges, edges[1:], strict=False))


def reduce_scatter_to_sequence(x: Tensor, dim: int, group: Group) -> Tensor:
    """The rank's slice of the sum of all ranks' partial sums."""
    return x if group.size == 1 else _call(_ReduceScatter, x, dim, group)


def gather_sequence_to_region(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """All slices, for work that differs on each rank: the gradients are partial sums."""
    return x if group.size == 1 else _call(_GatherToRegion, x, dim, size, group)


def scatter_to_sequence(x: Tensor, dim: int, group: Group) -> Tensor:
    """The rank's slice of a value that all ranks hold."""
    if group.size == 1:
        return x
    # a copy: of a view the whole would stay in memory
    return scatter_to_region(x, dim, slices(x.shape[dim], group.size), group).clone()


def gather_from_sequence(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """All slices, for work that is the same on each rank: so are the gradients."""
    return gather_from_region(x, dim, slices(size, group.size), group)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
        ranges = slices(x.shape[dim], group.size)
        return group.reduce_scatter([take(x, dim, held) for held in ranges])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _call(_GatherToRegion, grad, ctx.dim, ctx.size, ctx.group), None, None


class _GatherToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_from_region(x, dim, slices(size, group.size), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _call(_ReduceScatter, grad, ctx.dim, ctx.group), None, None, None


def _call(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result = function.apply(*args)
    assert isinstance(result, Tensor)
    return result
