"""A rank holds its shards, as many bytes as planned, and nothing keeps the model alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

import autotp
from examples.nanogpt import GPT, GPTConfig
from tests.models import refill, tiny_gpt2
from tests.spawn import run

SLACK = 4096  # bytes: position numbers, a seed, the example


def alive() -> Iterator[Tensor]:
    """Tensors with memory that Python knows."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and type(thing) is not FakeTensor:
            if thing.device.type != "meta":
                yield thing


def storages() -> dict[int, int]:
    """Bytes of every storage that is alive, by address."""
    gc.collect()
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in alive()
        if tensor.untyped_storage().nbytes()
    }


def measure(model: nn.Module, call: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """What is left after a model was split, the model deleted, and a training step done.

    The caller must hold no other reference to the model.
    """
    before = storages()
    tensors = [*model.parameters(), *model.buffers()]
    whole = sum(p.nbytes for p in model.parameters())
    gone = [weakref.ref(tensor) for tensor in (*tensors, model)]
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    others = sum(n for at, n in before.items() if at not in {t.data_ptr() for t in tensors})
    tp = autotp.parallelize(model, **kwargs)
    del model, tensors
    gc.collect()
    left = sum(ref() is not None for ref in gone) + sum(not ref.expired() for ref in memory)
    now = sum(storages().values()) - others
    shards = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in tp.parameters()}
    out = tp(**call)
    (out.loss if hasattr(out, "loss") else out[1]).backward()
    del out
    gradients = sum(p.grad.nbytes for p in tp.parameters() if p.grad is not None)
    return {
        "left": left,
        "whole": whole,
        "planned": tp.plan.parameter_bytes(tp.rank),
        "held": sum(p.nbytes for p in tp.parameters()),
        "in storages": sum(shards.values()),
        "alive": now,
        "buffers": sum(b.nbytes for b in tp.buffers()),
        "gradients": gradients,
        "trained": sum(storages().values()) - others,
    }


def ranks(rank: int, world: int) -> dict[str, Any]:
    x = torch.randint(257, (2, 6), generator=torch.Generator().manual_seed(0))
    models = [refill(tiny_gpt2(n_inner=130))]
    found = {"gpt2": measure(models.pop(), {"input_ids": x, "labels": x, "use_cache": False})}
    models = [refill(GPT(GPTConfig(layers=1)).bfloat16())]
    found["plain"] = measure(models.pop(), {"idx": x, "targets": x}, example_inputs=(x, x))
    return found


def check(found: dict[str, Any], tp: int) -> None:
    assert found["left"] == 0, "a whole parameter is alive"
    assert found["held"] == found["planned"] == found["in storages"]
    assert found["planned"] < found["whole"] * (1.3 / tp)
    assert found["alive"] <= found["held"] + found["buffers"] + SLACK
    assert found["gradients"] <= found["held"]
    assert found["trained"] <= found["alive"] + found["gradients"] + SLACK


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_holds_its_shards_and_nothing_else() -> None:
    every = run(ranks, 2, timeout=300)
    for found in every:
        check(found["gpt2"], 2)
        check(found["plain"], 2)
    assert every[0]["gpt2"]["whole"] == 4 * 60_020


def test_a_plan_tells_each_ranks_bytes() -> None:
    model = refill(GPT(GPTConfig(layers=1)).bfloat16())
    x = torch.zeros(2, 5, dtype=torch.long)
    lockstep = autotp.parallelize(model, devices=["cpu"] * 4, example_inputs=(x, x))
    for rank, part in enumerate(lockstep.ranks):
        held = sum(p.nbytes for p in part.parameters())
        assert held == sum(p.untyped_storage().nbytes() for p in part.parameters())
        assert held == lockstep.plan.parameter_bytes(rank)
    whole = sum(p.nbytes for p in model.parameters())
    alone = autotp.parallelize(model, tp=1, example_inputs=(x, x))
    assert alone.plan.parameter_bytes(0) == sum(p.nbytes for p in alone.parameters()) == whole
