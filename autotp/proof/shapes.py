"""Local shapes, by running operators on meta tensors of the rank's sizes.

So every size literal of a graph is tried: of views, splits, slices, repeats, new tensors. Layers
that are alike share results. Dtypes play no part, so autocast does not disturb.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from autotp.proof.values import Value

Shape = tuple[int | None, ...]


class Meta(NamedTuple):
    """A tensor without values, as a key."""

    shape: Shape
    dtype: torch.dtype


class Unknown(Exception):
    """A size that depends on data."""


def example(size: Any) -> int | None:
    """The example's size of a dim; None if it depends on data."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


def outcome(
    target: Any, args: Any, kwargs: Mapping[str, Any], values: Mapping[Node, Any]
) -> list[Shape] | None:
    """Shapes of an operator's results; None if they cannot be known without data.

    Raises RuntimeError (or another error of the operator) if it does not take operands of this
    size.
    """
    try:
        given = (_encoded(args, values), _encoded(sorted(kwargs.items()), values))
        return _run(target, *given)
    except (NotImplementedError, Unknown):
        return None


@functools.lru_cache(maxsize=4096)
def _run(target: Any, args: Any, kwargs: Any) -> list[Shape]:
    with torch.no_grad():
        named = {key: _decoded(value) for key, value in kwargs}
        if "device" in named:
            named["device"] = torch.device("meta")
        found = target(*(_decoded(arg) for arg in args), **named)
    several = found if isinstance(found, (list, tuple)) else (found,)
    return [tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in several]


def _encoded(item: Any, values: Mapping[Node, Any]) -> Any:
    if isinstance(item, Node):
        item = values[item]
        if item is None:
            raise Unknown
    if isinstance(item, Value):
        if None in item.shape:
            raise Unknown
        return Meta(item.shape, _kind(item.dtype))
    if isinstance(item, (list, tuple)):
        return tuple([_encoded(part, values) for part in item])
    return item


def _decoded(item: Any) -> Any:
    if isinstance(item, Meta):
        return torch.empty(item.shape, dtype=item.dtype, device="meta")  # type: ignore[arg-type]
    return [_decoded(part) for part in item] if isinstance(item, tuple) else item


@functools.cache
def _kind(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float32
    if dtype.is_complex:
        return torch.complex64
    return torch.bool if dtype is torch.bool else torch.int64
