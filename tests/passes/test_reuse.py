"""Which f's and g's may overwrite what they sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from autotp.runtime import vocabulary
from autotp.runtime.collectives import copy_to_region, reduce_from_region
from passes.emit import emit
from passes.reuse import reuse
from tests import small
from tests.passes.stages import nodes, stages

aten = torch.ops.aten


def found(build: Callable[[Graph, Node, Node], Any]) -> list[str]:
    """What reuse finds in a graph of two inputs, x and w, that returns what is built."""
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.output(build(graph, x, w))
    program = replace(stages(small.Mlp()).local(0), graph=graph)
    return sorted(node.name for node in reuse(program))


def f(graph: Graph, x: Node) -> Node:
    return graph.create_node("call_function", copy_to_region, (x,), name="f")


def g(graph: Graph, x: Node) -> Node:
    return graph.create_node("call_function", reduce_from_region, (x,), name="g")


SUMMANDS = {
    "linear": lambda graph, x, w: graph.call_function(aten.linear.default, (x, w)),
    "addmm": lambda graph, x, w: graph.call_function(aten.addmm.default, (x, x, w)),
    "sum": lambda graph, x, w: graph.call_function(aten.add.Tensor, (x, w)),
    "look-up": lambda graph, x, w: graph.call_function(vocabulary.embedding, (w, x, ())),
}
OTHERS = {
    "view": lambda graph, x, w: graph.call_function(aten.view.default, (x, [-1])),
    "input": lambda graph, x, w: x,
    "read by its backward": lambda graph, x, w: graph.call_function(aten.exp.default, (x,)),
}


@pytest.mark.parametrize("made", SUMMANDS.values(), ids=SUMMANDS)
def test_g_overwrites_a_summand_that_is_new(made: Any) -> None:
    assert found(lambda graph, x, w: g(graph, made(graph, x, w))) == ["g"]


@pytest.mark.parametrize("made", OTHERS.values(), ids=OTHERS)
def test_g_leaves_other_summands(made: Any) -> None:
    assert found(lambda graph, x, w: g(graph, made(graph, x, w))) == []


def test_g_leaves_a_summand_that_something_else_reads() -> None:
    def build(graph: Graph, x: Node, w: Node) -> Any:
        made = SUMMANDS["linear"](graph, x, w)
        return g(graph, made), made

    assert found(build) == []


def test_g_leaves_what_a_hook_of_the_module_below_sees() -> None:
    def build(graph: Graph, x: Node, w: Node) -> Any:
        made = SUMMANDS["linear"](graph, x, w)
        made.meta["calls"] = (("down@0", 0),)
        return g(graph, made)

    assert found(build) == []


READERS: dict[str, tuple[Any, bool]] = {
    "linear": (lambda call, y, w: call(aten.linear.default, (y, w)), True),
    "factor of a product": (lambda call, y, w: call(aten.addmm.default, (w, y, w)), True),
    "summand of a product": (lambda call, y, w: call(aten.addmm.default, (y, w, w)), False),
    "bias": (lambda call, y, w: call(aten.linear.default, (w, w, y)), False),
    "named bias": (lambda call, y, w: call(aten.linear.default, (w, w), {"bias": y}), False),
    "factor and summand": (lambda call, y, w: call(aten.addmm.default, (y, y, w)), False),
    "norm": (lambda call, y, w: call(aten.layer_norm.default, (y, [4], w)), True),
    "scale of a norm": (lambda call, y, w: call(aten.layer_norm.default, (w, [4], y)), False),
    "addition": (lambda call, y, w: call(aten.add.Tensor, (y, w)), False),
    "output": (lambda call, y, w: y, False),
    "view that is returned": (lambda call, y, w: call(aten.view.default, (y, [-1])), False),
    "view of a factor": (
        lambda call, y, w: call(aten.mm.default, (call(aten.view.default, (y, [-1, 4])), w)),
        True,
    ),
    "view of a summand": (
        lambda call, y, w: call(aten.add.Tensor, (call(aten.view.default, (y, [-1, 4])), w)),
        False,
    ),
    "several factors": (
        lambda call, y, w: [call(aten.mm.default, (y, w)), call(aten.mm.default, (y, w))],
        True,
    ),
    "factor beside a summand": (
        lambda call, y, w: [call(aten.mm.default, (y, w)), call(aten.add.Tensor, (y, w))],
        False,
    ),
}


@pytest.mark.parametrize(("read", "wanted"), READERS.values(), ids=READERS)
def test_f_overwrites_gradients_that_all_readers_make_anew(read: Any, wanted: bool) -> None:
    made = found(lambda graph, x, w: read(graph.call_function, f(graph, x), w))
    assert made == (["f"] if wanted else [])


@pytest.mark.parametrize("name", [name for name, (_, anew) in READERS.items() if anew])
def test_readers_do_make_these_gradients_anew(name: str) -> None:
    """The table against torch: does the gradient of y share memory with that of the result?"""
    y = torch.randn(4, 4, requires_grad=True)
    w = torch.randn(4 if name == "norm" else (4, 4), requires_grad=True)  # type: ignore[arg-type]
    result = READERS[name][0](
        lambda target, args, kwargs=None: target(*args, **(kwargs or {})), y, w
    )
    results = result if isinstance(result, list) else [result]
    incoming = [torch.randn_like(r) for r in results]
    (grad,) = torch.autograd.grad(results, y, incoming)
    assert all(
        grad.untyped_storage().data_ptr() != i.untyped_storage().data_ptr() for i in incoming
    )


def test_emitted_code_says_what_is_in_place() -> None:
    program = stages(small.Residual(small.Mlp())).local(0)
    made = reuse(program)
    assert sorted(str(node.target.__name__) for node in made) == [  # type: ignore[union-attr]
        "copy_to_region",
        "reduce_from_region",
    ]
    for in_place in (made, frozenset[Node]()):
        every = [n for gs in emit(program, in_place=in_place).graphs.values() for n in gs[0].nodes]
        calls = [n for n in every if n.target in (copy_to_region, reduce_from_region)]
        assert [n.kwargs.get("in_place", False) for n in calls] == [bool(in_place)] * 2
    assert not any(n.kwargs for n in nodes(program.graph, reduce_from_region))
