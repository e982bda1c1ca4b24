"""DDP takes all its ranks for copies of one model: not those that hold different shards.

    DistributedDataParallel(tp_model)                                                refused
    DistributedDataParallel(tp_model, process_group=mesh["dp"].get_group())          right

Else it would overwrite every rank's shards with rank 0's, in silence where they have the same
shapes. torch calls a hook when a module becomes part of another, before DDP has sent anything.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from autotp.errors import GroupError, message
from autotp.runtime.block import Block
from autotp.runtime.group import Group

_hooks: list[Any] = []


def watch() -> None:
    """Look at every module that is given to DDP from now on."""
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_check))


def _check(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if not isinstance(parent, DistributedDataParallel) or child is None:
        return
    copies = set(dist.get_process_group_ranks(parent.process_group))
    for module in child.modules():
        group: Group | None = module._tp_group if isinstance(module, Block) else None
        if group is None or group.process_group is None:
            continue
        shared = copies.intersection(dist.get_process_group_ranks(group.process_group))
        if len(shared) > 1:
            raise GroupError(
                message(
                    "DistributedDataParallel over ranks that share the model",
                    values=f"ranks {sorted(shared)} hold different shards",
                    because="it would give all of them the first one's",
                    try_='process_group=mesh["dp"].get_group() of a (dp, tp) mesh; '
                    "under accelerate, autotp.trainer.Accelerator",
                )
            )
