"""A call that needs a tensor whole which lies split: it is gathered, values and gradients are
right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests.models import refill
from tests.oneprocess import assert_same


class Fickle(nn.Module):
    """Splits in training; in evaluation a softmax needs every feature."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.tanh(h) if self.training else torch.softmax(h, -1))


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_tensor_that_lies_split_is_gathered_for_a_call_that_needs_it_whole(tp: int) -> None:
    model = refill(Fickle().double())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    lockstep = autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,))
    assert_same(model, lockstep, (x,))
    for each in (model, lockstep, *lockstep.ranks):
        each.eval()
    assert_same(model, lockstep, (x,))
    plan = lockstep.ranks[0].captures[-1].plan
    assert plan.held == (() if tp == 1 else ("down.weight", "up.bias", "up.weight"))
    if tp > 1:
        assert plan.collectives.gathers == 3 and "gathered for each call" in str(plan)
