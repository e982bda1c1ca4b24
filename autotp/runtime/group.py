"""Group: the ranks that share one model, and what they say to each other.

Collectives are out of place, unless told otherwise, and take tensors of any strides. A group of one
rank issues none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autotp.errors import GroupError, message
from autotp.runtime.agreement import agree, prefixed_store
from autotp.runtime.launch import process_group
from autotp.runtime.modes import watched

_PATIENCE = 1800.0  # seconds; as long as torch.distributed waits for a peer
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 gave it a new name
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """The ranks of a process group; without one, a rank that works alone.

    All ranks make it at the same time.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.process_group = process_group
        self._agreements = 0
        self._hosts: Any = None  # torch's stubs leave out what all backends have
        self._name = self.broadcast_object(secrets.token_hex(8))

    @classmethod
    def in_process(cls, size: int) -> list[Group]:
        """All ranks of one process, for runs in lockstep: same seeds, and no collectives."""
        ranks = [cls() for _ in range(size)]
        for rank, group in enumerate(ranks):
            group.rank, group.size = rank, size
        return ranks

    def all_reduce(self, x: Tensor, op: str = "sum", own: bool = False) -> Tensor:
        """The sum or maximum ("max") over the ranks, in new memory. Not differentiable; g is.

        `own` says that nothing else reads x: its memory may take the sum.
        """
        if self.size == 1:
            return x
        seen = watched()
        if seen or not own or not x.is_contiguous():
            # A copy: x may be expanded or transposed, or saved for someone's backward.
            x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, op=_REDUCTIONS[op], group=self._peers)
        # Whoever keeps copies would keep one that is summed where it lies: it gets one of the sum.
        return x.clone() if seen else x

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin the sum of a value that nothing else reads. What is returned waits for it."""
        if x.device.type == "cpu" or watched():  # gloo's threads need the cores that compute
            total = self.all_reduce(x, own=True)
            return lambda: total
        work = dist.all_reduce(x, group=self._peers, async_op=True)

        def wait() -> Tensor:
            assert work is not None
            work.wait()
            return x

        return wait

    def all_gather(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Every rank's tensor; `shapes` are those of each rank. Not differentiable.

        Backends gather equal parts only, so all are padded to the largest. The results are views
        of one buffer.
        """
        assert tuple(x.shape) == tuple(shapes[self.rank]), f"{tuple(x.shape)} in {shapes}"
        if self.size == 1:
            return [x]
        counts = [prod(shape) for shape in shapes]
        if x.dim() and x.numel() and len({*map(tuple, shapes)}) == 1:
            # in the form in which Inductor's async tensor parallelism finds it
            whole = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
            _all_gather(whole, x.detach().contiguous(), group=self._peers)
            return list(whole.split(x.shape[0]))
        width = max(counts)
        mine = x.detach().reshape(-1)
        if mine.numel() < width:
            mine = torch.cat([mine, mine.new_zeros(width - mine.numel())])
        buffer = mine.new_empty(self.size * width)
        rows = buffer.view(self.size, width)
        if width:
            dist.all_gather(list(rows.unbind(0)), mine.contiguous(), group=self._peers)
        return [rows[r, :n].view(tuple(shapes[r])) for r, n in enumerate(counts)]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over the ranks of the part that is for this rank. Not differentiable.

        Backends scatter equal parts only, so all are padded to the largest.
        """
        mine, width = parts[self.rank], max(part.numel() for part in parts)
        if self.size == 1 or not width:
            return mine
        if mine.dim() and len({part.shape for part in parts}) == 1:
            out = mine.new_empty(mine.shape)
            _reduce_scatter(out, torch.cat([*parts]).detach(), group=self._peers)
            return out
        buffer = mine.new_zeros(self.size, width)
        for row, part in zip(buffer, parts, strict=True):
            row[: part.numel()] = part.detach().reshape(-1)
        out = mine.new_empty(width)
        _reduce_scatter(out, buffer.view(-1), group=self._peers)
        return out[: mine.numel()].view(mine.shape)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """The object of the group's rank `src` (not of the world's)."""
        if self.size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, group=self._peers, group_src=src)
        return box[0]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object."""
        if self.size == 1:
            return [obj]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, obj, group=self._peers)
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self._peers)

    def first_of(self, number: int) -> int:
        """The first rank's number, of 63 bits. It goes over the hosts' network: devices go on."""
        if self.size == 1:
            return number
        box = torch.tensor([number])
        if dist.get_backend(self._peers) == "gloo":
            dist.broadcast(box, group=self._peers, group_src=0)
        else:
            if self._hosts is None:
                self._hosts = self.side_channel(_PATIENCE)
            self._hosts.broadcast(box, 0).wait()
        return int(box)

    def agree(self, what: str, value: str, timeout: float = 30.0) -> None:
        """Raise the same GroupError on every rank if not all give this value in `timeout` seconds.

        It issues no collective (see agreement.py), so the group stays usable after an error.
        """
        if self.size == 1:
            return
        self._agreements += 1
        agree(self._peers, f"autotp/{self._name}/{self._agreements}", what, value, timeout)

    def side_channel(self, timeout: float) -> dist.ProcessGroupGloo:
        """A further connection of the ranks, over gloo, with a time limit of its own.

        All ranks make it at the same time. What fails in it leaves the group usable. It is not
        registered with torch.distributed, whose names for groups can come again.
        """
        self._agreements += 1
        key = f"autotp/{self._name}/{self._agreements}"
        limit = timedelta(seconds=timeout)
        return dist.ProcessGroupGloo(prefixed_store(key), self.rank, self.size, limit)

    @property
    def _peers(self) -> ProcessGroup:
        # None would mean the whole world to torch.
        assert self.process_group is not None, "ranks of one process run in lockstep instead"
        return self.process_group

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copied module talks to the same peers

    def __reduce__(self) -> NoReturn:
        raise GroupError(
            message(
                "a tensor-parallel group cannot be pickled",
                values=repr(self),
                because="it is a connection between running processes",
                try_="save state_dict() instead of the module",
            )
        )

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size})"


def resolve_group(tp: int | None, mesh: DeviceMesh | None, group: ProcessGroup | None) -> Group:
    """The group that a user means by `tp`, `mesh` or `group`; see `launch.process_group`."""
    return Group(process_group(tp, mesh, group))
