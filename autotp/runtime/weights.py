"""Shards of tensors: taken from whole ones, and put together again. Always copies, in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autotp.axes import Ranges
from autotp.runtime.collectives import place, take


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
