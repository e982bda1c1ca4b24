"""f and g: where they go, how many there are, and what is gathered at the borders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

from autotp.runtime.collectives import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)
from autotp.runtime.random import draw, next_seed
from tests import small
from tests.oneprocess import assert_same, parallel, refill
from tests.passes.stages import Fn, captured, names, nodes, stages, values
from tests.small import WIDTH

MOVES = (copy_to_region, reduce_from_region, gather_from_region, scatter_to_region)


def sources(graph: Graph, function: Any) -> list[str]:
    """The names of the values that go through f or g."""
    return [str(node.args[0]) for node in nodes(graph, function)]


def readers(graph: Graph, name: str) -> list[str]:
    node = next(node for node in graph.nodes if node.name == name)
    return [user.name for user in node.users]


def placement(graph: Graph, name: str) -> str:
    return str(next(node for node in graph.nodes if node.name == name).meta["placement"])


def test_an_mlp_has_one_f_at_its_input_and_one_g_at_its_end() -> None:
    made = stages(small.Residual(small.Mlp()))
    assert sources(made.inserted.graph, copy_to_region) == ["layer_norm"]
    assert sources(made.inserted.graph, reduce_from_region) == ["linear_1"]
    assert (made.counts.forward, made.counts.backward, made.counts.gathers) == (1, 1, 0)


def test_one_value_has_one_f_however_many_products_read_it() -> None:
    graph = stages(small.Residual(small.Attention())).inserted.graph
    assert sources(graph, copy_to_region) == ["layer_norm"]
    (f,) = names(graph, copy_to_region)
    assert readers(graph, f) == ["linear", "linear_1", "linear_2"]


def test_readers_outside_the_region_read_the_value_itself() -> None:
    graph = stages(small.Residual(small.Mlp())).inserted.graph
    (residual,) = nodes(graph, "aten.add.Tensor")[1:]
    assert str(residual.args[0]) == "args_0"


def test_the_bias_of_a_row_is_added_once_after_g() -> None:
    graph = stages(small.Mlp()).inserted.graph
    (add,) = nodes(graph, "aten.add")
    (g,) = nodes(graph, reduce_from_region)
    assert add.args[0] is g and str(add.args[1]) == "down_bias"
    assert isinstance(g.args[0], Node) and len(g.args[0].args) == 2, "the product has no bias"


def test_the_bias_of_a_column_stays_in_the_product() -> None:
    graph = stages(small.Mlp()).inserted.graph
    assert str(nodes(graph, "aten.linear")[0].args[2]) == "up_bias"


def test_a_row_without_a_bias_ends_with_g() -> None:
    model = Fn(lambda self, x: torch.tanh(x @ self.up) @ self.down, up=(WIDTH, 8), down=(8, 3))
    graph = stages(model).inserted.graph
    assert not nodes(graph, "aten.add")
    assert len(nodes(graph, reduce_from_region)) == 1


def test_the_factors_of_a_row_product_with_a_bias_are_kept() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.addmm(self.c, torch.tanh(x @ self.up), self.down, beta=0.5, alpha=2.0)

    model = refill(Fn(forward, up=(WIDTH, 8), c=(3,), down=(8, 3)).double())
    lockstep = parallel(model, 3, (values(4, WIDTH),))
    assert lockstep.plan.axes
    assert_same(model, lockstep, (values(5, WIDTH),))


@pytest.mark.parametrize("make", [small.Mlp, small.BlockQkv, small.NormedAttention])
def test_nothing_is_inserted_for_one_rank(make: Any) -> None:
    made = stages(make(), tp=1)
    assert [n.target for n in made.inserted.graph.nodes] == [
        n.target for n in made.program.graph.nodes
    ]
    assert (made.counts.forward, made.counts.backward, made.counts.gathers) == (0, 0, 0)


def test_nothing_is_inserted_where_nothing_is_split() -> None:
    graph = stages(small.NormBetween()).inserted.graph
    assert not any(nodes(graph, move) for move in MOVES)


def test_a_parameter_that_all_heads_share_goes_through_f() -> None:
    graph = stages(small.NormedAttention()).inserted.graph
    assert {"q_norm_weight", "k_norm_weight", "k_norm_bias"} <= set(sources(graph, copy_to_region))
    (norm,) = nodes(graph, "aten.layer_norm")
    assert [str(arg) for arg in norm.args[2:4]] == ["f_k_norm_weight", "f_k_norm_bias"]


def test_the_gradient_of_a_parameter_that_all_heads_share_needs_its_f() -> None:
    model = refill(small.NormedAttention().double())
    lockstep = parallel(model, 3, (values(2, 5, WIDTH),))
    assert_same(model, lockstep, (values(3, 7, WIDTH),))
    parts = [dict(rank.named_parameters())["q_norm.weight"].grad for rank in lockstep.ranks]
    assert all(torch.equal(part, parts[0]) for part in parts if part is not None)


def test_a_part_of_a_low_rank_column_that_stays_whole_goes_through_f() -> None:
    graph = stages(small.LowRank()).inserted.graph
    through = set(sources(graph, copy_to_region))
    assert {"args_0", "linear_1"} == through
    assert str(nodes(graph, "aten.linear")[1].args[0]) == "args_0", "up_a computes whole values"


def test_every_row_of_a_low_rank_layer_has_a_g() -> None:
    graph = stages(small.LowRank()).inserted.graph
    assert len(nodes(graph, reduce_from_region)) == 2


def test_f_goes_before_a_view_that_only_split_products_read() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return self.down(torch.tanh(self.up(h.flatten(0, 1)))) + self.gate(h).flatten(0, 1)

    parts = {"up": nn.Linear(WIDTH, 8), "down": nn.Linear(8, 3), "gate": nn.Linear(WIDTH, 3)}
    graph = stages(Fn(forward, **parts)).inserted.graph
    assert sources(graph, copy_to_region) == ["tanh"]
    assert placement(graph, "flatten") == "R"
    assert readers(graph, "f_tanh") == ["flatten"]


def test_f_before_a_view_is_shared_with_other_readers() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return (self.up(h.flatten(0, 1)) * self.gate(h).flatten(0, 1)) @ self.down

    parts = {"up": nn.Linear(WIDTH, 8), "gate": nn.Linear(WIDTH, 8), "down": (8, 3)}
    graph = stages(Fn(forward, **parts)).inserted.graph
    assert sources(graph, copy_to_region) == ["tanh"]
    assert sorted(readers(graph, "f_tanh")) == ["flatten", "linear_1"]


def test_f_stays_behind_a_view_that_is_read_elsewhere() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.tanh(x).flatten(0, 1)
        return self.down(torch.tanh(self.up(flat))), flat

    model = Fn(forward, up=nn.Linear(WIDTH, 8), down=nn.Linear(8, 3))
    assert sources(stages(model).inserted.graph, copy_to_region) == ["flatten"]


def test_values_without_a_gradient_need_no_f() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.tanh(x).mean(-1, keepdim=True)
        return self.down(self.up(x) * scale)

    graph = stages(Fn(forward, up=nn.Linear(WIDTH, 8), down=nn.Linear(8, 3))).inserted.graph
    assert sources(graph, copy_to_region) == ["args_0"]


def test_masks_and_positions_need_no_f() -> None:
    graph = stages(small.EagerAttention()).inserted.graph
    assert sources(graph, copy_to_region) == ["args_0"]


def test_an_f_for_an_input_is_not_counted_unless_it_gets_a_gradient() -> None:
    assert stages(small.Mlp()).counts.backward == 0
    assert stages(small.Mlp(), values(2, 5, WIDTH).requires_grad_()).counts.backward == 1


def test_an_output_that_is_split_is_gathered_with_the_ranges_of_all_ranks() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        return self.down(torch.tanh(h)), h

    made = stages(Fn(forward, up=nn.Linear(WIDTH, 7), down=nn.Linear(7, 3)), tp=3)
    (gather,) = nodes(made.inserted.graph, gather_from_region)
    assert gather.args[1:] == (2, (((0, 3),), ((3, 5),), ((5, 7),)))
    assert gather.meta["placement"] == "I"
    assert made.counts.gathers == 1
    (output,) = (n for n in made.inserted.graph.nodes if n.op == "output")
    assert output.args[0][1] is gather


def test_an_output_that_is_whole_is_not_gathered() -> None:
    assert not nodes(stages(small.TwoRows()).inserted.graph, gather_from_region)


def test_an_input_that_meets_split_values_is_scattered() -> None:
    model = Fn(
        lambda self, x, gate: self.down(self.up(x) * gate),
        up=nn.Linear(WIDTH, 7),
        down=nn.Linear(7, 3),
    )
    graph = stages(model, values(2, 5, WIDTH), values(2, 5, 7), tp=3).inserted.graph
    (scatter,) = nodes(graph, scatter_to_region)
    assert (str(scatter.args[0]), scatter.args[1]) == ("args_1", 2)
    assert scatter.meta["placement"].startswith("S(2: ffn0")


def test_positions_counted_along_heads_are_scattered() -> None:
    graph = stages(small.SlopedAttention(), tp=3).inserted.graph
    (scatter,) = nodes(graph, scatter_to_region)
    assert scatter.args[1:] == (0, (((0, 2),), ((2, 4),), ((4, 5),)))
    assert len(nodes(graph, "aten.arange")) == 2


def test_placements_say_where_each_value_lies() -> None:
    graph = stages(small.BlockQkv()).inserted.graph
    assert placement(graph, "args_0") == "I"
    assert placement(graph, "f_args_0") == "R"
    assert placement(graph, "qkv_weight").startswith("S(0: heads0*")
    assert placement(graph, "scaled_dot_product_attention") == "S(1: heads0)"
    assert placement(graph, "linear_1") == "P"
    assert placement(graph, "g_linear_1") == "I"


# ---- random numbers


class Dropped(small.Mlp):
    """Dropout inside a region and outside of it."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.up(F.dropout(x, 0.1, self.training))), 0.2, self.training)
        return F.dropout(self.down(h), 0.3, self.training)


def draws(graph: Graph) -> list[tuple[Any, ...]]:
    return [(node.args[1], node.args[3], node.args[5]) for node in nodes(graph, draw)]


def test_dropout_draws_from_the_stream_of_its_placement_and_is_numbered() -> None:
    graph = stages(Dropped()).inserted.graph
    assert draws(graph) == [("replicated", 1, 0.1), ("sharded", 2, 0.2), ("replicated", 3, 0.3)]


def test_a_call_has_one_seed_at_its_head() -> None:
    graph = stages(Dropped()).inserted.graph
    (seed,) = nodes(graph, next_seed)
    assert next(iter(graph.nodes)) is seed
    assert all(node.args[2] is seed for node in nodes(graph, draw))


def test_a_model_in_evaluation_draws_nothing() -> None:
    graph = stages(Dropped().eval()).inserted.graph
    assert not nodes(graph, draw) and not nodes(graph, next_seed)


def test_dropout_with_probability_zero_draws_nothing() -> None:
    model = Fn(lambda self, x: F.dropout(x @ self.w, 0.0, True), w=(WIDTH, 3))
    assert not nodes(stages(model).inserted.graph, draw)


def test_dropout_of_attention_draws_from_the_split_stream() -> None:
    class DropsScores(small.Attention):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    (found,) = nodes(stages(DropsScores()).inserted.graph, draw)
    assert found.args[1] == "sharded"
    assert found.args[0] is torch.ops.aten.scaled_dot_product_attention.default


def test_the_captured_program_is_not_changed() -> None:
    made = stages(Dropped())
    again = captured(Dropped())
    assert [str(n) for n in made.program.graph.nodes] == [str(n) for n in again.graph.nodes]


def test_every_node_of_the_captured_program_is_there_again() -> None:
    made = stages(small.BlockQkv())
    kept = [n.name for n in made.inserted.graph.nodes]
    assert set(n.name for n in made.program.graph.nodes) <= set(kept)
