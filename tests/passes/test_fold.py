"""Which f's and g's are folded into their neighbours; gradients are those of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

import autotp
from autotp.pipeline import emit_rank
from autotp.runtime.collectives import copy_to_region, reduce_from_region
from autotp.runtime.folded import column_product, copy_each_to_region, row_product
from autotp.runtime.regions import enter_grad_mode, leave_grad_mode
from passes.fold import fold
from tests import small
from tests.oneprocess import assert_same, parallel, refill
from tests.passes.stages import stages, values
from tests.small import WIDTH

aten = torch.ops.aten
FOLDED = {column_product: "product", copy_each_to_region: "each", row_product: "row"}
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


def folded(build: Build) -> Graph:
    """What becomes of a hand-written graph."""
    program = replace(stages(small.Mlp()).local(0), graph=graph_of(build))
    before = str(program.graph)
    graph = fold(program).graph
    assert str(program.graph) == before, "passes do not change programs"
    graph.lint()
    return graph


def found(build: Build) -> list[str]:
    """What is folded in a graph and what stays alone, in order."""
    graph = folded(build)
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


def summed(call: Any, product: Node, *bias: Node, **given: Any) -> Node:
    g = call(reduce_from_region, product)
    return call(aten.add.Tensor, g, *bias, **given) if bias else g  # type: ignore[no-any-return]


ROWS: dict[str, Build] = {
    "linear": lambda call, v: summed(call, call(aten.linear.default, v["x"], v["w"])),
    "mm": lambda call, v: summed(call, call(aten.mm.default, v["rows"], v["t"])),
    "matmul": lambda call, v: summed(call, call(aten.matmul.default, v["x"], v["t"])),
    "bias": lambda call, v: summed(call, call(aten.linear.default, v["x"], v["w"]), v["b"]),
}
WITHOUT_BIAS: dict[str, Build] = {
    "a number for all": lambda call, v: summed(call, product(call, v), v["one"]),
    "two dims": lambda call, v: summed(call, product(call, v), v["many"]),
    "scaled": lambda call, v: summed(call, product(call, v), v["b"], alpha=2),
    "a value": lambda call, v: summed(call, product(call, v), v["p"]),
    "of another module": lambda call, v: call(
        aten.add.Tensor, summed(call, product(call, v)), v["b"], calls=()
    ),
}


def product(call: Any, v: Any) -> Node:
    return call(aten.linear.default, v["x"], v["w"])  # type: ignore[no-any-return]


def read_twice(call: Any, v: Any) -> Any:
    found = product(call, v)
    return [call(reduce_from_region, found), found]


def below(call: Any, v: Any) -> Any:
    found = call(aten.linear.default, v["x"], v["w"], calls=(("m@0", 0), ("n@0", 0)))
    return call(reduce_from_region, found)


def read_later(call: Any, v: Any) -> Any:
    found = product(call, v)
    call(aten.mul.Tensor, v["x"], 2.0)
    return call(reduce_from_region, found)


def scaled(call: Any, v: Any) -> Any:
    return call(reduce_from_region, call(aten.mul.Tensor, product(call, v), 2.0))


def written_to(call: Any, v: Any) -> Any:
    return call(aten.add_.Tensor, call(reduce_from_region, product(call, v)), 1.0)


@pytest.mark.parametrize("build", PRODUCTS.values(), ids=PRODUCTS)
def test_f_of_one_product_is_part_of_it(build: Build) -> None:
    assert found(build) == ["product"]


@pytest.mark.parametrize(
    "build", [*ALONE_F.values(), in_another_region], ids=[*ALONE_F, "in another region"]
)
def test_other_fs_stay(build: Build) -> None:
    assert found(build) == ["f"]


def in_modules(call: Any, v: Any) -> Any:
    f = call(copy_to_region, v["x"])
    one, other = (("m@0", 0), ("n@0", 0)), (("m@0", 0), ("o@0", 0))
    found = [call(aten.linear.default, f, v["w"], calls=calls) for calls in (one, one, other)]
    return [*found, call(aten.linear.default, f, v["w"])]


def test_modules_are_given_one_value_however_many_operators_read_it() -> None:
    graph = folded(in_modules)
    items = graph.find_nodes(op="call_function", target=operator.getitem)
    assert [len(item.users) for item in items] == [2, 1, 1]


def test_f_of_several_readers_has_a_value_for_each() -> None:
    assert found(several) == ["each"]
    items = folded(several).find_nodes(op="call_function", target=operator.getitem)
    assert len(items) == 2
    assert found(several_and_written) == ["f"]


@pytest.mark.parametrize("name", ROWS)
def test_g_of_a_product_is_part_of_it(name: str) -> None:
    assert found(ROWS[name]) == ["row"]
    added = len(folded(ROWS[name]).find_nodes(op="call_function", target=aten.add.Tensor))
    assert added == 0, "a bias, too"


@pytest.mark.parametrize("build", WITHOUT_BIAS.values(), ids=WITHOUT_BIAS)
def test_what_is_no_bias_is_added_behind_it(build: Build) -> None:
    assert found(build) == ["row"]
    assert len(folded(build).find_nodes(op="call_function", target=aten.add.Tensor)) == 1


def test_a_bias_of_a_sum_that_something_else_reads_stays() -> None:
    def build(call: Any, v: Any) -> Any:
        g = summed(call, product(call, v))
        return [call(aten.add.Tensor, g, v["b"]), g]

    assert found(build) == ["row"]
    assert len(folded(build).find_nodes(op="call_function", target=aten.add.Tensor)) == 1


@pytest.mark.parametrize("build", [read_twice, below, read_later, scaled, written_to])
def test_other_gs_stay(build: Build) -> None:
    assert found(build) == ["g"]


EVERY: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "mlp": (lambda: small.Residual(small.Mlp()), {"product", "row"}),
    "gated": (lambda: small.Residual(small.GatedMlp()), {"each", "row"}),
    "fused attention": (small.BlockQkv, {"product", "row"}),
    "attention": (small.Attention, {"each", "row"}),
    "grouped": (lambda: small.Grouped("expand"), {"each", "row"}),
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
    assert emitted() & set(NAMES) == {column_product, row_product}
    monkeypatch.setenv("AUTOTP_WITHOUT", "fold")
    assert emitted() & set(NAMES) == set(ALONE)


def test_for_one_rank_operators_stay_the_models() -> None:
    assert not emitted(tp=1) & set(NAMES)
