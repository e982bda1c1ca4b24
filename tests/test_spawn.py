"""A rank that raises, dies or hangs fails the run, in time and with its output."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest
import torch

from tests.spawn import SpawnError, run


@dataclass(frozen=True)
class Result:
    """A class of this file, whose pickles name it."""

    total: torch.Tensor


def add(rank: int, world: int, offset: Result) -> Result:
    total = offset.total + rank
    torch.distributed.all_reduce(total)
    return Result(total)


def misbehave(rank: int, world: int, how: str) -> None:
    print(f"this is rank {rank}", flush=True)
    if rank == 1:
        if how == "raise":
            raise ValueError("as told")
        if how == "die":
            os._exit(3)
    time.sleep(100)


@pytest.mark.dist
def test_results_come_by_rank() -> None:
    found = run(add, 2, Result(torch.tensor(10)))
    assert [result.total.item() for result in found] == [21, 21]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "timeout", "texts"),
    [
        ("raise", 90, ["failed first: [1]; still running when killed: [0]", "ValueError: as told"]),
        ("die", 90, ["failed first: [1]; still running when killed: [0]", "this is rank 1"]),
        ("hang", 30, ["out of time: [0, 1]", "in misbehave"]),
    ],
)
def test_a_fault_is_a_failure(how: str, timeout: float, texts: list[str]) -> None:
    begun = time.monotonic()
    with pytest.raises(SpawnError) as error:
        run(misbehave, 2, how, timeout=timeout, start=False)
    assert time.monotonic() - begun < 50
    for text in texts:
        assert text in str(error.value)
