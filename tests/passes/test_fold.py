"""Which f's and g's are folded into their neighbours; gradients are those of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

import autotp
from autotp.pipeline import emit_rank
from autotp.runtime.collectives import copy_to_region, reduce_from_region
from autotp.runtime.folded import column_product, copy_each_to_region, reduce_with_bias
from autotp.runtime.regions import enter_grad_mode, leave_grad_mode
from passes.fold import fold
from tests import small
from tests.oneprocess import assert_same, parallel, refill
from tests.passes.stages import stages, values
from tests.small import WIDTH

aten = torch.ops.aten
FOLDED = {column_product: "product", copy_each_to_region: "each", reduce_with_bias: "bias"}
ALONE = {copy_to_region: "f", reduce_from_region: "g"}
NAMES: dict[Any, str] = {**FOLDED, **ALONE}
Build = Callable[[Callable[..., Node], dict[str, Node]], Any]

# of what is in a hand-written graph: shapes, all float64
SHAPES = {"x": (2, 3, 4), "rows": (6, 4), "line": (4,), "w": (5, 4), "t": (4, 5), "p": (2, 3, 5)}
PARAMETERS = {"b": (5,), "one": (1,), "many": (3, 5)}


def graph_of(build: Build) -> Graph:
    """A graph whose nodes know their shapes and the module call `m` that they are in."""
    graph, made = Graph(), dict[str, Node]()

    def finish(node: Node, value: Any) -> Node:
        node.meta = {"val": value, "calls": (("m@0", 0),), "placement": ""}
        return node

    def call(target: Any, *args: Any, calls: Any = None, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        given = torch.fx.map_arg(args, lambda n: n.meta["val"])
        same = target in ALONE
        finish(node, given[0] if same else target(*given, **kwargs))
        node.meta["calls"] = node.meta["calls"] if calls is None else calls
        return node

    for name, shape in SHAPES.items():
        made[name] = finish(graph.placeholder(name), torch.zeros(shape, dtype=torch.float64))
    for name, shape in PARAMETERS.items():
        made[name] = finish(graph.get_attr(name), torch.zeros(shape, dtype=torch.float64))
    graph.output(build(call, made))
    return graph


def found(build: Build) -> list[str]:
    """What is folded in a graph and what stays alone, in order."""
    program = replace(stages(small.Mlp()).local(0), graph=graph_of(build))
    before = str(program.graph)
    graph = fold(program).graph
    assert str(program.graph) == before, "passes do not change programs"
    graph.lint()
    return [NAMES[n.target] for n in graph.nodes if n.target in NAMES]


PRODUCTS: dict[str, Build] = {
    "linear": lambda call, v: call(aten.linear.default, call(copy_to_region, v["x"]), v["w"]),
    "linear with a bias": lambda call, v: call(
        aten.linear.default, call(copy_to_region, v["x"]), v["w"], v["b"]
    ),
    "addmm": lambda call, v: call(
        aten.addmm.default, v["b"], call(copy_to_region, v["rows"]), v["t"]
    ),
    "mm": lambda call, v: call(aten.mm.default, call(copy_to_region, v["rows"]), v["t"]),
    "matmul": lambda call, v: call(aten.matmul.default, call(copy_to_region, v["x"]), v["t"]),
    "a view": lambda call, v: call(
        aten.mm.default, call(aten.view.default, call(copy_to_region, v["x"]), [6, 4]), v["t"]
    ),
    "of another module": lambda call, v: call(
        aten.linear.default, call(copy_to_region, v["x"]), v["w"], calls=(("m@0", 0), ("n@0", 0))
    ),
}
ALONE_F: dict[str, Build] = {
    "as the weight": lambda call, v: call(
        aten.linear.default, v["x"], call(copy_to_region, v["w"])
    ),
    "as the bias": lambda call, v: call(
        aten.linear.default, v["x"], v["w"], call(copy_to_region, v["b"])
    ),
    "one dim": lambda call, v: call(aten.linear.default, call(copy_to_region, v["line"]), v["w"]),
    "a scaled bias": lambda call, v: call(
        aten.addmm.default, v["b"], call(copy_to_region, v["rows"]), v["t"], beta=2
    ),
    "a summand of its own": lambda call, v: call(
        aten.addmm.default,
        call(aten.mm.default, v["rows"], v["t"]),
        call(copy_to_region, v["rows"]),
        v["t"],
    ),
    "batches of weights": lambda call, v: call(
        aten.matmul.default, call(copy_to_region, v["x"]), call(aten.transpose.int, v["x"], 1, 2)
    ),
    "no product": lambda call, v: call(aten.mul.Tensor, call(copy_to_region, v["x"]), v["x"]),
    "written to": lambda call, v: call(
        aten.linear.default,
        call(aten.add_.Tensor, call(aten.view.default, call(copy_to_region, v["x"]), [6, 4]), 1.0),
        v["w"],
    ),
    "returned": lambda call, v: call(copy_to_region, v["x"]),
}


def several(call: Any, v: Any) -> Any:
    f = call(copy_to_region, v["x"])
    return [call(aten.linear.default, f, v["w"], v["b"]), call(aten.mul.Tensor, f, f)]


def several_and_written(call: Any, v: Any) -> Any:
    f = call(copy_to_region, v["x"])
    return [call(aten.linear.default, f, v["w"], v["b"]), call(aten.add_.Tensor, f, f)]


def in_another_region(call: Any, v: Any) -> Any:
    f = call(copy_to_region, v["x"])
    mode = call(lambda enabled: None, False)
    mode.target = enter_grad_mode
    product = call(aten.linear.default, f, v["w"])
    call(lambda mode: None, mode).target = leave_grad_mode
    return product


BIASES: dict[str, tuple[Build, list[str]]] = {
    "bias": (lambda call, v: call(aten.add.Tensor, call(reduce_from_region, v["p"]), v["b"]), []),
    "a number for all": (
        lambda call, v: call(aten.add.Tensor, call(reduce_from_region, v["p"]), v["one"]),
        ["g"],
    ),
    "two dims": (
        lambda call, v: call(aten.add.Tensor, call(reduce_from_region, v["p"]), v["many"]),
        ["g"],
    ),
    "scaled": (
        lambda call, v: call(aten.add.Tensor, call(reduce_from_region, v["p"]), v["b"], alpha=2),
        ["g"],
    ),
    "a value": (
        lambda call, v: call(aten.add.Tensor, call(reduce_from_region, v["p"]), v["p"]),
        ["g"],
    ),
    "of another module": (
        lambda call, v: call(aten.add.Tensor, call(reduce_from_region, v["p"], calls=()), v["b"]),
        ["g"],
    ),
}


@pytest.mark.parametrize("build", PRODUCTS.values(), ids=PRODUCTS)
def test_f_of_one_product_is_part_of_it(build: Build) -> None:
    assert found(build) == ["product"]


@pytest.mark.parametrize(
    "build", [*ALONE_F.values(), in_another_region], ids=[*ALONE_F, "in another region"]
)
def test_other_fs_stay(build: Build) -> None:
    assert found(build) == ["f"]


def test_f_of_several_readers_has_a_value_for_each() -> None:
    assert found(several) == ["each"]
    assert found(several_and_written) == ["f"]


@pytest.mark.parametrize(("build", "alone"), BIASES.values(), ids=BIASES)
def test_g_adds_a_bias(build: Build, alone: list[str]) -> None:
    assert found(build) == (alone or ["bias"])


def test_g_between_two_readers_stays() -> None:
    def build(call: Any, v: Any) -> Any:
        g = call(reduce_from_region, v["p"])
        return [call(aten.add.Tensor, g, v["b"]), g]

    def apart(call: Any, v: Any) -> Any:
        g = call(reduce_from_region, v["p"])
        call(aten.mul.Tensor, v["p"], 2.0)
        return call(aten.add.Tensor, g, v["b"])

    assert found(build) == found(apart) == ["g"]


EVERY: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "mlp": (lambda: small.Residual(small.Mlp()), {"product", "bias"}),
    "gated": (lambda: small.Residual(small.GatedMlp()), {"each", "bias"}),
    "fused attention": (small.BlockQkv, {"product", "bias"}),
    "attention": (small.Attention, {"each", "bias"}),
    "grouped": (lambda: small.Grouped("expand"), {"each", "bias"}),
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(("make", "wanted"), EVERY.values(), ids=EVERY)
def test_models_compute_the_same(make: Callable[[], Any], wanted: set[str], tp: int) -> None:
    model = refill(make().double())
    x = values(2, 6, WIDTH)
    lockstep = parallel(model, tp, (x,))
    targets = {
        NAMES.get(node.target)
        for rank in lockstep.ranks
        for block in rank.modules()
        for code in getattr(block, "_tp_codes", ())
        for node in code.graph.nodes
    }
    assert targets - {None} == wanted
    assert_same(model, lockstep, (x,))


def emitted(tp: int = 2) -> set[Any]:
    plan = autotp.plan(small.Mlp().double(), tp, example_inputs=(values(2, 6, WIDTH),))
    graphs = emit_rank(plan, 0, {}, {}).graphs.values()
    return {node.target for each in graphs for graph in each for node in graph.nodes}


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert emitted() & set(NAMES) == {column_product, reduce_with_bias}
    monkeypatch.setenv("AUTOTP_WITHOUT", "fold")
    assert emitted() & set(NAMES) == set(ALONE)


def test_for_one_rank_operators_stay_the_models() -> None:
    assert not emitted(tp=1) & set(NAMES)
