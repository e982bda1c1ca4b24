"""The choice: which axes are split over how many ranks, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp.planning import Plan
from tests import small
from tests.passes.stages import Fn, stages, values, written
from tests.small import HEADS, WIDTH


def widths(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {axis.name: axis.widths for axis in plan.axes}


def reason(plan: Plan, name: str) -> str:
    return next(kept.reason for kept in plan.kept if kept.name == name)


def test_units_that_do_not_divide_are_spread_the_first_ranks_have_more() -> None:
    plan = stages(nn.Sequential(small.BlockQkv(), small.Mlp()), tp=3).plan
    assert widths(plan) == {"heads0": (2, 2, 1), "ffn0": (3, 3, 2)}


def test_a_rank_may_hold_one_unit() -> None:
    assert widths(stages(small.BlockQkv(), tp=HEADS).plan) == {"heads0": (1,) * HEADS}


def test_nothing_is_split_over_one_rank_and_nothing_needs_a_reason() -> None:
    plan = stages(small.BlockQkv(), tp=1).plan
    assert plan.axes == () and plan.kept == ()


def test_more_ranks_than_heads_keep_the_attention_whole_and_split_the_mlp() -> None:
    blocks = [small.Residual(m) for m in (small.BlockQkv(), small.Mlp())]
    plan = stages(nn.Sequential(*blocks), tp=6).plan
    assert widths(plan) == {"ffn0": (2, 2, 1, 1, 1, 1)}
    for name in ("0.block.qkv.weight", "0.block.qkv.bias", "0.block.out.weight"):
        assert reason(plan, name) == "it has 5 units, fewer than tp=6"


def test_names_count_axes_of_a_kind_in_the_order_of_the_graph() -> None:
    blocks = [small.Residual(m) for m in (small.Mlp(), small.BlockQkv(), small.Mlp(9))]
    plan = stages(nn.Sequential(*blocks)).plan
    assert [(axis.name, axis.units) for axis in plan.axes] == [
        ("ffn0", 8),
        ("heads0", 5),
        ("ffn1", 9),
    ]


@pytest.mark.parametrize("how", ["enable_gqa", "repeat_interleave", "expand"])
def test_a_grouped_attention_is_split_by_key_heads(how: str) -> None:
    plan = stages(small.Grouped(how), tp=3).plan
    assert widths(plan) == {"heads0": (1, 1, 1)}
    assert plan.local_shape("q.weight", 0) == (8, WIDTH)
    assert plan.local_shape("k.weight", 0) == (4, WIDTH)


def test_ranks_hold_the_same_heads_of_query_key_and_value() -> None:
    plan = stages(small.BlockQkv(), tp=3).plan
    assert plan.ranges("qkv.weight", 0) == (((0, 8), (20, 28), (40, 48)), ((0, 10),))
    assert plan.ranges("qkv.bias", 2) == (((16, 20), (36, 40), (56, 60)),)
    assert plan.ranges("out.weight", 1) == (((0, 10),), ((8, 16),))


def test_an_interleaved_projection_is_held_in_one_piece() -> None:
    plan = stages(small.InterleavedQkv(), tp=3).plan
    assert plan.ranges("qkv.weight", 1) == (((24, 48),), ((0, 10),))


def test_both_halves_of_a_fused_gate_are_split_alike() -> None:
    plan = stages(small.FusedGate(), tp=3).plan
    assert plan.ranges("both.weight", 1)[0] == ((3, 6), (11, 14))


def test_a_buffer_of_a_number_for_each_head_is_split() -> None:
    plan = stages(small.BufferedSlopes(), tp=3).plan
    assert plan.ranges("slopes", 1) == (((2, 4),),)


def test_a_table_of_biases_is_split_by_heads() -> None:
    plan = stages(small.RelativeBias(), tp=3).plan
    assert plan.ranges("table.weight", 2) == (((0, 6),), ((4, 5),))


def test_a_row_parallel_bias_is_whole() -> None:
    plan = stages(small.Mlp()).plan
    assert not plan.is_sharded("down.bias")
    assert "down.bias" in {kept.name for kept in plan.kept}


WHOLE: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "norm": (
        small.NormBetween,
        "aten.layer_norm normalizes over it",
        "layer_norm",
        "return self.down(self.norm(self.up(x)))",
    ),
    "norm elsewhere": (
        small.ReadElsewhere,
        "aten.layer_norm normalizes over it",
        "layer_norm",
        "return self.down(F.gelu(h)), self.norm(h)",
    ),
    "softmax": (
        small.SoftmaxBetween,
        "aten.softmax mixes the items of it",
        "softmax",
        "return self.down(torch.softmax(self.up(x), -1))",
    ),
    "mixing view": (
        small.MixedByView,
        "aten.view mixes it with other dims",
        "view",
        "return self.down(h.view(h.shape[0], h.shape[2], h.shape[1]).transpose(1, 2))",
    ),
    "unlike views": (
        small.UnlikeViews,
        "aten.unflatten mixes it with other dims",
        "unflatten_1",
        "four = F.normalize(h.unflatten(-1, (4, 3)), dim=-1).flatten(-2)",
    ),
    "no rule": (
        small.UnknownBetween,
        "there is no rule for autotp_tests.twice",
        "twice",
        "return self.down(twice(self.up(x)))",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole_has_the_reason_the_node_and_the_source_line(name: str) -> None:
    make, why, node, line = WHOLE[name]
    plan = stages(make()).plan
    assert plan.axes == ()
    kept = {item.name: item for item in plan.kept}
    for weight in ("up.weight", "up.bias", "down.weight"):
        assert (kept[weight].reason, kept[weight].node) == (why, node)
        assert written(kept[weight].source, small.Mlp.forward) == line
    assert f"    {why} ({node}, {kept['up.weight'].source})" in str(plan).splitlines()


def test_an_axis_beside_whole_parts_in_a_fused_weight_stays_whole() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h, scores = self.fused(x).split([8, 3], -1)
        return self.down(torch.tanh(h)) + torch.softmax(scores, -1).sum(-1, keepdim=True)

    plan = stages(Fn(forward, fused=nn.Linear(WIDTH, 11), down=nn.Linear(8, WIDTH))).plan
    assert plan.axes == ()
    assert reason(plan, "down.weight") == "it is fused with parts that are not split"


def test_of_two_axes_in_one_weight_the_one_with_more_bytes_is_split() -> None:
    plan = stages(small.LowRank()).plan
    assert [(axis.name, axis.units) for axis in plan.axes] == [("ffn0", 8)]
    assert reason(plan, "up_a.weight") == "the tensor is split by another axis already"


def test_a_parameter_that_the_call_does_not_use_stays_whole() -> None:
    model = small.Mlp()
    model.other = nn.Linear(2, 2)
    assert reason(stages(model).plan, "other.weight") == "the captured call does not use it"


@pytest.mark.parametrize("tp", [2, 3, 6])
@pytest.mark.parametrize("make", [small.Transformer, small.LowRank, small.NormedAttention])
def test_every_parameter_is_split_or_has_a_reason(make: Callable[[], nn.Module], tp: int) -> None:
    given = (torch.zeros(2, 5, dtype=torch.long),) if make is small.Transformer else ()
    plan = stages(make(), *given, tp=tp).plan
    split = {t.name for t in plan.tensors if t.kind == "parameter" and plan.is_sharded(t.name)}
    kept = {item.name for item in plan.kept}
    assert split | kept == {name for name, _ in make().named_parameters()}
    assert not split & kept
    assert all(item.reason for item in plan.kept)


def test_parameters_of_all_ranks_add_up() -> None:
    plan = stages(small.BlockQkv(), tp=3).plan
    total = sum(p.numel() for p in small.BlockQkv().parameters())
    assert sum(plan.parameters(rank) for rank in range(3)) == total + 2 * WIDTH
    assert plan.parameter_bytes(0) == plan.parameters(0) * 8


# ---- a further capture keeps the layout of the first


def test_a_further_capture_lays_tensors_as_the_first_did() -> None:
    first = stages(small.Transformer(), torch.zeros(2, 5, dtype=torch.long), tp=3).plan
    again = stages(
        small.Transformer().eval(), torch.zeros(2, 5, dtype=torch.long), tp=3, layout=first
    )
    assert [t.dims for t in again.plan.tensors] == [t.dims for t in first.tensors]


def test_a_pair_that_the_first_capture_did_not_split_is_left_whole() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.softmax(h, -1) if self.training else torch.tanh(h))

    model = Fn(forward, up=nn.Linear(WIDTH, 8), down=nn.Linear(8, WIDTH))
    first = stages(model).plan
    assert first.axes == ()
    assert stages(model.eval()).plan.axes != ()
    again = stages(model, layout=first).plan
    assert again.axes == ()
    assert reason(again, "up.weight").endswith("lies in another way already")


def test_a_pair_that_the_first_capture_split_comes_before_heavier_ones() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        wide = self.middle(torch.tanh(self.up(x)))
        return self.down(torch.softmax(wide, -1) if self.training else torch.tanh(wide))

    parts = {"up": nn.Linear(WIDTH, 8), "middle": nn.Linear(8, 30), "down": nn.Linear(30, WIDTH)}
    model = Fn(forward, **parts)
    first = stages(model).plan
    assert [axis.units for axis in first.axes] == [8]
    assert [axis.units for axis in stages(model.eval()).plan.axes] == [30]
    assert [axis.units for axis in stages(model, layout=first).plan.axes] == [8]


def test_a_call_that_needs_a_split_tensor_whole_holds_it_and_says_why() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.tanh(h) if self.training else torch.softmax(h, -1))

    model = Fn(forward, up=nn.Linear(WIDTH, 8), down=nn.Linear(8, WIDTH))
    first = stages(model).plan
    again = stages(model.eval(), layout=first).plan
    assert again.held == ("down.weight", "up.bias", "up.weight")
    for name in again.held:
        assert [again.ranges(name, r) for r in range(2)] == [
            first.ranges(name, r) for r in range(2)
        ]
    why = reason(again, "up.weight")
    assert why == "gathered for each call: aten.softmax mixes the items of it"


def test_the_plan_of_an_example_does_not_depend_on_its_sizes() -> None:
    one, two = (stages(small.BlockQkv(), values(*shape, WIDTH)).plan for shape in ((2, 5), (3, 8)))
    assert one == two
