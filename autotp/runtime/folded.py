"""f and g together with a neighbour, so that no copy is made for the all-reduce.

    column_product        f and the product that reads it
    row_product           a product, g of it, and the bias that is added
    copy_each_to_region   f for several readers

An all-reduce overwrites its operand. Alone, f and g must copy it first: hooks may keep the gradient
that f sums, others may read g's summand. Here the memory is the function's own. `column_product`
also has the sum under way while it computes the weight's gradient, as Megatron-LM's
`ColumnParallelLinear` does.

Products are of `x` [..., in] and `weight` [out, in], or [in, out] if `transposed`, with `bias`
[out] or None.
"""

from __future__ import annotations

import functools
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
            return _by_rows(_Column, x, weight, bias, transposed, group)
        x = copy_to_region(x, group)
    return _product(x, weight, bias, transposed)


def row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
) -> Tensor:
    """g of the product, and the bias: inputs are split, results are the same on every rank."""
    if group.size == 1:
        return _product(x, weight, bias, transposed)
    if _alone(x):
        return _by_rows(_Row, x, weight, bias, transposed, group)
    total = reduce_from_region(_product(x, weight, None, transposed), group)
    return total if bias is None else total + bias


def copy_each_to_region(x: Tensor, count: int, group: Group) -> tuple[Tensor, ...]:
    """f for `count` readers, one value for each."""
    if group.size == 1 or not torch.is_grad_enabled():
        return (x,) * count
    return _CopyEach.apply(x, count, group)  # type: ignore[no-any-return]


def _by_rows(function: type[Function], x: Tensor, *rest: Any) -> Tensor:
    """What a function of rows makes of x. Views are made out here: nothing may write to a view that
    a Function returns."""
    result = function.apply(x.flatten(0, -2), *rest)
    assert isinstance(result, Tensor)
    return result if x.dim() == 2 else result.unflatten(0, x.shape[:-1])


class _Column(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
    ) -> Tensor:
        _keep(ctx, rows, weight, transposed, group)
        return _product(rows, weight, bias, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        again = torch.is_grad_enabled()  # someone differentiates the gradients, too
        needs_rows, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_rows = of_weight = of_bias = wait = None
        with plain():
            rows, weight = ctx.saved_tensors
            if needs_rows:
                of_rows = _of_rows(grad, weight, ctx.transposed)
                if again:
                    of_rows = reduce_from_region(of_rows, ctx.group)
                else:
                    wait = ctx.group.start_all_reduce(of_rows)
            if needs_weight:
                rows = copy_to_region(rows, ctx.group) if again else rows
                of_weight = _of_weight(grad, rows, ctx.transposed)
            if needs_bias:
                of_bias = grad.sum(0)
            if wait is not None:
                of_rows = wait()
        return of_rows, of_weight, of_bias, None, None


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
    ) -> Tensor:
        _keep(ctx, rows, weight, transposed, group)
        own = _product(rows, weight, bias if group.rank == 0 else None, transposed)
        return group.all_reduce(own, own=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs_rows, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_rows = of_weight = None
        with plain():
            rows, weight = ctx.saved_tensors
            of_bias = grad.sum(0) if needs_bias else None
            if torch.is_grad_enabled():  # someone differentiates the gradients, too
                grad = copy_to_region(grad, ctx.group)
            if needs_rows:
                of_rows = _of_rows(grad, weight, ctx.transposed)
            if needs_weight:
                of_weight = _of_weight(grad, rows, ctx.transposed)
        return of_rows, of_weight, of_bias, None, None


class _CopyEach(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: Group) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = [grad for grad in grads if grad is not None]
        if not found:
            return None, None, None
        total = functools.reduce(torch.add, found)
        if len(found) > 1 and not torch.is_grad_enabled():
            return ctx.group.all_reduce(total, own=True), None, None
        return reduce_from_region(total, ctx.group), None, None


def _alone(x: Tensor) -> bool:
    """Whether a product is what it says: no compiler that sees through it, no cast of operands."""
    kind = x.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return not cast and not torch.compiler.is_compiling()


def _keep(ctx: Any, rows: Tensor, weight: Tensor, transposed: bool, group: Group) -> None:
    """Save what the backward of a product reads."""
    needs_rows, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
    ctx.transposed, ctx.group = transposed, group


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if transposed:
        return x @ weight if bias is None else torch.addmm(bias, x, weight)
    return F.linear(x, weight, bias)


def _of_rows(grad: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """The gradient of a product's rows, from that of its results."""
    return grad @ (weight.t() if transposed else weight).conj()


def _of_weight(grad: Tensor, rows: Tensor, transposed: bool) -> Tensor:
    """The gradient of a product's weight, from that of its results."""
    return rows.t().conj() @ grad if transposed else grad.t() @ rows.conj()
