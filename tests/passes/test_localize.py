"""Localisation: every literal that states the size of a split dim is the rank's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from tests import small
from tests.oneprocess import assert_same, parallel, refill
from tests.passes.stages import Fn, Stages, nodes, stages, values
from tests.small import HEADS, SIZE, WIDTH


def literals(made: Stages, target: str, argument: int, tp: int = 3) -> list[Any]:
    """An argument of the one node that calls `target`, on every rank; sizes of values as `...`."""
    found = []
    for rank in range(tp):
        (node,) = nodes(made.local(rank).graph, target)
        value = node.args[argument]
        if isinstance(value, (list, tuple)):
            value = [... if isinstance(item, Node) else item for item in value]
        found.append(value)
    return found


def check(model: nn.Module, tp: int = 3) -> None:
    refill(model)
    lockstep = parallel(model, tp, (values(2, 5, WIDTH),))
    assert lockstep.plan.axes
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def made_of(between: Any, inner: int = HEADS * SIZE) -> nn.Module:
    """Two products with something between them."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down(between(self.up(x)))

    return Fn(forward, up=nn.Linear(WIDTH, inner), down=nn.Linear(inner, WIDTH)).double()


def test_a_view_into_heads_has_the_heads_of_the_rank() -> None:
    def between(h: Tensor) -> Tensor:
        return F.normalize(h.view(h.shape[0], h.shape[1], HEADS, SIZE), dim=-1).flatten(-2)

    made = stages(made_of(between), tp=3)
    assert literals(made, "aten.view", 1) == [[..., ..., 2, 4], [..., ..., 2, 4], [..., ..., 1, 4]]
    check(made_of(between))


def test_a_view_with_one_size_left_open_stays_as_it_is() -> None:
    def between(h: Tensor) -> Tensor:
        return F.normalize(h.view(h.shape[0], h.shape[1], -1, SIZE), dim=-1).flatten(-2)

    assert literals(stages(made_of(between), tp=3), "aten.view", 1) == [[..., ..., -1, 4]] * 3
    check(made_of(between))


def test_a_view_that_joins_heads_has_the_width_of_the_rank() -> None:
    def between(h: Tensor) -> Tensor:
        h = F.normalize(h.unflatten(-1, (HEADS, SIZE)), dim=-1)
        return h.reshape(h.shape[0], h.shape[1], HEADS * SIZE)

    made = stages(made_of(between), tp=3)
    assert literals(made, "aten.reshape", 1) == [[..., ..., 8], [..., ..., 8], [..., ..., 4]]
    assert literals(made, "aten.unflatten", 2) == [[2, 4], [2, 4], [1, 4]]
    check(made_of(between))


def test_batch_times_heads_is_scaled_by_the_share_of_the_rank() -> None:
    def between(h: Tensor) -> Tensor:
        b, s = h.shape[:2]
        h = h.view(b, s, HEADS, SIZE).transpose(1, 2).reshape(b * HEADS, s, SIZE)
        h = torch.bmm(torch.softmax(torch.bmm(h, h.mT), -1), h)
        return h.view(b, HEADS, s, SIZE).transpose(1, 2).reshape(b, s, HEADS * SIZE)

    check(made_of(between))


def test_an_expand_has_the_size_of_the_rank() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down(self.up(x) * torch.tanh(self.one).expand(7))

    parts = {"up": nn.Linear(WIDTH, 7), "one": (1,), "down": nn.Linear(7, WIDTH)}
    made = stages(Fn(forward, **parts), tp=3)
    assert literals(made, "aten.expand", 1) == [[3], [2], [2]]
    check(Fn(forward, **parts).double())


def test_an_expand_of_key_heads_has_the_heads_of_the_rank() -> None:
    made = stages(small.Grouped("expand"), tp=2)
    for rank, heads in enumerate((2, 1)):
        sizes = [n.args[1] for n in nodes(made.local(rank).graph, "aten.expand")]
        assert [[size[1], size[2]] for size in sizes] == [[heads, 2]] * 2


def test_a_split_into_query_key_and_value_has_the_widths_of_the_rank() -> None:
    made = stages(small.BlockQkv(), tp=3)
    assert literals(made, "aten.split_with_sizes", 1) == [[8, 8, 8], [8, 8, 8], [4, 4, 4]]


def test_a_chunk_of_uneven_widths_becomes_a_split() -> None:
    made = stages(small.FusedGate(), tp=3)
    assert literals(made, "aten.split_with_sizes", 1) == [[3, 3], [3, 3], [2, 2]]
    assert not nodes(made.local(0).graph, "aten.chunk")


def test_a_split_of_a_dim_that_is_whole_stays_as_it_is() -> None:
    made = stages(small.InterleavedQkv(), tp=3)
    assert len(nodes(made.local(2).graph, "aten.chunk")) == 1


def test_borders_of_a_slice_are_those_of_the_rank() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.tanh(h[..., :7]) * h[..., 7:])

    parts = {"up": nn.Linear(WIDTH, 14), "down": nn.Linear(7, WIDTH)}
    made = stages(Fn(forward, **parts), tp=3)
    for rank, width in enumerate((3, 2, 2)):
        borders = [n.args[2:4] for n in nodes(made.local(rank).graph, "aten.slice")]
        assert borders == [(0, width), (width, 2 * width)]
    check(Fn(forward, **parts).double())


def test_borders_counted_from_the_end_are_those_of_the_rank() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.tanh(h[..., :-7]) * h[..., -7:])

    check(Fn(forward, up=nn.Linear(WIDTH, 14), down=nn.Linear(7, WIDTH)).double())


def test_a_slice_with_a_step_takes_every_second_item_of_the_rank() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.tanh(h[..., ::2]) * h[..., 1::2])

    check(Fn(forward, up=nn.Linear(WIDTH, 14), down=nn.Linear(7, WIDTH)).double())


def test_narrow_takes_a_length_and_not_an_end() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.tanh(h.narrow(-1, 0, 7)) * h.narrow(-1, 7, 7))

    check(Fn(forward, up=nn.Linear(WIDTH, 14), down=nn.Linear(7, WIDTH)).double())


@pytest.mark.parametrize("split", ["split", "tensor_split", "split_with_sizes"])
def test_splits_in_other_words_compute_the_same(split: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        how = {"split": 7, "tensor_split": 2, "split_with_sizes": [7, 7]}[split]
        one, two = getattr(h, split)(how, dim=-1)
        return self.down(torch.tanh(one) * two)

    check(Fn(forward, up=nn.Linear(WIDTH, 14), down=nn.Linear(7, WIDTH)).double())


def test_copies_of_key_heads_are_as_many_on_every_rank() -> None:
    made = stages(small.Grouped("repeat_interleave"), tp=2)
    for rank in range(2):
        assert [n.args[1] for n in nodes(made.local(rank).graph, "aten.repeat_interleave")] == [
            2,
            2,
        ]


def test_a_repeat_that_makes_a_split_dim_repeats_as_often_as_the_rank_has_units() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down(self.up(x) * torch.tanh(self.one).repeat(7))

    parts = {"up": nn.Linear(WIDTH, 7), "one": (1,), "down": nn.Linear(7, WIDTH)}
    made = stages(Fn(forward, **parts), tp=3)
    assert literals(made, "aten.repeat", 1) == [[3], [2], [2]]
    check(Fn(forward, **parts).double())


def test_a_repeat_over_batch_and_heads_computes_the_same() -> None:
    def between(h: Tensor) -> Tensor:
        b, s = h.shape[:2]
        slopes = torch.arange(HEADS, device=h.device).to(h.dtype)[:, None, None].repeat(b, 1, 1)
        h = h.view(b, s, HEADS, SIZE).transpose(1, 2).reshape(b * HEADS, s, SIZE)
        h = F.normalize(h, dim=-1) * slopes
        return h.view(b, HEADS, s, SIZE).transpose(1, 2).reshape(b, s, HEADS * SIZE)

    check(made_of(between))


@pytest.mark.parametrize("make", [torch.ones, torch.zeros, lambda *a, **k: torch.full(a, 0.5, **k)])
def test_new_tensors_have_the_size_of_the_rank(make: Any) -> None:
    def between(h: Tensor) -> Tensor:
        return torch.tanh(h) + make(h.shape[0], h.shape[1], 7, dtype=h.dtype, device=h.device)

    made = stages(made_of(between, 7), tp=3)
    target = {torch.ones: "aten.ones", torch.zeros: "aten.zeros"}.get(make, "aten.full")
    assert literals(made, target, 0) == [[..., ..., 3], [..., ..., 2], [..., ..., 2]]
    check(made_of(between, 7))


def test_new_tensors_like_another_compute_the_same() -> None:
    check(made_of(lambda h: h * h.new_full((h.shape[0], 1, 7), 0.5) + torch.ones_like(h), 7))


def test_a_squeeze_does_not_take_away_a_dim_of_one_unit() -> None:
    def between(h: Tensor) -> Tensor:
        return F.normalize(h.unflatten(-1, (HEADS, SIZE)), dim=-1)[:, :, None].squeeze().flatten(-2)

    made = stages(made_of(between), tp=3)
    (squeeze,) = nodes(made.local(2).graph, "aten.squeeze")
    assert squeeze.args[1] == [2]
    check(made_of(between))


def test_sizes_that_state_no_split_dim_are_left_alone() -> None:
    made = stages(small.NormBetween(), tp=3)
    for rank in range(3):
        assert [str(n.args) for n in made.local(rank).graph.nodes] == [
            str(n.args) for n in made.inserted.graph.nodes
        ]


@pytest.mark.parametrize(
    "make", [small.BlockQkv, small.SlopedAttention, lambda: small.Grouped("expand")]
)
def test_all_ranks_have_the_same_operators_in_the_same_order(make: Any) -> None:
    made = stages(make(), tp=3)
    shapes = [[(n.op, n.name, str(n.target)) for n in made.local(r).graph.nodes] for r in range(3)]
    assert shapes[0] == shapes[1] == shapes[2]


def test_the_program_for_all_ranks_is_not_changed() -> None:
    made = stages(small.BlockQkv(), tp=3)
    before = [(n.target, str(n.args)) for n in made.inserted.graph.nodes]
    made.local(0), made.local(2)
    assert before == [(n.target, str(n.args)) for n in made.inserted.graph.nodes]
