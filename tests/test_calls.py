"""Every way in which people call a model, in one process with all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autotp
from autotp import pytree
from autotp.caches import pack_all
from autotp.runtime.sharded import local
from autotp.runtime.weights import shard
from tests.generating import generator, prompt

KINDS = [("gpt2", "sdpa", 3), ("llama", "eager", 2)]


@functools.cache
def both(kind: str, attention: str, tp: int) -> tuple[Any, Any]:
    model = generator(kind)
    model.set_attn_implementation(attention)
    return model, autotp.parallelize(model, devices=["cpu"] * tp)


def forms(model: Any) -> dict[str, dict[str, Any]]:
    given = prompt()
    tokens, mask = given["input_ids"], given["attention_mask"]
    values = torch.randn(2, 9, model.config.hidden_size)
    future = torch.ones(9, 9).triu(1).bool()
    return {
        "mask": {"input_ids": tokens, "attention_mask": mask},
        "boolean mask": {"input_ids": tokens, "attention_mask": mask.bool()},
        "mask of each pair": {
            "input_ids": tokens,
            "attention_mask": torch.zeros(2, 1, 9, 9).masked_fill(future, -1e9),
        },
        "boolean mask of each pair": {
            "input_ids": tokens,
            "attention_mask": ~future[None, None].repeat(2, 1, 1, 1),
        },
        "positions": {"input_ids": tokens, "position_ids": torch.arange(9)[None] + 1},
        "embeddings": {"inputs_embeds": values},
        "embeddings and labels": {"inputs_embeds": values, "labels": tokens},
        "a tuple": {"input_ids": tokens, "labels": tokens, "return_dict": False},
        "all states": {"input_ids": tokens, "output_hidden_states": True},
        "last logits": {"input_ids": tokens, "logits_to_keep": 2},
        "what it ignores": {"input_ids": tokens, "atention_mask": mask},
    }


def same(wanted: Any, found: Any) -> None:
    (a, ours), (b, theirs) = (pytree.flatten(pack_all(x)) for x in (found, wanted))
    assert type(found) is type(wanted) and ours == theirs
    for mine, other in zip(a, b, strict=True):
        if isinstance(other, Tensor) and other.numel():
            assert (mine - other).abs().max() < 1e-4


def same_gradients(model: Any, rank: Any, limit: float) -> None:
    """A rank's part of every gradient, the first layer's too; that of a key bias is noise."""
    mine = dict(rank.named_parameters())
    floor = 1e-2 * max(float(p.grad.abs().max()) for p in model.parameters())
    for name, parameter in model.named_parameters():
        theirs = shard(parameter.grad, rank.plan.ranges(name, rank.rank))
        scale = max(float(parameter.grad.abs().max()), floor)
        assert (local(mine[name].grad) - theirs).abs().max() < limit * scale, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_each_call_form_gives_what_the_original_gives(kind: Any) -> None:
    model, lockstep = both(*kind)
    for name, given in forms(model).items():
        wanted, found = model(**given), lockstep(**given)
        try:
            same(wanted, found)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_attention_weights_are_those_of_all_heads() -> None:
    model, lockstep = both("llama", "eager", 2)
    given = {**prompt(), "output_attentions": True}
    wanted, found = model(**given), lockstep(**given)
    same(wanted, found)
    assert found.attentions[0].shape == (2, 8, 9, 9)


def test_embeddings_get_their_gradient() -> None:
    model, lockstep = both("gpt2", "sdpa", 3)
    tokens, grads = prompt()["input_ids"], []
    for each in (model, lockstep):
        values = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1))
        values.requires_grad_()
        each(inputs_embeds=values, labels=tokens).loss.backward()
        grads.append(values.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-5 * grads[0].abs().max()


@pytest.mark.parametrize("given", [{}, {"input_ids": 0, "inputs_embeds": 0}])
def test_a_call_that_the_model_refuses_raises_its_error(given: dict[str, Any]) -> None:
    model, lockstep = both("gpt2", "sdpa", 3)
    real = {"input_ids": prompt()["input_ids"], "inputs_embeds": torch.randn(2, 9, 24)}
    call = {name: real[name] for name in given}
    for each in (model, lockstep):
        with pytest.raises(ValueError, match="input_ids"):
            each(**call)


@pytest.mark.parametrize("far", [lambda t: t.repeat(1, 9), lambda t: t + 300])
def test_what_is_out_of_range_raises_the_error_of_the_original(
    far: Callable[[Tensor], Tensor],
) -> None:
    model, lockstep = both("gpt2", "sdpa", 3)
    for each in (model, lockstep):
        with pytest.raises(IndexError, match="out of range"):
            each(far(prompt()["input_ids"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_modes_at_call_time_do_what_they_do_for_the_original(kind: Any) -> None:
    model, lockstep = both(*kind)
    given = {**prompt(), "labels": prompt()["input_ids"]}
    with torch.inference_mode():
        wanted, found = model(**given), lockstep(**given)
        same(wanted, found)
        assert found.logits.is_inference()
    with torch.no_grad():
        assert not lockstep(**given).logits.requires_grad
    same(model(**given), lockstep(**given))
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            wanted, found = model(**given), lockstep(**given)
        assert (found.logits.dtype, found.loss.dtype) == (wanted.logits.dtype, wanted.loss.dtype)
        limit = 0.05 if enabled else 1e-4
        scale = wanted.logits.float().abs().max()
        assert (found.logits.float() - wanted.logits.float()).abs().max() < limit * scale
        for each, output in ((model, wanted), (lockstep, found)):
            each.zero_grad()
            output.loss.backward()
        for rank in lockstep.ranks:
            same_gradients(model, rank, limit)
