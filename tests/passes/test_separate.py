"""Reshapes that copy in the model copy on ranks of every size; those that do not stay views."""

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


def not_written(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d)


def written_before(x: Tensor) -> Tensor:
    mine = x.clone()
    mine.add_(1.0)
    return not_written(mine)


def copies(model: nn.Module, x: Tensor) -> int:
    """How many copies were put in."""
    notes = autotp.plan(model, 2, example_inputs=(x,)).program().provenance
    found = [note for note in notes if note.endswith("reshapes copy on every rank")]
    return int(found[0].split()[0]) if found else 0


def check(step: Step, tp: int, wanted: int) -> None:
    model: Any = refill(Heads(step).double())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=generator)
    assert copies(model, x) == wanted
    lockstep = autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,))
    assert lockstep.plan.shares, "the heads are split"
    assert_same(model, lockstep, (x,))


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(
    ("step", "count"), [(source_is_written, 1), (result_is_written, 2), (made_contiguous, 2)]
)
def test_a_copy_is_one_on_every_rank(step: Step, count: int, tp: int) -> None:
    check(step, tp, count)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("step", [a_view, not_written, written_before])
def test_others_stay(step: Step, tp: int) -> None:
    check(step, tp, 0)
