"""Generation: the original's own `generate`, over caches that hold each rank's heads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import autotp
from autotp.errors import AutoTPError, CaptureError
from tests.oneprocess import refill

TOKENS: dict[str, Any] = {
    "vocab_size": 257,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
KINDS = {
    "fused": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=6, n_embd=24, n_positions=64, **TOKENS)
    ),
    "grouped": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            **TOKENS,
        )
    ),
}


@functools.cache
def both(kind: str) -> tuple[Any, Any]:
    model = refill(KINDS[kind]()).eval()
    return model, autotp.parallelize(model, devices=["cpu"] * 3)


def prompt() -> dict[str, torch.Tensor]:
    """Two prompts, the first padded at the left."""
    tokens = torch.randint(2, 257, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3], tokens[0, :3] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_has_the_logits_of_the_original(kind: str) -> None:
    model, lockstep = both(kind)
    tokens = prompt()["input_ids"][1:].repeat(2, 1)
    with torch.no_grad():
        want, have = model(tokens), lockstep(tokens)
        captures = 0
        for step in range(8):
            assert (want.logits - have.logits).abs().max() < 1e-5
            captures = captures or (len(lockstep.ranks[0].captures) if step else 0)
            following = want.logits[:, -1:].argmax(-1)
            want = model(following, past_key_values=want.past_key_values)
            have = lockstep(following, past_key_values=have.past_key_values)
    assert len(lockstep.ranks[0].captures) == captures  # none for a longer cache


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": False, "num_beams": 3}])
def test_generate_gives_the_tokens_of_the_original(kind: str, how: dict[str, Any]) -> None:
    model, lockstep = both(kind)
    want = model.generate(**prompt(), max_new_tokens=16, **how)
    assert torch.equal(lockstep.generate(**prompt(), max_new_tokens=16, **how), want)


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_caches_its_own_heads(kind: str) -> None:
    model, lockstep = both(kind)
    with torch.no_grad():
        whole = model(prompt()["input_ids"]).past_key_values
        lockstep(prompt()["input_ids"])
    heads = whole.layers[0].keys.shape[1]
    capture = next(
        c for c in lockstep.ranks[0].captures if any(w.cache for w in c.outputs.values())
    )
    for where in capture.outputs.values():
        if where.cache:
            held = [sum(stop - start for start, stop in ranges) for ranges in where.ranges]
            assert where.dim == 1 and sum(held) == heads and max(held) == -(-heads // 3)


def test_the_callers_cache_object_is_filled_as_by_the_original() -> None:
    from transformers import DynamicCache

    model, lockstep = both("fused")
    cache, given = DynamicCache(config=model.config), prompt()["input_ids"]
    with torch.no_grad():
        out = lockstep(given, past_key_values=cache)
    assert out.past_key_values is cache and cache.get_seq_length() == given.shape[1]


def test_a_cache_of_another_model_is_refused() -> None:
    model, _ = both("fused")
    rank = autotp.parallelize(model, tp=1)
    with torch.no_grad():
        foreign = model(prompt()["input_ids"]).past_key_values
        with pytest.raises(AutoTPError, match="was not made by this model"):
            rank(prompt()["input_ids"][:, :1], past_key_values=foreign)


def test_a_sliding_window_cache_is_refused_not_wrong() -> None:
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        **TOKENS,
    )
    lockstep = autotp.parallelize(refill(MistralForCausalLM(config)).eval(), devices=["cpu"] * 2)
    with pytest.raises(CaptureError):
        lockstep.generate(**prompt(), max_new_tokens=4, do_sample=False)
