"""Large products that no pair splits take their input in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp.pipeline import plan_of
from autotp.planning import Plan
from autotp.runtime.collectives import reduce_from_region, scatter_to_region
from tests.oneprocess import assert_same, parallel, refill
from tests.passes.stages import Fn, captured, values
from tests.small import WIDTH, Mlp, NormBetween, WideNormBetween


def plan(model: nn.Module, tp: int = 2, layout: Plan | None = None) -> Plan:
    return plan_of(captured(model), tp=tp, model="", layout=layout)


def targets(found: Plan) -> list[Any]:
    return [node.target for node in found.program().graph.nodes]


def test_large_whole_products_are_split_along_their_inputs() -> None:
    found = plan(WideNormBetween(), 3)
    assert [(axis.kind, axis.units, axis.rows) for axis in found.axes] == [
        ("input", WIDTH, ("up.weight",)),
        ("input", 60, ("down.weight",)),
    ]
    assert found.local_shape("up.weight", 0) == (60, 4)
    assert not found.is_sharded("up.bias")
    assert targets(found).count(scatter_to_region) == targets(found).count(reduce_from_region) == 2
    assert found.collectives.parts == 1, "the stream of values needs no gradient here"


def test_products_with_few_weights_stay_whole() -> None:
    assert not plan(NormBetween()).axes


def test_nothing_is_parted_where_enough_is_split() -> None:
    class Both(nn.Module):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.large, self.small = Mlp(inner), WideNormBetween()

        def forward(self, x: Tensor) -> Tensor:
            return self.small(self.large(x))

    assert [axis.kind for axis in plan(Both(2000)).axes] == ["mlp"]
    assert {axis.kind for axis in plan(Both(60)).axes} == {"mlp", "input"}


def test_the_largest_products_are_taken_until_enough_is_split() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + torch.softmax(self.wide(x), -1).sum() + self.few(x).amax()

    parts = {"up": nn.Linear(WIDTH, 4000), "down": nn.Linear(4000, WIDTH)}
    model = Fn(forward, **parts, wide=nn.Linear(WIDTH, 600), few=nn.Linear(WIDTH, 60))
    found = plan(model)
    assert found.is_sharded("wide.weight")
    assert not found.is_sharded("few.weight")


def test_products_of_one_input_share_its_parts() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.softmax(self.a(x), -1) @ torch.softmax(self.b(x), -1).transpose(1, 2)

    model = Fn(forward, a=nn.Linear(WIDTH, 60), b=nn.Linear(WIDTH, 60))
    found = plan(model)
    assert targets(found).count(scatter_to_region) == 1
    assert [axis.rows for axis in found.axes] == [("a.weight", "b.weight")]


def test_another_call_takes_the_same_inputs_in_parts() -> None:
    first = plan(WideNormBetween(), 3)
    assert plan(WideNormBetween(), 3, layout=first).axes == first.axes
    whole = replace(first, axes=(), tensors=plan(WideNormBetween(), 1).tensors)
    assert not plan(WideNormBetween(), 3, layout=whole).axes


def test_one_rank_takes_no_parts() -> None:
    assert not plan(WideNormBetween(), 1).axes


@pytest.mark.parametrize("tp", [2, 3])
def test_a_fused_projection_beside_norms_computes_the_same(tp: int) -> None:
    """Keys and values of one head, fused with the queries of five: heads cannot be split."""

    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([5 * WIDTH, WIDTH, WIDTH], -1)
        q = q.unflatten(-1, (5, WIDTH)).transpose(1, 2)
        mixed = torch.softmax(q @ k[:, None].transpose(-2, -1), -1) @ v[:, None]
        return self.out(mixed.transpose(1, 2).flatten(2))

    model = Fn(forward, qkv=nn.Linear(WIDTH, 7 * WIDTH), out=nn.Linear(5 * WIDTH, WIDTH))
    refill(model.double())
    lockstep = parallel(model, tp, (values(2, 5, WIDTH),))
    assert {axis.kind for axis in lockstep.plan.axes} == {"input"}
    assert_same(model, lockstep, (values(3, 7, WIDTH),))
