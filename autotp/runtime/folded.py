"""f and g together with a neighbour, so that no copy is made for the all-reduce.

    column_product        f and the product that reads it
    row_product           a product, g of it, and the bias that is added
    copy_each_to_region   f for several readers

An all-reduce overwrites its operand. Alone, f and g must copy it first: hooks may keep the gradient
that f sums, selective checkpointing keeps the result of a product. Here the memory is the
function's own, and products write to it (`out=`). `column_product` also has the sum under way while
it computes the weight's gradient, as Megatron-LM's `ColumnParallelLinear` does.

Products are of `x` [..., in] and `weight` [out, in], or [in, out] if `transposed`, with `bias`
[out] or None.
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
    """The product of f's value: `x` is the same on every rank, outputs are split."""
    if group.size > 1 and torch.is_grad_enabled():
        if _alone(x):
            return _Column.apply(x, weight, bias, transposed, group)  # type: ignore[no-any-return]
        x = copy_to_region(x, group)
    return _product(x, weight, bias, transposed)


def row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
) -> Tensor:
    """g of the product, and the bias: inputs are split, results are the same on every rank."""
    if group.size > 1 and _alone(x):
        return _Row.apply(x, weight, bias, transposed, group)  # type: ignore[no-any-return]
    total = reduce_from_region(_product(x, weight, None, transposed), group)
    return total if bias is None else total + bias


def copy_each_to_region(x: Tensor, count: int, group: Group) -> tuple[Tensor, ...]:
    """f for `count` readers, one value for each."""
    if group.size == 1 or not torch.is_grad_enabled():
        return (x,) * count
    return _CopyEach.apply(x, count, group)  # type: ignore[no-any-return]


class _Column(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
    ) -> Tensor:
        _keep(ctx, x, weight, transposed, group)
        return _product(x, weight, bias, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        again = torch.is_grad_enabled()  # someone differentiates the gradients, too
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_x = of_weight = of_bias = wait = None
        with plain():
            x, weight = ctx.saved_tensors
            rows = grad.flatten(0, -2)
            if needs_x:
                of_x = rows @ _across(weight, ctx.transposed)
                if again:
                    of_x = reduce_from_region(of_x, ctx.group)
                else:
                    wait = ctx.group.start_all_reduce_(of_x)
                of_x = of_x.unflatten(0, grad.shape[:-1])
            if needs_weight:
                x = copy_to_region(x, ctx.group) if again else x
                of_weight = _of_weight(x, rows, ctx.transposed)
            if needs_bias:
                of_bias = rows.sum(0)
            if wait is not None:
                wait()
        return of_x, of_weight, of_bias, None, None


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
    ) -> Tensor:
        _keep(ctx, x, weight, transposed, group)
        rows, across = x.flatten(0, -2), _across(weight, transposed).t()
        own = x.new_empty((*x.shape[:-1], across.shape[1]))
        if bias is not None and group.rank == 0:
            torch.addmm(bias, rows, across, out=own.flatten(0, -2))
        else:
            torch.mm(rows, across, out=own.flatten(0, -2))
        return group.all_reduce_(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        with plain():
            x, weight = ctx.saved_tensors
            rows = grad.flatten(0, -2)
            if needs_bias:
                of_bias = rows.sum(0)
            if torch.is_grad_enabled():  # someone differentiates the gradients, too
                rows = copy_to_region(rows, ctx.group)
            if needs_x:
                of_x = (rows @ _across(weight, ctx.transposed)).unflatten(0, grad.shape[:-1])
            if needs_weight:
                of_weight = _of_weight(x, rows, ctx.transposed)
        return of_x, of_weight, of_bias, None, None


class _CopyEach(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: Group) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = [grad for grad in grads if grad is not None]
        if torch.is_grad_enabled() or len(found) == 1:
            total = found[0]
            for grad in found[1:]:
                total = total + grad
            return reduce_from_region(total, ctx.group), None, None
        total = torch.add(*found[:2])
        for grad in found[2:]:
            total += grad
        return ctx.group.all_reduce_(total.contiguous()), None, None


def _alone(x: Tensor) -> bool:
    """Whether a product is what it says: no compiler that sees through it, no cast of operands."""
    kind = x.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return not cast and not torch.compiler.is_compiling()


def _keep(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, group: Group) -> None:
    """Save what the backward of a product reads."""
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
    ctx.transposed, ctx.group = transposed, group


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if transposed:
        return x @ weight if bias is None else torch.addmm(bias, x, weight)
    return F.linear(x, weight, bias)


def _across(weight: Tensor, transposed: bool) -> Tensor:
    """The weight as [out, in]."""
    return weight.t() if transposed else weight


def _of_weight(x: Tensor, rows: Tensor, transposed: bool) -> Tensor:
    """The gradient of a weight, whose results' gradients are `rows` [n, out]."""
    given = x.flatten(0, -2)
    left, right = (given, rows) if transposed else (rows, given)
    return torch.mm(left.t(), right)
