"""Random operators draw what their stream says, whatever was drawn before, and replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autotp.runtime.group import Group
from autotp.runtime.random import draw, mix, next_seed

DROPOUT = torch.ops.aten.dropout.default
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def dropped(group: Group, stream: str = "sharded", seed: int = 1, index: int = 1) -> Tensor:
    return draw(DROPOUT, stream, seed, index, torch.ones(1000), 0.5, True, group=group)


def test_mix_is_splitmix64_in_63_bits() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF >> 1  # the first number of the reference implementation
    assert len({mix(a, b, c) for a in range(20) for b in range(20) for c in range(20)}) == 8000
    assert len({mix(i) & 0xFFFFFFFF for i in range(1000)}) == 1000  # mt19937 takes these 32 bits
    assert mix(1, 2) != mix(2, 1) != mix(2, 1, 0)
    assert all(0 <= mix(2**63 - 1, i) < 2**63 for i in range(100))


def test_replicated_draws_are_the_same_on_all_ranks_and_sharded_ones_are_not() -> None:
    groups = Group.in_process(3)
    same = [dropped(group, "replicated") for group in groups]
    own = [dropped(group, "sharded") for group in groups]
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    masks = [same[0], *own]
    for i, a in enumerate(masks):
        assert 400 < int((a == 0).sum()) < 600
        for b in masks[:i]:
            assert 400 < int((a != b).sum()) < 600  # as independent ones


def test_draws_depend_on_seed_and_index_alone() -> None:
    group = Group()
    first = dropped(group)
    torch.rand(17)
    dropped(group, index=2)
    assert torch.equal(dropped(group), first)
    assert not torch.equal(dropped(group, index=2), first)
    assert not torch.equal(dropped(group, seed=2), first)


def test_the_callers_generator_stays_where_it_was() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    dropped(Group())
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="stop"):
        draw(_stop, "replicated", 1, 1, torch.ones(3), group=Group())
    assert torch.equal(torch.get_rng_state(), before)


def _stop(x: Tensor) -> Tensor:
    torch.rand_like(x)
    raise RuntimeError("stop")


def test_attention_factories_and_tuples_draw_too() -> None:
    group = Group()
    q = torch.randn(1, 2, 5, 4)
    attend = [
        draw(ATTENTION, "sharded", seed, 1, q, q, q, dropout_p=0.5, group=group)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(attend[0], attend[1])
    assert not torch.equal(attend[0], attend[2])
    rand = torch.ops.aten.rand.default
    numbers = [draw(rand, "replicated", seed, 1, [4], group=group) for seed in (1, 1, 2)]
    assert torch.equal(numbers[0], numbers[1])
    assert not torch.equal(numbers[0], numbers[2])
    native = torch.ops.aten.native_dropout.default
    x, mask = draw(native, "replicated", 1, 1, torch.ones(9), 0.5, True, group=group)
    assert torch.equal(x != 0, mask)


def test_an_unknown_stream_is_refused() -> None:
    with pytest.raises(AssertionError, match="not a random stream: 'own'"):
        dropped(Group(), "own")


def test_every_call_has_another_seed_and_manual_seed_repeats_them() -> None:
    streams, group = [], Group()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)  # after the group was made
        streams.append([next_seed(group) for _ in range(50)])
    assert len(set(streams[0])) == 50
    assert streams[0] == streams[1]
    assert not set(streams[0]) & set(streams[2])


def test_a_draw_of_the_whole_is_the_callers_generators() -> None:
    x = torch.ones(1000)
    torch.manual_seed(3)
    wanted = [torch.dropout(x, 0.5, True) for _ in range(2)]
    torch.manual_seed(3)
    found = [draw(DROPOUT, "whole", 0, i, x, 0.5, True, group=Group()) for i in range(2)]
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_a_part_replays_its_masks(reentrant: bool) -> None:
    group, x = Group(), torch.ones(1000, requires_grad=True)
    seed = next_seed(group)

    def part(x: Tensor) -> Tensor:
        return draw(DROPOUT, "sharded", seed, 1, x.exp().log(), 0.5, True, group=group).square()

    y = checkpoint(part, x, use_reentrant=reentrant)
    dropped(group)
    y.sum().backward()
    assert x.grad is not None and x.grad.ne(0).equal(y.ne(0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_whole_call_replays_its_seed(reentrant: bool) -> None:
    group = Group()

    def call(x: Tensor) -> Tensor:
        seed = next_seed(group)
        return draw(DROPOUT, "sharded", seed, 1, x.exp().log(), 0.5, True, group=group).square()

    inputs = [torch.ones(1000, requires_grad=True) for _ in range(3)]
    results: list[Any] = [checkpoint(call, x, use_reentrant=reentrant) for x in inputs]
    used = torch.get_rng_state()
    for y in results:  # three calls before the first backward, as in gradient accumulation
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), used)
    masks = [y.ne(0) for y in results]
    for x, mask in zip(inputs, masks, strict=True):
        assert x.grad is not None and x.grad.ne(0).equal(mask)
    assert not torch.equal(masks[0], masks[1])
