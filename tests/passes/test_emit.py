"""Emission: one flat graph becomes a graph for every module call, under the model's own names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from autotp.errors import PlanError
from autotp.runtime.block import Block, BlockList
from autotp.runtime.lockstep import Lockstep
from passes.emit import emit
from tests import small
from tests.oneprocess import assert_same, parallel, refill
from tests.passes.stages import Fn, nodes, stages, values
from tests.small import WIDTH


def graphs(model: nn.Module, tp: int = 2) -> dict[str, tuple[Graph, ...]]:
    return dict(emit(stages(model, tp=tp).local(0)).graphs)


def calls(graph: Graph) -> list[tuple[str, int]]:
    """Calls of submodules, with the number of the graph that each wants."""
    return [(str(n.target), n.kwargs["_graph"]) for n in graph.nodes if n.op == "call_module"]  # type: ignore[misc]


@functools.cache
def transformer(layers: int = 2) -> tuple[nn.Module, Lockstep]:
    model = refill(small.Transformer(layers).double())
    return model, parallel(model, 3, (torch.zeros(2, 5, dtype=torch.long),))


def residual_pair() -> nn.Module:
    return nn.Sequential(small.Residual(small.Mlp()), small.Residual(small.Mlp()))


def test_every_module_that_is_called_has_a_graph() -> None:
    found = graphs(residual_pair())
    assert set(found) == {"", *(name for name, _ in residual_pair().named_modules() if name)}
    assert all(len(of_module) == 1 for of_module in found.values())


def test_a_module_calls_its_children_by_their_names() -> None:
    found = graphs(residual_pair())
    assert calls(found[""][0]) == [("0", 0), ("1", 0)]
    assert calls(found["0"][0]) == [("norm", 0), ("block", 0)]
    assert calls(found["0.block"][0]) == [("up", 0), ("down", 0)]
    assert calls(found["0.block.up"][0]) == []


def test_parameters_are_attributes_of_the_module_that_has_them() -> None:
    (graph,) = graphs(residual_pair())["1.block.up"]
    assert {str(n.target) for n in graph.nodes if n.op == "get_attr"} == {
        "weight",
        "bias",
        "_tp_group",
    }


def test_the_collective_of_a_row_is_in_the_row_and_that_of_a_column_is_before_it() -> None:
    from autotp.runtime.collectives import copy_to_region, reduce_from_region

    found = graphs(small.Mlp())
    assert len(nodes(found["down"][0], reduce_from_region)) == 1
    assert len(nodes(found["up"][0], copy_to_region)) == 1


def test_the_f_of_several_products_is_in_the_module_that_has_them_all() -> None:
    from autotp.runtime.collectives import copy_to_region

    found = graphs(small.Residual(small.GatedMlp()))
    assert len(nodes(found["block"][0], copy_to_region)) == 1
    assert not nodes(found["block.gate"][0], copy_to_region)


def test_identical_blocks_have_identical_code() -> None:
    found = graphs(residual_pair())
    for name in ("", ".norm", ".block", ".block.up", ".block.down"):
        one, two = (found[f"{i}{name}"][0].python_code("self").src for i in (0, 1))
        assert one == two, name


def test_blocks_of_other_widths_have_code_of_their_own_only_where_sizes_are() -> None:
    found = graphs(nn.Sequential(small.Residual(small.Mlp()), small.Residual(small.Mlp(6))))
    one, two = (found[f"{i}.block"][0].python_code("self").src for i in (0, 1))
    assert one == two


def test_more_layers_compile_no_more_functions() -> None:
    counts = [len(transformer(layers)[1].ranks[0].compiler) for layers in (2, 4)]
    assert counts[0] == counts[1]


def test_a_module_that_is_called_twice_has_two_graphs() -> None:
    model = Fn(lambda self, x: self.up(torch.tanh(self.up(x)) + 1), up=nn.Linear(WIDTH, WIDTH))
    found = graphs(model)
    assert len(found["up"]) == 2
    assert calls(found[""][0]) == [("up", 0), ("up", 1)]


def test_a_module_that_is_called_twice_computes_the_same() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.block(torch.tanh(self.block(x)))

    model = refill(Fn(forward, block=small.Residual(small.Mlp())).double())
    lockstep = parallel(model, 3, (values(2, 5, WIDTH),))
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def test_a_module_that_two_parents_have_numbers_its_graphs_in_one_row() -> None:
    program = stages(small.SharedBlock()).local(0)
    same = {"layers.1.block": "layers.0.block", "layers.1.block.up": "layers.0.block.up"}
    found = emit(program, same=same).graphs
    assert len(found["layers.0.block"]) == 2 and "layers.1.block" not in found
    assert calls(found["layers.1"][0])[-1] == ("block", 1)


def test_graphs_of_a_further_capture_are_numbered_on() -> None:
    program = stages(small.Mlp()).local(0)
    found = emit(program, first={"": 1, "up": 1, "down": 3}).graphs
    assert calls(found[""][0]) == [("up", 1), ("down", 3)]


def test_a_call_whose_operators_are_interleaved_with_others_is_written_out() -> None:
    class Late(nn.Module):
        """Calls a function given by its caller between its own operators."""

        def forward(self, x: Tensor, then: Any) -> Tensor:
            return torch.tanh(then(torch.sin(x)))

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.late(x, lambda y: self.up(y))

    found = graphs(Fn(forward, late=Late(), up=nn.Linear(WIDTH, 3)))
    assert [n.op for n in found[""][0].nodes].count("output") == 1
    model = refill(Fn(forward, late=Late(), up=nn.Linear(WIDTH, 3)).double())
    lockstep = parallel(model, 2, (values(2, 5, WIDTH),))
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def test_a_module_may_return_several_values_and_take_several() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = self.up(x)
            return self.down(torch.tanh(h) * y.sum(-1, keepdim=True)), torch.sin(x)

    def forward(self: Any, x: Tensor) -> Tensor:
        one, two = self.both(x, x + 1)
        return one * two

    model = refill(Fn(forward, both=Both()).double())
    lockstep = parallel(model, 3, (values(2, 5, WIDTH),))
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def test_a_parameter_of_another_module_is_handed_in() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(x, weight)

    model = Fn(
        lambda self, x: self.reads(torch.tanh(self.up(x)), self.down),
        reads=Reads(),
        up=nn.Linear(WIDTH, 7),
        down=(3, 7),
    )
    (graph,) = graphs(model)["reads"]
    assert not [n for n in graph.nodes if n.op == "get_attr" and n.target != "_tp_group"]
    refill(model.double())
    lockstep = parallel(model, 3, (values(2, 5, WIDTH),))
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


# ---- what the user holds


def test_the_hierarchy_is_the_models() -> None:
    model, lockstep = transformer()
    for rank in lockstep.ranks:
        theirs = [(name, module._get_name()) for name, module in model.named_modules()]
        mine = [(name, module._get_name()) for name, module in rank.named_modules()]
        assert [name for name, _ in mine] == [name for name, _ in theirs]
        assert [kind for _, kind in mine if kind not in ("ModuleList", "ModuleDict")] == [
            kind for _, kind in theirs if kind not in ("ModuleList", "ModuleDict")
        ]


def test_parameters_have_the_names_dtypes_and_the_order_of_the_models() -> None:
    model, lockstep = transformer()
    for rank in lockstep.ranks:
        mine = [(name, p.dtype, p.requires_grad) for name, p in rank.named_parameters()]
        assert mine == [(name, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
        assert list(rank.state_dict()) == list(model.state_dict())


def test_a_tied_weight_is_one_parameter() -> None:
    _, lockstep = transformer()
    for rank in lockstep.ranks:
        assert rank.head.weight is rank.embed.weight


def test_a_shared_module_is_one_module() -> None:
    lockstep = parallel(small.SharedBlock().double(), 2, (values(2, 5, WIDTH),))
    layers = lockstep.ranks[1].layers
    assert layers[0].block is layers[1].block


def test_a_frozen_parameter_stays_frozen() -> None:
    model = small.Mlp().double()
    model.up.weight.requires_grad_(False)
    lockstep = parallel(model, 2, (values(2, 5, WIDTH),))
    assert not lockstep.ranks[1].up.weight.requires_grad


def test_printing_a_block_shows_how_its_weight_is_split() -> None:
    _, lockstep = transformer()
    assert "weight [ffn0, 10]" in repr(lockstep.ranks[0].get_submodule("blocks.1.block.up"))


def test_positional_and_keyword_calls_are_served_by_one_capture() -> None:
    model, lockstep = transformer()
    tokens = torch.ones(3, 4, dtype=torch.long)
    expected = model(tokens)["logits"]
    before = len(lockstep.ranks[0].captures)
    for found in (lockstep(tokens), lockstep(tokens=tokens), lockstep(tokens, None)):
        assert torch.allclose(found["logits"], expected)
    assert len(lockstep.ranks[0].captures) == before


def test_a_call_with_further_arguments_is_captured_and_shares_the_parameters() -> None:
    model = refill(small.Transformer(1).double())
    lockstep = parallel(model, 2, (torch.zeros(2, 5, dtype=torch.long),))
    held = [id(p) for p in lockstep.parameters()]
    tokens = torch.ones(3, 4, dtype=torch.long)
    assert_same(model, lockstep, {"tokens": tokens, "targets": tokens})
    assert len(lockstep.ranks[0].captures) == 2
    assert [id(p) for p in lockstep.parameters()] == held


def test_an_argument_that_the_model_does_not_take_is_refused_as_the_model_does() -> None:
    _, lockstep = transformer()
    with pytest.raises(TypeError, match="token_types"):
        lockstep(torch.ones(3, 4, dtype=torch.long), token_types=None)


def test_hooks_on_a_module_are_called_with_its_values() -> None:
    model = refill(small.Residual(small.Mlp()).double())
    rank = parallel(model, 1, (values(2, 5, WIDTH),)).ranks[0]
    seen: list[Tensor] = []
    rank.block.register_forward_hook(lambda module, args, out: seen.append(out))
    x = values(3, 7, WIDTH)
    rank(x)
    assert torch.allclose(seen[0], model.block(model.norm(x)))


def test_every_module_but_lists_is_a_block() -> None:
    _, lockstep = transformer()
    kinds = {type(m) for m in lockstep.ranks[0].modules()} - {type(lockstep.ranks[0])}
    assert kinds <= {Block, BlockList, nn.ModuleList, nn.ModuleDict}


class Named(nn.Module):
    """A model with a submodule of a given name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(WIDTH, 7))
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(getattr(self, self.name)(x)))


@pytest.mark.parametrize("name", ["group", "codes", "plan", "rank", "logits"])
def test_a_module_may_have_any_name(name: str) -> None:
    model = refill(nn.Sequential(Named(name)).double())
    lockstep = parallel(model, 2, (values(2, 5, WIDTH),))
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


@pytest.mark.parametrize("name", ["plan", "rank", "options", "skeleton", "debug", "group"])
def test_a_name_that_the_result_needs_itself_is_refused_at_the_root(name: str) -> None:
    with pytest.raises(PlanError, match=f"is named '{name}'"):
        parallel(Named(name).double(), 2, (values(2, 5, WIDTH),))


def test_a_sequence_of_modules_can_be_indexed() -> None:
    model = refill(small.Residual(nn.Sequential(small.Mlp(), nn.Tanh(), small.Mlp())).double())
    lockstep = parallel(model, 2, (values(2, 5, WIDTH),))
    rank = lockstep.ranks[0].block
    assert len(rank) == 3 and rank[2].up is rank[-1].up and next(iter(rank)) is rank[0]
