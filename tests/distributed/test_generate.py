"""Generation on two real ranks: the text of the original, of caches that hold each rank's heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import StaticCache

import autotp
from autotp.errors import AutoTPError
from tests.generating import HEADS, generator, prompt, written
from tests.spawn import run

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def generates(rank: int, world: int) -> dict[str, Any]:
    """Text of every kind of model, and what a rank caches."""
    found: dict[str, Any] = {}
    for kind in HEADS:
        model = generator(kind)
        tp = autotp.parallelize(model)
        mine, theirs = written(tp), written(model)
        beams = [written(each, num_beams=3, min_new_tokens=0).sequences for each in (tp, model)]
        torch.manual_seed(rank)  # the first rank's draws count
        how = {"do_sample": True, "top_k": 50, "num_return_sequences": 2}
        drawn = [written(tp, **how).sequences for _ in range(2)]
        torch.manual_seed(0)
        found[kind] = {
            "text": torch.equal(mine.sequences, theirs.sequences),
            "beams": torch.equal(*beams),
            "logits": max(_far(a, b) for a, b in zip(mine.logits, theirs.logits, strict=True)),
            "drawn": drawn,
            "as drawn": torch.equal(drawn[0], written(model, **how).sequences),
            "bytes": [_bytes(output.past_key_values) for output in (mine, theirs)],
            "captures": len(tp.captures),
        }
        if kind == "llama":
            found["static"] = _static(model, tp)
            found["unlike"] = _unlike(tp, rank)
        if kind == "gpt2":
            found["long"] = _raised(lambda tp=tp: written(tp, max_new_tokens=80))
            found["after"] = torch.equal(written(tp).sequences, theirs.sequences)
    return found


def _static(model: Any, tp: Any) -> list[str]:
    """What a cache that is full raises, here and in the original."""
    texts = []
    for each in (tp, model):
        cache = StaticCache(config=model.config, max_cache_len=12)
        with torch.no_grad():
            each(prompt()["input_ids"], cache=cache)
            texts.append(_raised(lambda each=each, cache=cache: each(**prompt(), cache=cache)))
            heads = cache.layers[0].keys.shape[1]
            assert heads == HEADS["llama"] // (2 if each is tp else 1), "of the rank alone"
    return texts


def _unlike(tp: Any, rank: int) -> list[str]:
    """What ranks say that were given different batches."""
    tp.debug = True
    try:
        tokens = prompt()["input_ids"]
        texts = [_raised(lambda: tp(tokens[: rank + 1]))]
    finally:
        tp.debug = False
    dist.barrier()
    texts.append(_raised(lambda: tp.generate(input_ids=tokens + rank, max_new_tokens=2)))
    return texts


def _raised(call: Any) -> str:
    try:
        call()
    except (AutoTPError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_two_ranks_write_the_text_of_the_original() -> None:
    ranks = run(generates, 2, timeout=400.0)
    for kind in HEADS:
        first, second = (found[kind] for found in ranks)
        for found in (first, second):
            assert found["text"] and found["beams"] and found["logits"] < 1e-4, kind
            assert found["bytes"][0] * 2 == found["bytes"][1], kind
        assert first["as drawn"], f"{kind}: the first rank's generator draws"
        for mine, theirs in zip(first["drawn"], second["drawn"], strict=True):
            assert torch.equal(mine, theirs), kind
        assert not torch.equal(*first["drawn"]), "a second call draws on"
    for found in ranks:
        assert found["static"][0] == found["static"][1] and "index" in found["static"][0]
        assert found["long"].startswith("IndexError: index out of range") and found["after"]
        calls, generated = found["unlike"]
        assert calls.startswith("GroupError: the ranks were given different input_ids")
        assert generated.startswith("GroupError: the ranks were given different input_ids")
