"""Work on files that all ranks do together: it ends on every rank alike, within a time limit.

Ranks agree through the store before it begins and when it has ended (see agreement.py), so that a
rank that does not come is named. In between they talk through a channel of their own, with the same
limit: what fails there leaves the model's process group as it was.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.runtime.group import Group

PATIENCE = 300.0  # seconds: files are written in between
_TAG = 0


class Peers:
    """The ranks that work together; without a channel, one process that has all of them."""

    def __init__(self, channel: dist.ProcessGroupGloo | None) -> None:
        self._channel: Any = channel  # torch's stubs leave out what all backends have

    def send(self, part: Tensor) -> None:
        """Send a tensor to rank 0, which calls `receive`."""
        assert self._channel is not None
        if part.numel():
            self._channel.send([_bytes(part.detach().cpu())], 0, _TAG).wait()

    def receive(self, part: Tensor, rank: int) -> None:
        """On rank 0: fill a contiguous tensor on the CPU with what a rank sends."""
        assert self._channel is not None
        if part.numel():
            self._channel.recv([_bytes(part)], rank, _TAG).wait()

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self._channel is None:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather(torch.tensor([data.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        every = zip(self._gather(padded), sizes, strict=True)
        return [pickle.loads(found[:size].numpy().tobytes()) for found, size in every]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        assert self._channel is not None
        found = [torch.empty_like(tensor) for _ in range(self._channel.size())]
        self._channel.allgather([found], [tensor]).wait()
        return found

    def leave(self) -> None:
        """Close the connections, which wakes peers that wait in them."""
        if self._channel is not None:
            self._channel.abort()
        self._channel = None


@contextmanager
def together(group: Group, what: str, value: str, timeout: float) -> Iterator[Peers]:
    """Run the block on all ranks: an error on one rank is one on all.

    `value` is what the ranks must agree on before.
    """
    if group.process_group is None or group.size == 1:
        yield Peers(None)
        return
    group.agree(what, value, timeout)
    ended, peers = f"the end of {what}", Peers(group.side_channel(timeout))
    try:
        yield peers
    except Exception as error:  # of any kind: the peers must not wait for this rank
        peers.leave()
        group.agree(ended, f"error: {type(error).__name__}: {error}", timeout)
        raise
    group.agree(ended, "done", timeout)
    peers.leave()


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor as bytes: every dtype goes through every backend then."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
