"""Capture: a model and a call become a graph; the model stays as it was."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotp.errors import CaptureError
from autotp.program import Program
from autotp.runtime.regions import (
    enter_autocast,
    enter_grad_mode,
    leave_autocast,
    leave_grad_mode,
)
from tests.passes.stages import Fn, captured, names, nodes, values, written
from tests.small import WIDTH, EagerAttention, Mlp, Residual, SharedBlock, Transformer


def inputs(program: Program) -> list[str]:
    return [node.name for node in program.graph.nodes if node.op == "placeholder"]


def tensors(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "get_attr"]


def test_batch_and_length_are_dynamic_and_the_width_is_not() -> None:
    (shape,) = captured(Mlp()).signature.guards.sizes
    assert shape is not None
    assert [type(size) for size in shape] == [str, str, int]
    assert shape[0] != shape[1]


def test_a_batch_of_one_is_captured_for_one() -> None:
    (shape,) = captured(Mlp(), values(1, 5, WIDTH)).signature.guards.sizes
    assert shape is not None and shape[0] == 1


def test_inputs_that_the_model_adds_have_one_symbol_for_one_size() -> None:
    model = Fn(lambda self, x, y: (x + y) @ self.w, w=(WIDTH, 3))
    one, other = captured(model, values(2, WIDTH), values(2, WIDTH)).signature.guards.sizes
    assert one == other


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_arguments_that_are_the_same_tensor_stay_two_inputs(device: str) -> None:
    x = values(2, WIDTH).to(device)
    program = captured(Fn(lambda self, x, y: (x @ self.w, y * 2), w=(WIDTH, 3)), x, x)
    assert len(inputs(program)) == len(program.signature.inputs) == 2
    first, second = (n for n in program.graph.nodes if n.op == "placeholder")
    assert [str(n.target).split(".")[1] for n in first.users] == ["matmul"]
    assert [str(n.target).split(".")[1] for n in second.users] == ["mul"]


def test_arguments_that_are_no_tensors_are_inputs_without_sizes() -> None:
    model = Fn(lambda self, x, twice, y: x @ self.w * (2 if twice else 1), w=(WIDTH, 3))
    program = captured(model, values(2, WIDTH), True, None)
    assert len(program.signature.inputs) == 3
    assert program.signature.guards.sizes[1:] == (None, None)


def test_keyword_arguments_are_inputs_in_the_order_of_the_call() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    program = captured(Transformer(1), tokens=tokens, targets=tokens)
    assert [name.removeprefix("kwargs_") for name in program.signature.inputs] == [
        "tokens",
        "targets",
    ]


def test_parameters_are_get_attr_nodes_by_their_names() -> None:
    program = captured(Residual(Mlp()))
    assert set(tensors(program)) == {name for name, _ in Residual(Mlp()).named_parameters()}
    assert {spec.kind for spec in program.tensors.values()} == {"parameter"}


def test_a_tied_parameter_is_one_node_and_its_other_name_an_alias() -> None:
    program = captured(Transformer(1), torch.zeros(2, 5, dtype=torch.long))
    assert tensors(program).count("embed.weight") == 1
    assert "head.weight" not in tensors(program)
    assert program.aliases == {"head.weight": "embed.weight"}


def test_a_parameter_of_a_shared_module_has_one_name() -> None:
    program = captured(SharedBlock())
    assert tensors(program).count("layers.0.block.up.weight") == 1
    assert program.aliases["layers.1.block.up.weight"] == "layers.0.block.up.weight"


def test_a_frozen_parameter_is_known_as_frozen() -> None:
    model = Mlp()
    model.up.weight.requires_grad_(False)
    specs = captured(model).tensors
    assert not specs["up.weight"].requires_grad
    assert specs["down.weight"].requires_grad


def test_a_buffer_is_a_buffer() -> None:
    model = Fn(lambda self, x: x * self.scale @ self.w, w=(WIDTH, 3))
    model.register_buffer("scale", torch.ones(WIDTH))
    assert captured(model).tensors["scale"].kind == "buffer"


def test_numbers_that_the_model_writes_out_are_constants_with_their_value() -> None:
    program = captured(Fn(lambda self, x: x @ self.w * torch.tensor([1.0, 2.0, 3.0]), w=(WIDTH, 3)))
    (spec,) = [spec for spec in program.tensors.values() if spec.kind == "constant"]
    assert spec.value is not None and spec.value.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda x, data: torch.tensor(data, device=x.device),
        lambda x, data: torch.as_tensor(data).to(x),
        lambda x, data: x.new_tensor(data),
    ],
)
def test_constants_made_on_the_device_of_an_input_keep_their_value(make: Any) -> None:
    program = captured(Fn(lambda self, x: x @ self.w * make(x, [1.0, 2.0, 3.0]), w=(WIDTH, 3)))
    (spec,) = [spec for spec in program.tensors.values() if spec.kind == "constant"]
    assert spec.value is not None and spec.value.tolist() == [1.0, 2.0, 3.0]


def test_constants_have_one_name_for_one_value() -> None:
    def constants(*data: float) -> set[str]:
        model = Fn(lambda self, x: x @ self.w * torch.tensor(data), w=(WIDTH, 2))
        return {name for name, s in captured(model).tensors.items() if s.kind == "constant"}

    assert constants(1.0, 2.0) == constants(1.0, 2.0)
    assert constants(1.0, 2.0) != constants(1.0, 3.0)


def test_tensors_made_without_a_device_are_on_the_device_of_the_module() -> None:
    model = Fn(lambda self, x: x * torch.arange(x.shape[-1]) @ self.w, w=(WIDTH, 3))
    (arange,) = nodes(captured(model).graph, "aten.arange")
    assert arange.kwargs["device"].target is getattr


def test_a_no_grad_region_is_written_out_between_two_calls() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.tanh(x)
        return (x * scale) @ self.w

    graph = captured(Fn(forward, w=(WIDTH, 3))).graph
    order = [
        node.name
        for node in graph.nodes
        if node.target in (enter_grad_mode, leave_grad_mode) or "tanh" in node.name
    ]
    (enter,), (leave,) = names(graph, enter_grad_mode), names(graph, leave_grad_mode)
    assert order == [enter, "tanh", leave]
    assert nodes(graph, enter_grad_mode)[0].args == (False,)


def test_an_autocast_region_is_written_out_with_its_dtype() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tanh(x) @ self.w

    graph = captured(Fn(forward, w=(WIDTH, 3))).graph
    (enter,) = nodes(graph, enter_autocast)
    assert enter.args[1:] == (True, torch.bfloat16)
    assert len(nodes(graph, leave_autocast)) == 1


def test_conversions_that_change_nothing_are_dropped() -> None:
    model = Fn(lambda self, x: x.to(x.dtype).to(self.w.device) @ self.w.type_as(x), w=(WIDTH, 3))
    assert not nodes(captured(model).graph, "aten.to")


def test_conversions_that_change_the_dtype_stay() -> None:
    model = Fn(lambda self, x: (x.float() @ self.w.float()).double(), w=(WIDTH, 3))
    assert len(nodes(captured(model).graph, "aten.to")) == 3


def test_narrow_is_a_slice_in_other_words() -> None:
    model = Fn(lambda self, x: (x @ self.w).narrow(-1, 1, 2).narrow(-1, -2, 2), w=(WIDTH, 3))
    graph = captured(model).graph
    assert not nodes(graph, "aten.narrow")
    borders = [node.args[2:] for node in nodes(graph, "aten.slice")]
    assert borders in ([(1, 3), (-2, sys.maxsize)], [(1, 3), (0, 2)])


def test_no_literal_of_the_capture_device_is_left() -> None:
    program = captured(EagerAttention())
    (full,) = nodes(program.graph, "aten.full")
    assert full.kwargs["device"].target is getattr
    for node in program.graph.nodes:
        for value in (*node.args, *node.kwargs.values()):
            assert value != torch.device("meta"), node


def test_a_node_knows_the_module_calls_that_it_is_in() -> None:
    program = captured(Residual(Mlp()))
    calls = {n.name: [c for c, _ in n.meta["calls"]] for n in nodes(program.graph, "aten.")}
    assert calls["linear"] == ["block", "block.up"]
    assert calls["gelu"] == ["block"]
    assert calls["layer_norm"] == ["norm"]
    assert calls["add"] == []


def test_a_second_call_of_a_module_is_told_from_the_first() -> None:
    model = Fn(lambda self, x: self.up(torch.tanh(self.up(x))), up=nn.Linear(WIDTH, WIDTH))
    first, second = (n.meta["calls"][-1][0] for n in nodes(captured(model).graph, "aten.linear"))
    assert first == "up"
    assert second.startswith("up@")


def test_source_lines_are_those_of_the_model() -> None:
    (gelu,) = nodes(captured(Mlp()).graph, "aten.gelu")
    frames = [line for line in gelu.meta["stack_trace"].splitlines() if "File" in line]
    assert len(frames) == 1 and "small.py" in frames[0]


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_captured_as_the_model_stands(training: bool) -> None:
    model = Fn(lambda self, x: F.dropout(x @ self.w, 0.5, self.training), w=(WIDTH, 3))
    program = captured(model.train(training))
    assert program.training is training
    found = [n.args[1:] for n in nodes(program.graph, "aten.dropout")]
    assert found == ([(0.5, True)] if training else [])  # one that is off is its operand


def test_the_model_is_as_it_was() -> None:
    model = Residual(Mlp()).double()
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("called"))
    before = copy.deepcopy(model.state_dict())
    held = {name: id(p) for name, p in model.named_parameters()}
    captured(model)
    assert {name: id(p) for name, p in model.named_parameters()} == held
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert model.training and len(model._forward_hooks) == 1


class Chooses(nn.Module):
    """Control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if y.sum() > 0:
            return y
        return -y


def test_control_flow_on_values_is_refused_with_the_module_and_the_line() -> None:
    with pytest.raises(CaptureError) as caught:
        captured(nn.Sequential(nn.Linear(WIDTH, WIDTH), Chooses()))
    text = str(caught.value)
    assert text.startswith("torch.export cannot capture Sequential\n")
    assert "module 1, " in text
    assert "test_capture.py:" in text
    number = text.partition("test_capture.py:")[2].split()[0]
    assert written(f"test_capture.py:{number}", Chooses.forward) == "if y.sum() > 0:"
    assert "try" in text


def test_what_the_model_writes_to_its_buffers_stays_in_the_graph() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    (count,) = nodes(captured(model, values(4, WIDTH)).graph, "aten.add_")
    assert str(count.args[0]) == "_0_num_batches_tracked"


def test_the_program_says_how_it_came_about() -> None:
    (note,) = captured(Mlp()).provenance
    assert note.startswith("captured by torch.export in ")
