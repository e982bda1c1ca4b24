"""Work on files that all ranks do together: it ends on every rank alike, within a time limit.

Ranks agree through the store before it begins and when it has ended (see agreement.py), so that a
rank that does not come is named. In between they talk in a process group of their own, over gloo
and with the same limit: what fails there leaves the model's group as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autotp.runtime.group import Group

PATIENCE = 300.0  # seconds: files are written in between


@contextmanager
def together(group: Group, what: str, value: str, timeout: float) -> Iterator[ProcessGroup | None]:
    """A process group for the block; None where one process has all ranks.

    `value` is what the ranks must agree on before. An error on one rank is one on all.
    """
    if group.process_group is None or group.size == 1:
        yield None
        return
    group.agree(what, value, timeout)
    peers = dist.new_group(
        dist.get_process_group_ranks(group.process_group),
        timeout=timedelta(seconds=timeout),
        backend="gloo",
        use_local_synchronization=True,
    )
    assert isinstance(peers, ProcessGroup)
    ended = f"the end of {what}"
    try:
        yield peers
    except Exception as error:  # of any kind: the peers must not wait for this rank
        _leave(peers)
        group.agree(ended, f"error: {type(error).__name__}: {error}", timeout)
        raise
    group.agree(ended, "done", timeout)
    _leave(peers)


def _leave(peers: ProcessGroup) -> None:
    """Close the connections, which wakes peers that wait in them."""
    peers.abort()
    dist.destroy_process_group(peers)


def send(part: Tensor, peers: ProcessGroup) -> None:
    """Send this rank's part to rank 0, which calls `receive`."""
    if part.numel():
        work = dist.isend(_bytes(part.detach().cpu()), group=peers, group_dst=0)
        assert work is not None
        work.wait()


def receive(part: Tensor, rank: int, peers: ProcessGroup) -> None:
    """On rank 0: fill a contiguous tensor on the CPU with a rank's part."""
    if part.numel():
        work = dist.irecv(_bytes(part), group=peers, group_src=rank)
        assert work is not None
        work.wait()


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor as bytes: every dtype goes through every backend then."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
