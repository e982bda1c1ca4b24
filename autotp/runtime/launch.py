"""The process group that a user means: a given one, a dim of a mesh, or a part of the world."""

from __future__ import annotations

import os
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autotp.errors import GroupError, PlanError, message
from autotp.runtime.agreement import agree, listed

ARRIVAL = 600.0  # seconds that ranks may come apart: one may load its model longer
_asked = count()  # calls for a part of the world, the same number on every rank
_made: WeakKeyDictionary[ProcessGroup, dict[int, ProcessGroup]] = WeakKeyDictionary()


def process_group(
    tp: int | None, mesh: DeviceMesh | None, group: ProcessGroup | None
) -> ProcessGroup | None:
    """The process group that shares a model; None if this rank works alone.

    Given neither mesh nor group, the ranks of torch.distributed (started here, if torchrun has
    set the environment and nobody did) are cut into groups of `tp` consecutive ranks. Every rank of
    the world must then call this. These groups are made once for each default process group and tp.
    tp=1 needs no peers.

    Raises PlanError for sizes that do not fit, GroupError if processes are missing or disagree.
    """
    if tp is not None and (isinstance(tp, bool) or not isinstance(tp, int) or tp < 1):
        raise PlanError(
            message(
                f"cannot use tp={tp!r}",
                values=f"tp={tp!r}, of type {type(tp).__name__}",
                because="tp is the number of ranks that share the model",
                try_="a positive integer, or tp=None for all ranks",
            )
        )
    if mesh is not None and group is not None:
        raise PlanError(
            message(
                "both mesh and group are given",
                values=f"mesh {mesh}, group {group}",
                because="each of them says which ranks share the model",
                try_="leave one of them out",
            )
        )
    if mesh is not None:
        return _given("mesh", _of_mesh(mesh), tp)
    if group is not None:
        return _given("group", group, tp)
    return _of_world(tp) if tp != 1 and _started(tp) else None


def _of_mesh(mesh: DeviceMesh) -> Any:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "tp" not in names:
        raise PlanError(
            message(
                f"no dim of the mesh is called tp, and it has {mesh.ndim}",
                values=str(mesh),
                because="a model is shared along one dim of a mesh",
                try_='mesh_dim_names=("dp", "tp"), or a slice of one dim: mesh["name"]',
            )
        )
    if mesh.get_coordinate() is None:
        return None
    return mesh.get_group("tp" if "tp" in names else None)


def _given(kind: str, group: Any, tp: int | None) -> ProcessGroup:
    if not isinstance(group, ProcessGroup) or dist.get_rank(group) < 0:
        raise GroupError(
            message(
                f"this process is not in the {kind} that it was given",
                values=f"rank {dist.get_rank()} of {dist.get_world_size()}, {kind}={group}",
                because="only ranks of a group can work in it",
                try_="call parallelize on the ranks of the group alone",
            )
        )
    size = dist.get_world_size(group)
    if tp not in (None, size):
        raise PlanError(
            message(
                f"tp={tp}, but the {kind} has {size} rank{'s' if size > 1 else ''}",
                values=f"tp={tp}, {kind} size {size}",
                because=f"the {kind} says which ranks share the model, and how many",
                try_=f"leave tp out, or pass a {kind} of {tp}",
            )
        )
    return group


def _of_world(tp: int | None) -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    size = dist.get_world_size()
    tp = tp or size
    # Or the calls below would not meet. No collective: a rank with tp=1 does not come here.
    agree(world, f"autotp/tp/{next(_asked)}", "tp", f"tp={tp}", ARRIVAL)
    if size % tp:
        lower = size // tp * tp
        works = [n for n in range(1, size + 1) if size % n == 0]
        raise PlanError(
            message(
                f"cannot place tp groups of {tp} on {size} rank{'s' if size > 1 else ''}",
                values=f"world size {size}, tp={tp}",
                because=f"{size} is not a multiple of {tp}: {size - lower} would have no group",
                try_=f"tp={listed(works, 'or')}, or start "
                f"{listed([n for n in (lower, lower + tp) if n], 'or')} processes",
            )
        )
    made = _made.setdefault(world, {size: world})
    if tp not in made:
        for start in range(0, size, tp):  # every rank makes every group, in this order
            ranks = list(range(start, start + tp))
            found = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                made[tp] = found
    return made[tp]


def _started(tp: int | None) -> bool:
    """Whether torch.distributed runs; it is started if a launcher has prepared that."""
    if dist.is_initialized():
        return True
    env = os.environ
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        if tp is None:
            return False
        raise GroupError(
            message(
                f"tp={tp} needs {tp} processes, and this is one alone",
                values="torch.distributed is not initialized, RANK and WORLD_SIZE are not set",
                because="each rank is a process of its own",
                try_=f"torchrun --nproc-per-node {tp} your_script.py",
            )
        )
    local = int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if dist.is_nccl_available() and local <= gpus:
        torch.cuda.set_device(int(env.get("LOCAL_RANK", env["RANK"])) % gpus)
        dist.init_process_group("cpu:gloo,cuda:nccl")  # gloo too: models may stay on the CPU
    else:
        dist.init_process_group("gloo")  # NCCL takes one GPU for each rank
    return True
