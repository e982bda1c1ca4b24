"""`autotp.save` and `autotp.load`: the state of a training run, for any number of ranks.

torch.distributed.checkpoint writes it, in the layout of whole tensors (see planners.py): saved on
two ranks, it is read on three. Parameters, the optimizer's state and the generators.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.optim import Optimizer

from autotp.checkpoint.folder import replaced
from autotp.checkpoint.names import listed, tied
from autotp.checkpoint.optimizer import Named
from autotp.checkpoint.planners import Held, Reader, Writer, stored_tensors, whole
from autotp.checkpoint.together import PATIENCE, Peers, together
from autotp.checkpoint.whole import members_of
from autotp.errors import AutoTPError, CheckpointError, message
from autotp.runtime.random import generators, set_generators

if TYPE_CHECKING:
    from autotp.runtime.module import TensorParallel

_STATE = "state"
_OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?")


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    timeout: float = PATIENCE,
) -> None:
    """Write the state of a training run to a directory, which is replaced as a whole at the end.

    Every rank must call it; each writes what it holds. `extra` is kept too: plain values (numbers,
    strings, lists, dicts) and tensors, such as the step and a scheduler's state; rank 0's counts.
    Raises on every rank if one fails, or does not come within `timeout` seconds: what was in the
    directory before is still there then.
    """
    members = members_of(model)
    first, where = members[0], Path(os.path.abspath(path))
    with together(first.group, f"saving {where.name}", f"to {where}", timeout) as peers:
        named = None if optimizer is None else Named(optimizer, members)
        held = [*_model(members), *_random(members), *(named.held() if named else ())]
        about = {"extra": extra, "optimizer": named.about() if named else None}
        with _errors("write", where), _directory(where, first.rank, peers) as folder:
            _write(folder, Writer(held, {_STATE: about}), first.rank, peers)


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    timeout: float = PATIENCE,
) -> Any:
    """Read what `save` wrote, on any number of ranks; returns `extra`.

    Every rank must call it, and reads what it holds. Names, shapes and dtypes are compared before
    anything is changed. Generators are set as they were: on a rank that was not there, as rank 0's.
    """
    members = members_of(model)
    first, where = members[0], Path(os.path.abspath(path))
    with together(first.group, f"loading {where.name}", f"from {where}", timeout):
        with _errors("read", where):
            stored = stored_tensors(FileSystemReader(where).read_metadata())
            about = _read(where, [], [_STATE])[_STATE]
        held = _model(members)
        _compare(held, stored, type(first.skeleton).__name__)
        named: Named | None = None
        state: dict[int, dict[str, Any]] = {}
        if optimizer is not None:
            named = Named(optimizer, members)
            named.check(about["optimizer"])
            state, further = named.blank(about["optimizer"], stored)
            held += further
        random = _random(members)
        saved = [_as_saved(one, stored) for one in random]
        with _errors("read", where):
            _read(where, [*held, *(one for one in saved if one is not None)], [])
        if named is not None:
            named.fill(about["optimizer"], state)
        for one, found in zip(random, saved, strict=True):
            if found is not None:
                _set_random(members, one.name, found.tensor)
    return about["extra"]


def _write(folder: Path, planner: Writer, rank: int, peers: Peers) -> None:
    """What torch.distributed.checkpoint.save does, through `peers`.

    It talks through registered process groups only, which wait for a lost rank as long as the
    training does.
    """
    writer = FileSystemWriter(folder)
    planner.set_up_planner({}, writer.storage_meta(), rank == 0)
    writer.set_up_storage_writer(rank == 0)
    every = peers.exchange(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planner.create_global_plan(every)  # each rank makes the same
    mine = planner.finish_plan(writer.prepare_global_plan(plans)[rank if len(plans) > 1 else 0])
    written = peers.exchange(writer.write_data(mine, planner).wait())
    if rank == 0:
        writer.finish(metadata, written)


def _read(path: Path, held: Sequence[Held], objects: Sequence[str]) -> dict[str, Any]:
    """What torch.distributed.checkpoint.load does, each rank for itself."""
    planner, reader = Reader(held, objects), FileSystemReader(path)
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return planner.objects


def _model(members: Sequence[TensorParallel]) -> list[Held]:
    """What `state_dict()` holds, tied tensors once."""
    found = []
    for member in members:
        local = member.state_dict(keep_vars=True)
        for name, names in tied(member.skeleton).items():
            shape = member.plan.by_name[name].shape
            ranges = member.plan.ranges(name, member.rank)
            found.append(Held(f"model.{name}", local[names[0]], shape, ranges))
    return found


def _compare(held: Sequence[Held], stored: Any, model: str) -> None:
    wanted = {one.name.removeprefix("model."): one for one in held}
    saved = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    different = []
    for name in sorted(wanted.keys() & saved):
        one, there = wanted[name], stored[f"model.{name}"]
        here = f"{one.tensor.dtype}{[*one.shape]}"
        found = f"{there.properties.dtype}{[*there.size]}"
        if here != found:
            different.append(f"{name} is {here}, saved {found}")
    faults = {
        "missing": sorted(wanted.keys() - saved),
        "superfluous": sorted(saved - wanted.keys()),
        "different": different,
    }
    if any(faults.values()):
        raise CheckpointError(
            message(
                f"the saved training state does not fit {model}",
                values=listed(faults),
                because="a run is resumed with the model that was saved",
                try_="the same class, configuration and dtype; any number of ranks",
            )
        )


def _random(members: Sequence[TensorParallel]) -> list[Held]:
    """This process's generators, which dropout draws from too."""
    first = members[0]
    states = generators(first.device).items()
    return [whole(f"random.{kind}.{first.rank}", state) for kind, state in states]


def _as_saved(one: Held, stored: Any) -> Held | None:
    """The saved state of a generator: that of rank 0 if this rank was not there."""
    for name in (one.name, re.sub(r"\d+$", "0", one.name)):
        if name in stored:
            return whole(name, torch.empty_like(one.tensor))
    return None


def _set_random(members: Sequence[TensorParallel], name: str, state: Tensor) -> None:
    set_generators(members[0].device, {name.split(".")[1]: state})


@contextmanager
def _directory(path: Path, rank: int, peers: Peers) -> Iterator[Path]:
    """The directory to write to, made by rank 0, which puts it in place at the end."""
    if rank == 0:
        with replaced(path, lambda name: _OURS.fullmatch(name) is not None) as folder:
            peers.exchange(folder)
            yield folder
        return
    folder = peers.exchange(None)[0]
    if not folder.is_dir():
        raise FileNotFoundError(f"rank {rank} does not see {folder}, which rank 0 has made")
    yield folder


@contextmanager
def _errors(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except AutoTPError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader stumbles over
        raise CheckpointError(
            message(
                f"cannot {verb} the training state {path}",
                values=f"{type(error).__name__}: {error}",
                because="the system refused, a file is damaged, or a rank was lost",
                try_="a directory that all ranks share, with room; or an earlier checkpoint",
            )
        ) from error
