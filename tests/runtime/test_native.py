"""The functions that code is generated with are the operators that stand in graphs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import autotp
from autotp.runtime.native import FUNCTIONS, METHODS, native

aten = torch.ops.aten
X, Y = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double()
SQUARE, ROW = torch.randn(3, 3).double(), torch.randn(3).double()
BITS, IDS = X > 0, torch.tensor([[2, 0], [1, 1]])
PAIRS = ["add", "sub", "mul", "div"]
UNARY = [
    *("abs", "clone", "contiguous", "cos", "exp", "neg", "relu", "rsqrt", "sigmoid", "sin"),
    *("sqrt", "tanh"),
]
ORDERS = ["eq", "ne", "le", "lt", "ge", "gt"]

SLICES = [(1,), (1, 1), (2, -3, -1), (0, None, 1), (2, 0, 4, 2)]
CALLS: list[tuple[Any, ...]] = [
    *((getattr(aten, name).Tensor, X, Y) for name in [*PAIRS, *ORDERS]),
    *((getattr(aten, name).Tensor, X, 0.5) for name in PAIRS),
    (aten.add.Tensor, X, Y, {"alpha": 2}),
    *((getattr(aten, name).Scalar, X, 0.25) for name in ORDERS),
    *(
        (getattr(aten, name).default, X.abs() + 0.5)
        for name in UNARY
    ),
    *((getattr(aten, name).default, BITS) for name in ("bitwise_not", "logical_not")),
    *((getattr(aten, f"bitwise_{name}").Tensor, BITS, ~BITS | (Y > 0)) for name in ("and", "or")),
    (aten.logical_and.default, BITS, Y > 0),
    *((aten.arange.default, 5, kwargs) for kwargs in ({}, {"dtype": torch.float32})),
    (aten.arange.default, 5, {"device": torch.device("cpu"), "pin_memory": False}),
    (aten.arange.start, 2, 7),
    (aten.arange.start_step, 2, 9, 3),
    (aten.addmm.default, ROW, SQUARE, SQUARE, {"alpha": 2, "beta": 3}),
    (aten.baddbmm.default, X, torch.randn(2, 3, 5).double(), torch.randn(2, 5, 4).double()),
    (aten.bmm.default, X, Y.mT),
    (aten.mm.default, SQUARE, SQUARE),
    (aten.matmul.default, SQUARE, X),
    (aten.linear.default, X.mT, SQUARE),
    (aten.linear.default, X.mT, SQUARE, ROW),
    (aten.cat.default, [X, Y], -1),
    (aten.stack.default, [X, Y], 1),
    (aten.cumsum.default, X, -1),
    (aten.dropout.default, X, 0.5, False),
    (aten.embedding.default, SQUARE, IDS, 0),
    (aten.embedding.default, SQUARE, IDS),
    (aten.gelu.default, X),
    (aten.gelu.default, X, {"approximate": "tanh"}),
    (aten.layer_norm.default, X.mT, [3], ROW, ROW, 1e-3),
    (aten.layer_norm.default, X, [4]),
    (aten.rms_norm.default, X.mT, [3], ROW, 1e-3),
    (aten.masked_fill.Scalar, X, BITS, -1.0),
    (aten.mean.dim, X, [-1], True),
    (aten.sum.dim_IntList, X, [0, 2]),
    (aten.permute.default, X, [2, 0, 1]),
    (aten.transpose.int, X, 1, 2),
    (aten.unsqueeze.default, X, -1),
    (aten.pow.Tensor_Scalar, X, 3.0),
    (aten.reshape.default, X, [6, -1]),
    (aten.view.default, X, [6, -1]),
    (aten.expand.default, X[:, :1], [-1, 3, -1]),
    (aten.softmax.int, X, -1),
    (aten.softmax.int, X.float(), 1, torch.float64),
    (aten.split_with_sizes.default, X, [1, 2], 1),
    (aten.where.self, BITS, X, Y),
    (aten.to.dtype, X, torch.float32),
    (aten.type_as.default, X, IDS),
    (aten.sym_size.int, X, 1),
    (aten.scaled_dot_product_attention.default, X, Y, X, BITS.mT[:, :3, :3], {"scale": 0.3}),
    (aten.scaled_dot_product_attention.default, X, Y, X, None, 0.0, True),
    *((aten.slice.Tensor, X, *rest) for rest in SLICES),
    (aten.slice.Tensor, X, -1, 1, 3),
]  # fmt: skip


def graph_of(op: Any, *args: Any) -> tuple[Graph, list[Tensor]]:
    kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
    graph, values = Graph(), list[Tensor]()

    def operand(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [operand(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        values.append(value)
        return graph.placeholder(f"x{len(values)}")

    given = tuple(operand(value) for value in (args[:-1] if kwargs else args))
    given = tuple(v for v in given if v != {}) if kwargs == {} else given
    graph.output(graph.call_function(op, given, dict(kwargs)))
    return graph, values


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_a_function_is_the_operator(call: tuple[Any, ...]) -> None:
    graph, values = graph_of(*call)
    made = native(graph)
    wanted = GraphModule({}, graph)(*values)
    found = GraphModule({}, made)(*values)
    pairs = (
        zip(found, wanted, strict=True) if isinstance(wanted, (list, tuple)) else [(found, wanted)]
    )
    for mine, theirs in pairs:
        if isinstance(theirs, Tensor):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
            assert mine.stride() == theirs.stride()
        else:
            assert mine == theirs
    node = next(node for node in made.nodes if node.op in ("call_function", "call_method"))
    minor = call[0] is aten.slice.Tensor and len(call) > 2 and call[2] < 0
    assert isinstance(node.target, torch._ops.OpOverload) == minor
    assert isinstance(_only(graph).target, torch._ops.OpOverload)  # the graph itself is as before


def _only(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.op == "call_function")


def test_every_function_is_tried() -> None:
    tried = {call[0] for call in CALLS}
    assert {*FUNCTIONS, *METHODS, aten.slice.Tensor} == tried
    assert operator.getitem not in FUNCTIONS.values()


def test_modules_and_parameters_of_any_name_are_read() -> None:
    """Keywords, quotes, line ends, letters that Python takes for others, lone surrogates."""
    names = ["lambda", "class", "0", "q\"uo'te\n\\", "\ufb01", "\ud800", "{x}", "plain"]
    pairs = list(zip(names[::2], names[1::2], strict=True))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            wide = {first: nn.Linear(8, 13) for first, _ in pairs}
            narrow = {second: nn.Linear(13, 8) for _, second in pairs}
            self.parts = nn.ModuleDict({**wide, **narrow})
            self.register_parameter("def", nn.Parameter(torch.randn(8)))

        def forward(self, x: Tensor) -> Tensor:
            for first, second in pairs:
                x = x + self.parts[second](self.parts[first](x).tanh())
            return x * getattr(self, "def")

    model, example = Named(), (torch.randn(2, 8),)
    plan = autotp.plan(model, 3, example_inputs=example)
    assert all(plan.is_sharded(f"parts.{name}.weight") for name in names)
    report = autotp.verify(model, tp=3, example_inputs=example)
    assert report.ok, str(report)
