"""Generation: the original's own `generate`, over caches that hold each rank's heads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import autotp
from autotp.errors import AutoTPError
from tests.generating import HEADS, KINDS, assert_same_text, generator, prompt, written

RANKS = 4


@functools.cache
def both(kind: str) -> tuple[Any, Any]:
    model = generator(kind)
    return model, autotp.parallelize(model, devices=["cpu"] * RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_generate_writes_the_text_of_the_original(kind: str) -> None:
    model, lockstep = both(kind)
    assert_same_text(written(lockstep), written(model))
    captures = len(lockstep.ranks[0].captures)
    beams, wanted = (written(m, num_beams=3, min_new_tokens=0) for m in (lockstep, model))
    assert torch.equal(beams.sequences, wanted.sequences)
    written(lockstep, max_new_tokens=40, min_new_tokens=40)
    assert len(lockstep.ranks[0].captures) == captures  # for no longer text, nor other batch


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "window"])
def test_a_static_cache_serves(kind: str) -> None:
    model, lockstep = both(kind)
    how = {"cache_implementation": "static", "max_new_tokens": 12, "min_new_tokens": 12}
    found, wanted = written(lockstep, **how), written(model, **how)
    assert torch.equal(found.sequences, wanted.sequences)
    captures = len(lockstep.ranks[0].captures)
    longer = {**how, "max_new_tokens": 20, "min_new_tokens": 20}
    assert torch.equal(written(lockstep, **longer).sequences, written(model, **longer).sequences)
    assert len(lockstep.ranks[0].captures) == captures  # none for another size of the cache


def test_an_exhausted_static_cache_raises_as_the_original_does() -> None:
    model, lockstep = both("llama")
    tokens = prompt()["input_ids"]
    caches = [StaticCache(config=model.config, max_cache_len=12) for _ in range(2)]
    with torch.no_grad():
        for each, cache in zip((model, lockstep), caches, strict=True):
            each(tokens, cache=cache)
            with pytest.raises((IndexError, RuntimeError), match="index"):
                each(tokens, cache=cache)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_chunks_of_a_prompt_continue_each_other(kind: str) -> None:
    model, lockstep = both(kind)
    tokens = prompt()["input_ids"]
    with torch.no_grad():
        for each in (model, lockstep):
            outputs = [each(tokens[:, :4])]
            for start, stop in ((4, 7), (7, 8), (8, 9)):
                outputs.append(each(tokens[:, start:stop], cache=outputs[-1].past_key_values))
            parts = torch.cat([output.logits for output in outputs], 1)
            assert (parts - model(tokens).logits).abs().max() < 1e-5


@pytest.mark.parametrize("kind", HEADS)
def test_each_rank_caches_its_own_heads(kind: str) -> None:
    model = generator(kind)
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3)
    with torch.no_grad():
        whole = model(prompt()["input_ids"]).past_key_values
        lockstep(prompt()["input_ids"])
    assert whole.layers[0].keys.shape[1] == HEADS[kind]
    outputs = lockstep.ranks[0].captures[-1].outputs.values()
    assert sum(where.cache for where in outputs) == 2 * len(whole.layers)
    for where in outputs:
        held = [sum(stop - start for start, stop in ranges) for ranges in where.ranges]
        assert where.dim == 1 and sum(held) == HEADS[kind] and max(held) == -(-HEADS[kind] // 3)


def test_the_callers_cache_is_filled_even_if_it_is_not_returned() -> None:
    model, lockstep = both("gpt2")
    tokens, caches = prompt()["input_ids"], [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for each, cache in zip((model, lockstep), caches, strict=True):
            assert each(tokens, cache=cache).past_key_values is cache
            assert each(tokens, cache=cache, use_cache=False).past_key_values is None
    mine, theirs = caches
    assert mine.get_seq_length() == theirs.get_seq_length() == 18
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        assert (a.keys - b.keys).abs().max() < 1e-5 and (a.values - b.values).abs().max() < 1e-5


def test_a_whole_cache_of_the_original_is_taken_apart() -> None:
    model = generator("llama")
    fresh = autotp.parallelize(model, devices=["cpu"] * 2)
    tokens = prompt()["input_ids"]
    with torch.no_grad():
        first = model(tokens).past_key_values
        found = fresh(tokens[:, :2], cache=first)  # the first cache that it ever sees
        wanted = model(tokens[:, :2], cache=model(tokens).past_key_values)
    assert (found.logits - wanted.logits).abs().max() < 1e-5


def test_a_cache_of_another_number_of_heads_is_refused() -> None:
    _, lockstep = both("llama")
    tokens = prompt()["input_ids"]
    with torch.no_grad():
        lockstep(tokens)
        foreign = generator("neox")(tokens).past_key_values
        with pytest.raises(AutoTPError, match=r"was not made for this model\n.* has 8 heads"):
            lockstep(tokens[:, :1], cache=foreign)


def test_a_quantized_or_offloaded_cache_is_refused_with_the_reason() -> None:
    model, lockstep = both("llama")
    cache = DynamicCache(config=model.config)
    cache.prefetch_stream = object()
    with pytest.raises(AutoTPError, match="a cache holds object at prefetch_stream"):
        lockstep(prompt()["input_ids"], cache=cache)


def test_captures_say_what_they_serve_and_are_bounded() -> None:
    model = generator("gpt2")
    rank = autotp.parallelize(model, tp=1)
    tokens = prompt()["input_ids"]
    with torch.no_grad():
        rank(tokens, logits_to_keep=2)
        rank(tokens, logits_to_keep=2)
        rank(tokens, logits_to_keep=3)
    reasons = [capture.reason for capture in rank.captures]
    assert reasons[0] == "the first call" and reasons[2:] == ["logits_to_keep 3, not 2"]
    rank.max_captures = 3
    with pytest.raises(AutoTPError, match="3 call forms of GPT2LMHeadModel were captured"):
        rank(tokens, logits_to_keep=4)
    assert rank(tokens, logits_to_keep=2).logits.shape[1] == 2


def test_an_embedding_and_an_encoder_can_be_called_by_themselves() -> None:
    model, lockstep = both("bart")
    tokens = prompt()["input_ids"]
    for path in ("model.encoder", "model.shared"):
        wanted, found = model.get_submodule(path)(tokens), lockstep.entry(path)(tokens)
        a, b = (x if isinstance(x, torch.Tensor) else x[0] for x in (wanted, found))
        assert (a - b).abs().max() < 1e-5
