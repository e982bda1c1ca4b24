"""A rank is killed: its peers end with an error, and training goes on from the last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import autotp
from tests.distributed.cases import tokens
from tests.models import refill, tiny_gpt2
from tests.spawn import SpawnError, run

pytestmark = pytest.mark.dist
STEPS, SAVED, KILLED = 8, 3, 5  # of the run, before the checkpoint, before the kill
LIMIT = 4.0  # seconds that a lost rank is waited for


def model_of() -> Any:
    """Three heads of 8: two ranks hold two and one."""
    return refill(tiny_gpt2(n_head=3, n_embd=24)).train()


def step(model: Any, optimizer: Any, number: int) -> float:
    x = tokens(4, 12, seed=number)
    loss = model(input_ids=x, labels=x, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # type: ignore[no-any-return]


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def die(*args: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def dies(rank: int, world: int, folder: Path, when: str) -> None:
    """Rank 1 is killed in the backward of a step, or when it has written a part of a checkpoint."""
    from torch.distributed.checkpoint import FileSystemWriter

    tp: Any = autotp.parallelize(model_of())
    optimizer = adam(tp)
    losses = [step(tp, optimizer, number) for number in range(SAVED)]
    autotp.save(folder / "last", tp, optimizer, extra={"losses": losses})
    losses += [step(tp, optimizer, number) for number in range(SAVED, KILLED)]
    if rank == 1 and when == "step":  # between the all-reduces of the two blocks' backward
        tp.transformer.h[1].register_full_backward_hook(die)
    if rank == 1 and when == "save":
        write = FileSystemWriter.write_data

        def written(*args: Any) -> Any:
            write(*args).wait()
            die()

        FileSystemWriter.write_data = written  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        if when == "save":
            autotp.save(folder / "last", tp, optimizer, extra={"losses": losses}, timeout=LIMIT)
        step(tp, optimizer, KILLED)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - begun}
        (folder / f"found{rank}").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    """The losses of the unsharded model, which nobody kills."""
    model = model_of()
    optimizer = adam(model)
    return [step(model, optimizer, number) for number in range(STEPS)]


@pytest.mark.parametrize("when", ["step", "save"])
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    when: str, tmp_path: Path, wanted: list[float]
) -> None:
    with pytest.raises((SpawnError, FileNotFoundError), match="1"):
        run(dies, 3, tmp_path, when, timeout=100)
    for rank in (0, 2):
        found = json.loads((tmp_path / f"found{rank}").read_text())
        assert found["seconds"] < 3 * LIMIT, found
        if when == "save":
            assert "GroupError: rank 1 did not come to compare the end of saving" in found["error"]
    assert not (tmp_path / "found1").exists()
    tp: Any = autotp.parallelize(refill(model_of(), 9), devices=["cpu"])
    optimizer = adam(tp)
    losses = autotp.load(tmp_path / "last", tp, optimizer)["losses"]
    assert len(losses) == SAVED
    losses += [step(tp, optimizer, number) for number in range(SAVED, STEPS)]
    assert losses == pytest.approx(wanted, rel=1e-5)
