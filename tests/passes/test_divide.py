"""Slices that are the parts of a value become one split; all others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests.models import refill
from tests.oneprocess import assert_same

aten = torch.ops.aten
WIDTH, HEADS, SIZE = 6, 4, 6


class Turned(nn.Module):
    """Attention whose queries go through a function first, as rotary embeddings do."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scores = self.step(q) @ k.transpose(-1, -2)
        return self.out((scores.tanh() @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def halves(q: Tensor) -> Tensor:
    return torch.cat((-q[..., SIZE // 2 :], q[..., : SIZE // 2]), -1) + q


def thirds(q: Tensor) -> Tensor:
    a, b, c = q[..., 4:], q[..., :1], q[..., 1:-2]
    return torch.cat((a.sin(), c, b * 3), -1)


def a_gap(q: Tensor) -> Tensor:
    return torch.cat((q[..., 3:].sin(), q[..., :2], q[..., :1]), -1)


def overlap(q: Tensor) -> Tensor:
    return torch.cat((q[..., 2:].sin(), q[..., :3]), -1)[..., :SIZE]


def every_second(q: Tensor) -> Tensor:
    return torch.cat((-q[..., 1::2], q[..., ::2]), -1)


def steps(q: Tensor) -> Tensor:
    first = q[..., :4:2]
    return torch.cat((first, q[..., 4:], first.sin()), -1)


def tokens(q: Tensor) -> Tensor:
    return torch.cat((q[:, :, 1:] * 2, q[:, :, :1]), 2)


def written(q: Tensor) -> Tensor:
    mine = q.clone()
    first, second = mine[..., :3], mine[..., 3:]
    first.add_(1.0)
    return torch.cat((second, first), -1)


def regions(q: Tensor) -> Tensor:
    with torch.no_grad():
        first = q[..., :3]
    return torch.cat((first, q[..., 3:]), -1)


def splits(model: nn.Module, tp: int, x: Tensor) -> int:
    graph = autotp.plan(model, tp, example_inputs=(x,)).program().graph
    return sum(node.target is aten.split_with_sizes.default for node in graph.nodes)


def values() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("step", [halves, thirds])
def test_the_parts_of_a_value_are_one_split(step: Any, tp: int) -> None:
    model, x = refill(Turned(step).double()), values()
    assert splits(model, tp, x) == 1
    lockstep = autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,))
    assert lockstep.plan.shares, "the heads are split"
    assert_same(model, lockstep, (x,))


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("step", [a_gap, overlap, every_second, steps, tokens, written, regions])
def test_other_slices_stay(step: Any, tp: int) -> None:
    model, x = refill(Turned(step).double()), values()
    assert splits(model, tp, x) == 0
    assert_same(model, autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,)), (x,))


class Fused(Turned):
    """Takes queries, keys and values out of one product, along the dim that the ranks split."""

    def __init__(self) -> None:
        super().__init__(torch.sin)
        del self.q, self.k, self.v
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y, size = self.qkv(x), HEADS * SIZE
        parts = y[..., :size], y[..., size : 2 * size], y[..., 2 * size :]
        q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2)
        return self.out((scores.tanh() @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tp", [2, 3])
def test_slices_along_a_split_dim_stay(tp: int) -> None:
    model, x = refill(Fused().double()), values()
    assert splits(model, tp, x) == 0
    lockstep = autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,))
    assert lockstep.plan.shares, "the heads are split"
    assert_same(model, lockstep, (x,))


class Halves(nn.Module):
    """Gives the halves of a product to the caller, or to a module each."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.first, self.second = First(), Second()
        self.apart = apart

    def forward(self, x: Tensor) -> Any:
        y = self.down(self.up(x).relu())
        if self.apart:
            return self.first(y) * self.second(y)
        return y[..., :WIDTH], y[..., WIDTH:]


class First(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y[..., :WIDTH].sin()


class Second(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y[..., WIDTH:].cos()


@pytest.mark.parametrize("apart", [True, False])
def test_slices_of_two_modules_and_of_the_caller_stay(apart: bool) -> None:
    model, x = refill(Halves(apart).double()), values()
    assert splits(model, 2, x) == 0
    assert_same(model, autotp.parallelize(model, devices=["cpu"] * 2, example_inputs=(x,)), (x,))


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTP_WITHOUT", "divide")
    assert splits(refill(Turned(halves).double()), 2, values()) == 0
