"""Shards of tensors: taken from whole ones, and put together again. Always copies, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autotp.axes import Ranges
from autotp.errors import GroupError, message
from autotp.runtime.collectives import place, take
from autotp.runtime.group import Group


def shard(whole: torch.Tensor, ranges: Sequence[Ranges]) -> torch.Tensor:
    """The rank's part of a tensor: for each dim the positions that it holds.

    A copy of its own, so that the whole tensor can be freed.
    """
    part = whole
    for dim, held in enumerate(ranges):
        if held != ((0, whole.shape[dim]),):
            part = take(part, dim, held)
    return part.detach().clone(memory_format=torch.contiguous_format)


def unshard(parts: Sequence[torch.Tensor], ranges: Sequence[Sequence[Ranges]]) -> torch.Tensor:
    """The inverse: `ranges[rank][dim]` are the positions that each rank's part holds."""
    for dim in range(parts[0].dim()):
        held = [rank[dim] for rank in ranges]
        if len(set(held)) > 1:
            return place(list(parts), dim, held)
    return parts[0]


def same_weights(tensors: Iterable[tuple[str, torch.Tensor]], ranks: Group) -> None:
    """Ranks that initialised their models with different seeds would train on a patchwork."""
    if ranks.size == 1:
        return
    sums = {
        name: repr(float(tensor.detach().sum(dtype=torch.float64)))
        for name, tensor in tensors
        if not tensor.is_meta and tensor.numel() and not tensor.is_complex()
    }
    every = ranks.all_gather_object(sums)
    for name in {name: None for other in every for name in other}:  # one may be on meta
        found = [other.get(name, "none") for other in every]
        if len(set(found)) > 1:
            raise GroupError(
                message(
                    "the ranks have different weights",
                    values=f"{name}: sums {', '.join(found[:8])} on ranks 0 to {len(found) - 1}",
                    because="each rank takes its shards from its own copy of the model",
                    try_="torch.manual_seed(0) before the model is made, or load one checkpoint",
                )
            )
