"""All ranks of one process compute what ranks in processes of their own compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.runtime.sharded import local
from tests.models import refill
from tests.spawn import run


def model_and_call() -> tuple[nn.Module, dict[str, Any]]:
    """A two-layer decoder with tied embeddings, and a batch with targets."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=5, n_embd=20, n_positions=32, vocab_size=97)
    config.update({"bos_token_id": 0, "eos_token_id": 0, "use_cache": False})
    model = refill(GPT2LMHeadModel(config)).eval()
    tokens = torch.randint(97, (2, 7), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def on_a_rank(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Loss and this rank's gradients."""
    model, call = model_and_call()
    tp = autotp.parallelize(model, tp=world)
    loss = tp(**call).loss
    loss.backward()
    grads = {name: p.grad for name, p in tp.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_one_process_and_several_agree(world: int) -> None:
    real = run(on_a_rank, world)
    model, call = model_and_call()
    lockstep = autotp.parallelize(model, devices=["cpu"] * world)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each rank has: products of other shapes are summed alike
    try:
        loss = lockstep(**call).loss
        loss.backward()
    finally:
        torch.set_num_threads(threads)
    for rank, found in zip(lockstep.ranks, real, strict=True):
        named = {"loss": loss.detach()} | {n: local(p.grad) for n, p in rank.named_parameters()}
        assert set(named) >= set(found)
        for name, tensor in found.items():
            if world == 2:  # one sum of two numbers: there is one order
                assert torch.equal(named[name], tensor), name
            else:
                scale = float(tensor.abs().max()) or 1.0
                assert float((named[name] - tensor).abs().max()) <= 1e-6 * scale, name


def test_devices_and_tp_must_agree() -> None:
    model, _ = model_and_call()
    with pytest.raises(ValueError, match="cannot put tp=3 ranks on 2 devices"):
        autotp.parallelize(model, tp=3, devices=["cpu"] * 2)
