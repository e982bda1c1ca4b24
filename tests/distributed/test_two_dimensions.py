"""Data parallelism around tensor parallelism, on four real ranks: training is that of one process
which sees the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autotp
from autotp.runtime.sharded import local
from tests.distributed.cases import assert_alike, tokens, whole_parameters
from tests.models import refill, tiny_gpt2
from tests.spawn import run

pytestmark = pytest.mark.dist
STEPS, BATCH, PARTS, CLIP = 12, 8, 2, 0.5  # PARTS micro batches are accumulated
Curve = list[tuple[float, float]]  # loss and gradient norm of each step


def model_of() -> Any:
    """Three heads of 8: two ranks hold two and one."""
    return refill(tiny_gpt2(n_head=3, n_embd=24)).train()


def curve(model: nn.Module, tp: Any = None, *, share: int = 0, of: int = 1) -> Curve:
    """AdamW with clipping on this share of every global batch; `tp` recomputes for half of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        if tp is not None and step in (0, STEPS // 2):
            (tp.gradient_checkpointing_disable if step else tp.gradient_checkpointing_enable)()
        mine = tokens(BATCH, 12, seed=step).chunk(of)[share]
        loss = torch.zeros(())
        for number, x in enumerate(mine.chunk(PARTS)):
            with quiet(model) if number < PARTS - 1 else nullcontext():
                part = model(input_ids=x, labels=x, use_cache=False).loss / PARTS
                part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if of > 1:  # of the global batch
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        found.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def quiet(model: Any) -> AbstractContextManager[None]:
    """No gradients are exchanged over the data-parallel ranks in this block."""
    if hasattr(model, "no_sync"):
        return model.no_sync()  # type: ignore[no-any-return]
    return deferred(model) if hasattr(model, "set_requires_gradient_sync") else nullcontext()


@contextmanager
def deferred(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def ddp(tp: Any, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(tp, process_group=mesh["dp"].get_group())


def fsdp(tp: Any, mesh: DeviceMesh) -> nn.Module:
    tp.as_dtensors(mesh["tp"])
    for block in tp.transformer.h:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(tp, mesh=mesh["dp"])


def on_ranks(rank: int, world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    share, seen = mesh["dp"].get_local_rank(), {"coordinate": tuple(mesh.get_coordinate() or ())}
    model = model_of()
    tp: Any = autotp.parallelize(model, mesh=mesh)
    seen["ddp"] = curve(ddp(tp, mesh), tp, share=share, of=2)
    seen["whole"] = whole_parameters(tp)
    seen["parts"] = {n: local(p).detach().clone() for n, p in tp.named_parameters()}
    tp.load_state_dict(model.state_dict())
    tp.zero_grad()
    seen["fsdp"] = curve(fsdp(tp, mesh), tp, share=share, of=2)
    seen["held"] = sum(p.to_local().numel() for p in tp.parameters())
    seen["planned"] = tp.plan.parameter_bytes(tp.rank) // 4
    seen["forms"] = [bool(c.plan.program().recomputed) for c in tp.captures if c.plan]
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run(on_ranks, 4, timeout=300)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_is_that_of_one_process(kind: str, ranks: list[dict[str, Any]]) -> None:
    wanted = curve(model_of())
    assert wanted[-1][0] < wanted[0][0], "it learns"
    assert min(norm for _, norm in wanted) > CLIP, "it clips"
    for seen in ranks:
        assert True in seen["forms"] and False in seen["forms"], "with recomputation and without"
        for step, (found, want) in enumerate(zip(seen[kind], wanted, strict=True)):
            assert found == pytest.approx(want, rel=1e-5), f"step {step}"


def test_ranks_that_hold_the_same_hold_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    assert [seen["coordinate"] for seen in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert_alike([seen["whole"] for seen in ranks])
    for one, other in ((0, 2), (1, 3)):  # the same shards, by data-parallel rank
        assert_alike([ranks[one]["parts"], ranks[other]["parts"]])


def test_fsdp_splits_each_shard_again(ranks: list[dict[str, Any]]) -> None:
    for one, other in ((0, 2), (1, 3)):
        assert ranks[one]["held"] + ranks[other]["held"] == ranks[one]["planned"]
        assert ranks[one]["held"] < 0.6 * ranks[one]["planned"]
