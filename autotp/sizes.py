"""Sizes of tensor dims as monomials: an integer times symbols, so that `B*S*64` divides by `S*64`.

`torch.export` gives dynamic dims sympy expressions. A monomial is all that views need, and integer
arithmetic on tuples is much faster than sympy. A sum such as `S + 1` becomes one opaque symbol.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

Size: TypeAlias = tuple[int, tuple[str, ...]]

ONE: Size = (1, ())


def size_of(value: int | torch.SymInt) -> Size:
    """The monomial of one entry of a shape."""
    if isinstance(value, int):
        return (value, ())
    return _monomial(value.node.expr)


def shape_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """The monomials of a (fake) tensor's shape."""
    return tuple(size_of(value) for value in tensor.shape)


def multiply(a: Size, b: Size) -> Size:
    """The product of two sizes."""
    return (a[0] * b[0], tuple(sorted(a[1] + b[1])) if a[1] and b[1] else a[1] or b[1])


def divide(a: Size, b: Size) -> Size | None:
    """`a / b`, or None where `b` does not divide `a` for every value of the symbols."""
    if b[0] == 0 or a[0] % b[0]:
        return None
    rest = list(a[1])
    for symbol in b[1]:
        if symbol not in rest:
            return None
        rest.remove(symbol)
    return (a[0] // b[0], tuple(rest))


def common_ends(one: Sequence[Size], other: Sequence[Size]) -> tuple[int, int]:
    """How many first and how many last sizes two shapes have in common, not counting any twice."""
    shorter = min(len(one), len(other))
    first = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    rest = range(shorter - first)
    return first, next((i for i in rest if one[-1 - i] != other[-1 - i]), len(rest))


def text(size: Size) -> str:
    """`s0*64`, stable."""
    factors = [*size[1], *([str(size[0])] if size[0] != 1 or not size[1] else [])]
    return "*".join(factors)


@functools.lru_cache(maxsize=4096)
def _monomial(expr: Any) -> Size:
    if expr.is_Integer:
        return (int(expr), ())
    coefficient, symbols = 1, []
    for factor in expr.args if expr.is_Mul else (expr,):
        if factor.is_Integer:
            coefficient *= int(factor)
        elif factor.is_Pow and factor.exp.is_Integer and factor.exp > 0:
            symbols += [str(factor.base)] * int(factor.exp)
        else:
            symbols.append(str(factor))
    return (coefficient, tuple(sorted(symbols)))


def constant(size: int | torch.SymInt) -> int | None:
    """The value of a size that is the same for every batch and length; None if it is not."""
    if isinstance(size, int):
        return size
    expression = size.node.expr.expand()
    return int(expression) if expression.is_number else None
