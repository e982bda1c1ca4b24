"""What a training step puts on the wire: nothing of tokens times vocabulary, as the plan counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autotp
from autotp.runtime import group
from tests.models import tiny_gpt2
from tests.oneprocess import refill
from tests.spawn import run

ROWS, LENGTH, VOCAB = 4, 8, 257
WIDTH, LAYERS = 48, 2
TOKENS = ROWS * LENGTH


def traffic(rank: int, world: int) -> dict[str, Any]:
    """Sizes of all tensors that collectives send, by phase, with and without the gather."""
    sent: list[int] = []
    reduce, gather = dist.all_reduce, dist.all_gather

    def counting_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    def counting_gather(parts: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return gather(parts, tensor, *args, **kwargs)

    def counting_equal(out: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return equal(out, tensor, *args, **kwargs)

    equal, group._all_gather = group._all_gather, counting_equal
    dist.all_reduce, dist.all_gather = counting_reduce, counting_gather
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {}
    for name, make, policy in (
        ("auto", tiny_gpt2, "auto"),
        ("gather", tiny_gpt2, "gather"),
        ("parallel branches", tiny_gptj, "auto"),
        ("a norm each", tiny_neox, "auto"),
    ):
        tp = autotp.parallelize(refill(make()).train(), tp=world, logits=policy)
        sent.clear()
        out = tp(tokens, labels=tokens, use_cache=False)
        forward = list(sent)
        sent.clear()
        out.loss.backward()
        found[name] = (forward, list(sent), vars(tp.plan.collectives))
    return found


def tiny_gptj() -> torch.nn.Module:
    """Attention and MLP beside each other, of one norm."""
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "rotary_dim": 4}
    return GPTJForCausalLM(GPTJConfig(vocab_size=VOCAB, **sizes))


def tiny_neox() -> torch.nn.Module:
    """Attention and MLP beside each other, of a norm each."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCAB, intermediate_size=4 * WIDTH, **sizes))


def require_planned(found: Any, per_layer: int) -> None:
    """As many all-reduces of tokens times width as said, each way, and two small ones."""
    forward, backward, counts = found
    small = [n for n in forward if n < TOKENS * WIDTH]
    large = [n for n in forward if n >= TOKENS * WIDTH]
    assert large == [TOKENS * WIDTH] * (per_layer * LAYERS + 1) and counts["forward"] == len(large)
    assert len(small) == counts["loss"] == 2 and sum(small) <= 3 * TOKENS
    norms = [n for n in backward if n < TOKENS * WIDTH]  # weight and bias of both in one
    assert norms == [4 * WIDTH] * counts["parameters"]
    backward = [n for n in backward if n >= TOKENS * WIDTH]
    assert backward == [TOKENS * WIDTH] * (per_layer * LAYERS + 1)
    assert counts["backward"] == len(backward) and counts["gathers"] == 0


@pytest.mark.dist
def test_a_training_step_sends_what_the_plan_says() -> None:
    for found in run(traffic, 2):
        require_planned(found["auto"], 2)
        require_planned(found["parallel branches"], 1)
        require_planned(found["a norm each"], 1)
        assert [counts["parameters"] for _, _, counts in found.values()] == [0, 0, 0, LAYERS]
        forward, _, counts = found["gather"]
        assert counts["gathers"] == 1 and max(forward) >= TOKENS * (VOCAB // 2)
        assert sum(forward) > sum(found["auto"][0]) + TOKENS * (VOCAB // 2) - 1


def unlike(rank: int, world: int) -> list[str]:
    """What each rank is told when the ranks' batches differ, in values and in shapes."""
    from autotp.errors import GroupError

    tp = autotp.parallelize(refill(tiny_gpt2()), tp=world)
    tp.debug = True  # or AUTOTP_DEBUG=1
    told = []
    tokens = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[1, 3] = (int(tokens[1, 3]) + rank) % VOCAB
    calls = [(tokens, other), (tokens[:, : 5 + rank], tokens[:, : 5 + rank])]
    for given, labels in calls:
        try:
            tp(given, labels=labels, use_cache=False)
        except GroupError as error:
            told.append(str(error))
    assert torch.isfinite(tp(tokens, labels=tokens, use_cache=False).loss)  # the group is usable
    return told


@pytest.mark.dist
def test_ranks_with_different_batches_are_told_which_input_differs() -> None:
    for values, shapes in run(unlike, 2, timeout=90):
        assert values.startswith("the ranks were given different labels")
        assert shapes.startswith("the ranks were given different input_ids")
        assert "rank 0: [2, 5]" in shapes and "rank 1: [2, 6]" in shapes
