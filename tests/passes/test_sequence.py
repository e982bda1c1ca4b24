"""Slices of the sequence: what becomes of g, f and the operators between them, and the proof."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import autotp
from autotp.errors import CheckError
from autotp.pipeline import rank_program
from autotp.runtime.collectives import copy_to_region, reduce_from_region
from autotp.runtime.random import draw
from autotp.runtime.sequence import (
    gather_from_sequence,
    gather_sequence_to_region,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
)
from passes.check import check
from tests.models import Function, refill
from tests.passes.stages import nodes

WIDTH, INNER = 10, 8
CONVERSIONS = {
    reduce_scatter_to_sequence: "reduce-scatter",
    gather_sequence_to_region: "all",
    scatter_to_sequence: "slice",
    gather_from_sequence: "whole",
    copy_to_region: "f",
    reduce_from_region: "g",
}


class Layer(nn.Module):
    """A norm, an MLP, dropout and a residual; `between` is what is done to the residual."""

    def __init__(self, between: Any = None, flat: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.again, self.last = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.between, self.flat = between, flat

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.down(torch.tanh(self.up(x.flatten(0, 1) if self.flat else x)))
        x = x + F.dropout(y.view(x.shape) if self.flat else y, 0.5, self.training)
        if self.between is not None:
            x = self.between(x)
        y = self.last(torch.tanh(self.again(self.norm(x))))
        return x + y


def layer(**kwargs: Any) -> nn.Module:
    return refill(Layer(**kwargs).double()).eval()


def example(batch: int = 2, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=generator)


def planned(model: nn.Module, tp: int = 2) -> Any:
    return autotp.plan(model, tp, example_inputs=(example(),), sequence_parallel=True)


def conversions(plan: Any) -> list[str]:
    graph = plan.program().graph
    return [CONVERSIONS[n.target] for n in graph.nodes if n.target in CONVERSIONS]


def assert_exact(model: nn.Module, tp: int, *inputs: Tensor) -> None:
    report = autotp.verify(
        model, tp, example_inputs=inputs or (example(),), sequence_parallel=True, limit=1e-12
    )
    report.raise_if_failed()
    assert any(row.what == "gradient" for row in report.rows)


def test_norms_and_residuals_are_on_slices() -> None:
    plan = planned(layer())
    # f: of x (no slice yet), of both biases behind g, and of the second norm's weight and bias
    assert sorted(conversions(plan)) == sorted(
        ["f", "reduce-scatter", "f", "slice", "f", "f", "all", "reduce-scatter", "f", "whole"]
    )
    placed = {n.name: n.meta["placement"] for n in nodes(plan.program().graph, "aten.layer_norm")}
    assert placed == {"layer_norm": "I", "layer_norm_1": "S(1: sequence)"}
    calls = {n.name: [*n.meta.get("calls", ())] for n in plan.program().graph.nodes}
    assert calls["slice_layer_norm"] == calls["whole_add_1"] == []
    counts = plan.collectives
    assert (counts.forward, counts.reduce_scatters, counts.sequence_gathers) == (0, 2, 1)
    assert (counts.sequence_wholes, counts.backward_reduce_scatters) == (1, 1)
    assert counts.backward == 1 + 4
    assert counts.backward_sequence_gathers == 2 + 1  # of both reduce-scatters, and of the slice
    assert "2 reduce-scatters and 2 all-gathers forward, 1 and 3 backward" in str(plan)


@pytest.mark.parametrize("tp", [2, 3, 5])
@pytest.mark.parametrize("flat", [False, True])
def test_lengths_that_do_not_divide_are_exact(tp: int, flat: bool) -> None:
    model = layer(flat=flat)
    for length in (7, 3, 2):  # on 5 ranks some hold nothing of 3
        assert_exact(model, tp, example(length=length))


def test_g_goes_below_a_view_that_makes_tokens_one_dim() -> None:
    plan = planned(layer(flat=True))
    (first, _) = nodes(plan.program().graph, reduce_scatter_to_sequence)
    assert first.args[1] == 1 and first.meta["val"].dim() == 3
    assert str(first.args[0].target) == "aten.view.default"


def test_a_model_without_f_and_g_stays_as_it_is() -> None:
    model = refill(nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh())).double()
    plan = planned(model)
    assert conversions(plan) == [] and plan.collectives.reduce_scatters == 0
    assert autotp.plan(model, 1, example_inputs=(example(),), sequence_parallel=True)


BETWEEN = {
    "mixes tokens": (lambda x: x + x.cumsum(1), True),
    "averages tokens": (lambda x: x - x.mean(1, keepdim=True), True),
    "turns tokens round": (lambda x: x.flip(1), True),
    "shifts tokens": (lambda x: F.pad(x[:, 1:], (0, 0, 0, 1)), True),
    "makes tokens one dim": (lambda x: x.flatten(0, 1).tanh().view(x.shape), True),
    "works on each token": (lambda x: torch.sigmoid(x) * x, False),
    "orders features": (lambda x: x.softmax(-1) + x.cumsum(-1), False),
    "swaps dims": (lambda x: x.transpose(0, 1).tanh().transpose(0, 1), False),
    "reads positions": (
        lambda x: x * torch.arange(x.shape[1], dtype=x.dtype).view(1, -1, 1),
        False,
    ),
    "normalizes": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), False),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_needs_all_tokens_gets_them(name: str) -> None:
    between, gathered = BETWEEN[name]
    model = layer(between=between)
    assert_exact(model, 3)
    assert (planned(model).collectives.sequence_wholes > 1) == gathered


def test_dropout_draws_for_the_slice() -> None:
    plan = planned(layer().train())
    (drop,) = nodes(plan.program().graph, draw)
    assert drop.args[1] == "sharded" and drop.meta["placement"] == "S(1: sequence)"


def test_a_rank_reads_sizes_of_its_slice() -> None:
    plan = planned(layer(), tp=3)
    shapes = [
        next(n for n in plan.graph(rank).graph.nodes if n.name == "layer_norm_1").meta["val"].shape
        for rank in range(3)
    ]
    assert [shape[1].node.hint for shape in shapes] == [2, 2, 3]


# ---- the proof


def mutated(change: Any) -> None:
    """Check a rank's program after a change."""
    plan = planned(layer(), tp=3)
    program = copy.deepcopy(rank_program(plan, 1))
    change(program.graph)
    check(program, plan, rank=1)


def skip(kind: Any, number: int = 0) -> Any:
    def change(graph: Any) -> None:
        node = [n for n in graph.nodes if n.target is kind][number]
        node.replace_all_uses_with(node.args[0])

    return change


def retarget(kind: Any, other: Any, args: Any = lambda args: args) -> Any:
    def change(graph: Any) -> None:
        node: Node = next(n for n in graph.nodes if n.target is kind)
        node.target, node.args = other, args(node.args)

    return change


MUTANTS = {
    "a norm's weight without f": lambda graph: skip(copy_to_region, 2)(graph),
    "a norm's bias without f": lambda graph: skip(copy_to_region, 3)(graph),
    "slices in a region": skip(gather_sequence_to_region),
    "a partial sum in a norm": skip(reduce_scatter_to_sequence),
    "slices that leave": skip(gather_from_sequence),
    "a whole beside a slice": skip(scatter_to_sequence),
    "g between slices": retarget(
        reduce_scatter_to_sequence, reduce_from_region, lambda args: args[:1]
    ),
    "gradients of a region counted once": retarget(gather_sequence_to_region, gather_from_sequence),
    "gradients outside counted twice": retarget(gather_from_sequence, gather_sequence_to_region),
    "slices of the batch": retarget(scatter_to_sequence, scatter_to_sequence, lambda a: (a[0], 0)),
    "slices of the features": retarget(
        reduce_scatter_to_sequence, reduce_scatter_to_sequence, lambda a: (a[0], 2)
    ),
    "another length": retarget(gather_from_sequence, gather_from_sequence, lambda a: (*a[:2], 7)),
    "another dim": retarget(
        gather_sequence_to_region, gather_sequence_to_region, lambda a: (a[0], 0, a[2])
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_graph_is_not_proved(name: str) -> None:
    mutated(lambda graph: None)
    with pytest.raises(CheckError):
        mutated(MUTANTS[name])


def test_a_value_of_several_lengths_keeps_them_apart() -> None:
    """Two streams, as of an encoder and a decoder."""
    parts = {name: nn.Linear(WIDTH, INNER) for name in ("up1", "up2")}
    parts |= {name: nn.Linear(INNER, WIDTH) for name in ("down1", "down2")}

    def forward(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = m.norm(x + m.down1(torch.tanh(m.up1(x))))
        y = m.norm(y + m.down2(torch.tanh(m.up2(y))))
        return x, torch.tanh(y @ x.transpose(1, 2)) @ x

    model = refill(Function(forward, norm=nn.LayerNorm(WIDTH), **parts).double())
    assert_exact(model, 3, example(length=7), example(length=4))


def test_a_whole_operand_may_have_the_lengths_of_several_streams() -> None:
    parts = {name: nn.Linear(WIDTH, INNER) for name in ("up1", "up2")}
    parts |= {name: nn.Linear(INNER, WIDTH) for name in ("down1", "down2")}

    def forward(m: Any, x: Tensor, y: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        x = m.norm(x + m.down1(torch.tanh(m.up1(x))))
        y = m.norm(y + m.down2(torch.tanh(m.up2(y))))
        of_x = (x.unsqueeze(2) * pairs.unsqueeze(-1)).sum(2)
        return x + of_x, y + (y.unsqueeze(1) * pairs.unsqueeze(-1)).sum(1)

    model = refill(Function(forward, norm=nn.LayerNorm(WIDTH), **parts).double())
    pairs = example(length=7)[..., :4].requires_grad_()
    assert_exact(model, 3, example(length=7), example(length=4), pairs)
