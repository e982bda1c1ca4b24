"""Caches hold a rank's heads: whole ones are taken apart, and made whole in shape for a capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autotp import pytree
from autotp.caches import Packed, is_cache, pack
from autotp.errors import AutoTPError, message
from autotp.runtime.calls import Call
from autotp.runtime.collectives import take
from autotp.runtime.outputs import LocalOutput

Layout = Mapping[str, LocalOutput]  # how the tensors of caches are split, by path in the cache


def whole_caches(layout: Layout, args: Any, kwargs: Any) -> Any:
    """(args, kwargs) with caches as data on meta, at the size they have with all heads."""

    def whole(cache: Any) -> Packed:
        packed = pack(cache)
        places = [layout.get(path) for path in packed.form.paths]
        leaves = tuple(map(_resized, packed.leaves, places))
        return Packed(leaves, packed.form, tuple(None if p is None else p.dim for p in places))

    return pytree.map_some(is_cache, whole, (args, kwargs))


def own_heads(call: Call, layout: Layout, rank: int) -> None:
    """Take the rank's part of whole caches; those that the model returned hold it already."""
    for index, path in call.places:
        where, leaf = layout.get(path), call.leaves[index]
        if where is None:
            continue
        size, mine = leaf.shape[where.dim], where.local_size(rank)
        if size == mine:
            continue
        if size != where.size:
            raise AutoTPError(
                message(
                    "this cache was not made for this model",
                    values=f"{path} has {size} heads, rank {rank} of {len(where.ranges)} has "
                    f"{mine} of {where.size}",
                    because="a cache holds this rank's heads, or those of the whole model",
                    try_="start with an empty cache, and pass on what the model returned",
                )
            )
        call.leaves[index] = take(leaf, where.dim, where.ranges[rank])


def _resized(leaf: Any, where: LocalOutput | None) -> Any:
    """A tensor on meta with all heads, if it has this rank's."""
    if where is None:
        return leaf
    sizes = [where.size if i == where.dim else n for i, n in enumerate(leaf.shape)]
    return torch.empty(sizes, dtype=leaf.dtype, device="meta")
