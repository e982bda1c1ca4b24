"""Whether all ranks were given the same inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from autotp.errors import GroupError, message
from autotp.runtime.group import Group


def same_inputs(group: Group, inputs: Mapping[Any, Any]) -> None:
    """Raise GroupError on every rank if the ranks were given different inputs. One exchange."""
    if group.size == 1:
        return
    every = group.all_gather_object({str(name): _summary(value) for name, value in inputs.items()})
    for name in {name: None for found in every for name in found}:
        found = [summaries.get(name, "none") for summaries in every]
        if len(set(found)) > 1:
            raise GroupError(
                message(
                    f"the ranks were given different {name.removeprefix('kwargs_')}",
                    values="; ".join(f"rank {r}: {text}" for r, text in enumerate(found[:8])),
                    because="the ranks of a tensor-parallel group compute one batch together",
                    try_="seed the data loader alike within a group, or broadcast the batch",
                )
            )


def _summary(leaf: Any) -> str:
    """Shape, dtype and a checksum of an input: equal for equal inputs."""
    if isinstance(leaf, (bool, int, float, str, type(None))):
        return repr(leaf)
    if not isinstance(leaf, torch.Tensor):  # objects' addresses differ
        return type(leaf).__name__
    data = leaf.detach().cpu().contiguous()
    digest = hashlib.sha256(data.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return f"{[*leaf.shape]} {str(leaf.dtype).removeprefix('torch.')} {digest}"
