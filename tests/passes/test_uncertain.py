"""Where a reshape is a view or a copy and its memory is written to, axes stay whole."""

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
WIDTH, HEADS, SIZE = 6, 4, 3
Step = Callable[[Tensor], Tensor]


class Heads(nn.Module):
    """A column and a row product with a function of [batch, heads, length, size] in between."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HEADS * SIZE)
        self.down = nn.Linear(2 * HEADS * SIZE, WIDTH)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        y = self.step(self.up(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2).tanh())
        return self.down(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def source_is_written(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    mine = x.clone()
    many = mine[:, :, None].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d)
    mine.add_(1.0)
    return many * mine.repeat_interleave(2, 1)


def result_is_written(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    mine = x.contiguous()
    flat = mine.transpose(1, 2).reshape(b, s, h * d)
    flat += 1.0
    joined = torch.stack((flat.view(b, s, h, d).transpose(1, 2), mine), 2)
    return joined.flatten(1, 2)


def made_contiguous(x: Tensor) -> Tensor:
    mine = x.contiguous()
    other = mine.transpose(1, 2).contiguous()
    other.mul_(2.0)
    return torch.stack((other.transpose(1, 2), mine), 2).flatten(1, 2)


def a_view(x: Tensor) -> Tensor:
    """The write shows in the reshaped value, in the model as on every rank."""
    b, h, s, d = x.shape
    mine = x.sin()
    flat = mine.transpose(1, 2).reshape(b, s, h * d)
    mine.add_(1.0)
    return torch.stack((flat.view(b, s, h, d).transpose(1, 2), x), 2).flatten(1, 2)


def reshaped_as(x: Tensor) -> Tensor:
    mine = x.contiguous()
    tokens = mine.transpose(1, 2)
    flat = tokens.reshape_as(tokens.flatten(2))
    flat += 1.0
    return torch.stack((flat.view(tokens.shape).transpose(1, 2), mine), 2).flatten(1, 2)


def in_another_format(x: Tensor) -> Tensor:
    mine = x.contiguous()
    other = mine.contiguous(memory_format=torch.channels_last)
    other.mul_(2.0)
    return torch.stack((other.contiguous(), mine), 2).flatten(1, 2)


def converted(x: Tensor) -> Tensor:
    mine = x.contiguous()
    other = mine.to(memory_format=torch.channels_last)
    other.mul_(2.0)
    return torch.stack((other.contiguous(), mine), 2).flatten(1, 2)


def attended(x: Tensor) -> Tensor:
    """Kernels lay results of attention out in another way than the meta device says."""
    with torch.no_grad():
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        flat = y.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)
        flat.mul_(2.0)
        both = flat + y.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)
    return torch.stack((x, both.view(x.transpose(1, 2).shape).transpose(1, 2)), 2).flatten(1, 2)


def not_written(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d)


def written_before(x: Tensor) -> Tensor:
    mine = x.clone()
    mine.add_(1.0)
    return not_written(mine)


def another_is_written(x: Tensor) -> Tensor:
    """What is written is no part of what was reshaped."""
    many = not_written(x)
    mine = x.clone()
    mine.add_(1.0)
    return many * mine.repeat_interleave(2, 1)


UNCERTAIN = [
    source_is_written,
    result_is_written,
    made_contiguous,
    a_view,
    reshaped_as,
    in_another_format,
    converted,
    attended,
]


def check(step: Step, tp: int, *, split: bool) -> None:
    model: Any = refill(Heads(step).double())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=generator)
    lockstep = autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,))
    assert bool(lockstep.plan.shares) == split
    assert_same(model, lockstep, (x,))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("step", UNCERTAIN)
def test_what_may_be_a_view_or_a_copy_stays_whole(step: Step, tp: int) -> None:
    check(step, tp, split=False)
    if tp > 1:
        plan = autotp.plan(Heads(step), tp, example_inputs=(torch.zeros(2, 5, WIDTH),))
        assert "returns a view or a copy, and aten." in str(plan)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("step", [not_written, written_before, another_is_written])
def test_others_are_split(step: Step, tp: int) -> None:
    check(step, tp, split=True)


class Flat(nn.Module):
    """An input's strides, which are the caller's, say whether the write shows in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 12)

    def forward(self, x: Tensor) -> Tensor:
        mine = x.transpose(1, 2).reshape(x.shape[0], -1)
        mine.mul_(2.0)
        return self.down(torch.tanh(self.up(x.flatten(1) + mine)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("example", ["contiguous", "transposed"])
@pytest.mark.parametrize("given", ["contiguous", "transposed"])
def test_strides_of_inputs_are_those_of_the_call(example: str, given: str) -> None:
    model = refill(Flat().double())
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    inputs = {"contiguous": plain, "transposed": plain.mT.contiguous().mT}
    lockstep = autotp.parallelize(
        model, devices=["cpu"] * 2, example_inputs=(inputs[example].clone(),)
    )
    wanted, found = inputs[given].clone(), inputs[given].clone()
    torch.testing.assert_close(lockstep(found), model(wanted))
    torch.testing.assert_close(found, wanted)
