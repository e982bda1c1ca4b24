"""f and g together with a neighbour, so that no copy is made for the all-reduce.

    column_product        f and the product that reads it
    copy_each_to_region   f for several readers
    reduce_with_bias      g and the bias that is added to its result

An all-reduce overwrites its operand. Alone, f and g must copy it first: hooks may keep the gradient
that f sums, selective checkpointing keeps g's summand. Here the memory is the function's own.
`column_product` also has the sum under way while it computes the weight's gradient, as
Megatron-LM's linear does ("asynchronous all-reduce", `ColumnParallelLinear`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from autotp.runtime.collectives import copy_to_region, reduce_from_region
from autotp.runtime.group import Group
from autotp.runtime.sharded import plain


def column_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
) -> Tensor:
    """A product of f's value: `x` [..., in] is the same on every rank, outputs are split.

    `weight` [out, in], or [in, out] if `transposed`; `bias` [out].
    """
    graph = torch.is_grad_enabled() and group.size > 1
    if not graph or torch.compiler.is_compiling() or _is_cast(x.device.type):
        return _product(copy_to_region(x, group) if graph else x, weight, bias, transposed)
    return _Column.apply(x, weight, bias, transposed, group)  # type: ignore[no-any-return]


def copy_each_to_region(x: Tensor, count: int, group: Group) -> tuple[Tensor, ...]:
    """f for `count` readers, one value for each."""
    if group.size == 1 or not torch.is_grad_enabled():
        return (x,) * count
    return _CopyEach.apply(x, count, group)  # type: ignore[no-any-return]


def reduce_with_bias(x: Tensor, bias: Tensor, group: Group) -> Tensor:
    """g's sum of `x` [..., features] and a `bias` [features] that is the same on every rank.

    The first rank adds it to its summand, where the others copy theirs.
    """
    if group.size == 1 or x.dtype != bias.dtype or torch.compiler.is_compiling():
        return reduce_from_region(x, group) + bias
    return _ReduceWithBias.apply(x, bias, group)  # type: ignore[no-any-return]


class _Column(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
    ) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.transposed, ctx.group = transposed, group
        return _product(x, weight, bias, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        again = torch.is_grad_enabled()  # someone differentiates the gradients, too
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        found: list[Tensor | None] = [None, None, None]
        with plain():
            x, weight = ctx.saved_tensors
            rows = grad.flatten(0, -2)
            wait = None
            if needs_x:
                total = rows @ (weight.t() if ctx.transposed else weight)
                if again:
                    total = reduce_from_region(total, ctx.group)
                else:
                    wait = ctx.group.start_all_reduce_(total)
                found[0] = total.unflatten(0, grad.shape[:-1])
            if needs_weight:
                given = (copy_to_region(x, ctx.group) if again else x).flatten(0, -2)
                found[1] = given.t() @ rows if ctx.transposed else rows.t() @ given
            if needs_bias:
                found[2] = rows.sum(0)
            if wait is not None:
                wait()
        return *found, None, None


class _CopyEach(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: Group) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = [grad for grad in grads if grad is not None]
        again = torch.is_grad_enabled()
        if again or len(found) == 1:
            total = found[0]
            for grad in found[1:]:
                total = total + grad
            return reduce_from_region(total, ctx.group), None, None
        total = torch.add(*found[:2])
        for grad in found[2:]:
            total += grad
        return ctx.group.all_reduce_(total.contiguous()), None, None


class _ReduceWithBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, group: Group) -> Tensor:
        ctx.group = group
        own = x.new_empty(x.shape)
        own = torch.add(x, bias, out=own) if group.rank == 0 else own.copy_(x)
        return group.all_reduce_(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs_x, needs_bias, _ = ctx.needs_input_grad
        mine = copy_to_region(grad, ctx.group) if torch.is_grad_enabled() else grad
        return mine if needs_x else None, grad.flatten(0, -2).sum(0) if needs_bias else None, None


def _is_cast(device: str) -> bool:
    """Whether products cast their operands (torch.autocast)."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return F.linear(x, weight, bias)
    return x @ weight if bias is None else torch.addmm(bias, x, weight)
