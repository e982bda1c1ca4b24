"""The four conversions between placements; each one's backward is another one's forward.

    copy_to_region (f)        I -> R       identity         backward: all-reduce
    copy_all_to_region        I -> R       f of several values, with one all-reduce
    reduce_from_region (g)    P -> I       all-reduce       backward: identity
    scatter_to_region         I -> S(dim)  take own part    backward: all-gather
    gather_from_region        S(dim) -> I  all-gather       backward: take own part

f and g are those of Megatron-LM (Shoeybi et al. 2019, section 3). They state their own backward:
torch's differentiable all-reduce reduces in its backward too, which multiplies gradients by the
number of ranks, and the in-place one is silently the identity there. Each backward is again one of
the four, so gradients can be differentiated as well.

What a rank holds of a dim is written as ranges: the (start, stop) positions of the full dim that
its local dim holds, in order. Between them the ranks hold every position once. In a group of one
rank every conversion returns its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autotp.runtime.group import Group

Ranges: TypeAlias = tuple[tuple[int, int], ...]


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """f, Megatron's `copy_to_tensor_model_parallel_region`: a replicated value enters sharded work.

    Every rank uses the value for other outputs, so its gradient is the sum of theirs.
    """
    return x if group.size == 1 else _call(_Copy, x, group)


def copy_all_to_region(xs: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """f of several values of one dtype: their gradients are summed in one all-reduce."""
    return tuple(xs) if group.size == 1 else _CopyAll.apply(group, *xs)


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """g, Megatron's `reduce_from_tensor_model_parallel_region`: the ranks' partial sums are added.

    Every rank then does the same with the sum, so each summand's gradient is the sum's.
    """
    return x if group.size == 1 else _call(_Reduce, x, group)


def gather_from_region(x: Tensor, dim: int, ranges: Sequence[Ranges], group: Group) -> Tensor:
    """Megatron's `gather_from_tensor_model_parallel_region`, for parts of any sizes and layout."""
    return x if group.size == 1 else _call(_Gather, x, dim, ranges, group)


def scatter_to_region(x: Tensor, dim: int, ranges: Sequence[Ranges], group: Group) -> Tensor:
    """Megatron's `scatter_to_tensor_model_parallel_region`, for parts of any sizes and layout."""
    return x if group.size == 1 else _call(_Scatter, x, dim, ranges, group)


def take(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """The positions of `dim` that one rank holds. A view if they are one piece."""
    pieces = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    if not pieces:
        return x.narrow(dim, 0, 0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def place(parts: Sequence[Tensor], dim: int, ranges: Sequence[Ranges]) -> Tensor:
    """The inverse of `take` on every rank: each piece of each rank's part at its positions."""
    assert len(parts) == len(ranges), f"{len(parts)} parts, and ranges of {len(ranges)} ranks"
    found: list[tuple[int, int, Tensor]] = []
    for part, held in zip(parts, ranges, strict=True):
        assert part.shape[dim] == _length(held), f"a part of {part.shape[dim]} positions for {held}"
        offset = 0
        for start, stop in held:
            whole = stop - start == part.shape[dim]
            piece = part if whole else part.narrow(dim, offset, stop - start)
            found.append((start, stop, piece))
            offset += stop - start
    found.sort(key=lambda piece: piece[:2])
    end = 0
    for start, stop, _ in found:
        # Two holders of one position would each see a part of its gradient: not what is meant here.
        assert start == end, f"position {min(start, end)} is held by no rank or by two: {ranges}"
        end = stop
    pieces = [piece for start, stop, piece in found if start != stop]
    if not pieces:
        return parts[0]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # someone differentiates the gradient, too
            return _call(_Reduce, grad, ctx.group), None
        return ctx.group.all_reduce(grad), None


class _CopyAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return xs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]  # the same on every rank
        found = [grad for grad, asked in zip(grads, needed, strict=True) if asked]
        total = _call(_Reduce, torch.cat([grad.reshape(-1) for grad in found]), ctx.group)
        parts = iter(total.split([grad.numel() for grad in found]))
        return None, *(
            next(parts).view(grad.shape) if asked else None
            for grad, asked in zip(grads, needed, strict=True)
        )


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _call(_Copy, grad, ctx.group) if torch.is_grad_enabled() else grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranges: Sequence[Ranges], group: Group) -> Tensor:
        ctx.dim, ctx.ranges, ctx.group = dim, ranges, group
        shapes = [list(x.shape) for _ in ranges]
        for shape, held in zip(shapes, ranges, strict=True):
            shape[dim] = _length(held)
        return place(group.all_gather(x, shapes), dim, ranges)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _call(_Scatter, grad, ctx.dim, ctx.ranges, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranges: Sequence[Ranges], group: Group) -> Tensor:
        ctx.dim, ctx.ranges, ctx.group = dim, ranges, group
        return take(x, dim, ranges[group.rank])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _call(_Gather, grad, ctx.dim, ctx.ranges, ctx.group), None, None, None


def _call(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result = function.apply(*args)
    assert isinstance(result, Tensor)
    return result


def _length(held: Ranges) -> int:
    return sum(stop - start for start, stop in held)
