"""The one-line notation, and what rules say in it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from autotp.rules import Context, name
from autotp.rules.notation import apply
from tests.rules.harness import Case, one

aten = torch.ops.aten


def x(*shape: int) -> Tensor:
    return torch.ones(shape)


class Lettered:
    """Axes of a context as letters, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.letters: dict[str, str] = {}

    def __getitem__(self, axis: str) -> str:
        return self.letters.setdefault(axis, "abcdefghijk"[len(self.letters)])


def said(text: str, *operands: tuple[int, ...] | None) -> str:
    """What a text says about operands of these shapes: `[a, b] [c, b] -> [a, c] sum b bar c`."""
    ctx, graph = Context(), Graph()
    nodes = [None if shape is None else graph.placeholder("x") for shape in operands]
    for node, shape in zip(nodes, operands, strict=True):
        if node is not None and shape is not None:
            ctx.values[node] = ctx.fresh([(n, ()) for n in shape])
    call = graph.call_function(aten.linear.default, ())
    result = apply(ctx, call, text, nodes)
    names = Lettered()

    def written(dims: Any) -> str:
        return "[" + ", ".join(joined(ctx.table.factors(dim)) for dim in dims) + "]"

    def joined(axes: Any) -> str:
        return "*".join(names[str(axis)] for axis in axes) or "1"

    left = " ".join(written(ctx.dims(node)) for node in nodes if node)
    sums = [f" sum {joined(ctx.table.factors(use.dims))}" for use in ctx.uses]
    bars = sorted(names[str(axis)] for axis in ctx.table.bars())
    line = f"{left} -> {written(result)}{''.join(sums)}"
    assert {use.kind for use in ctx.uses} <= {"contract"}
    return line + (f" bar {' '.join(bars)}" if bars else "")


@pytest.mark.parametrize(
    ("text", "operands", "expected"),
    [
        ("m k, k n -> m n", [(2, 3), (3, 4)], "[a, b] [b, c] -> [a, c] sum b"),
        ("m k, k n -> n m", [(2, 3), (3, 4)], "[a, b] [b, c] -> [c, a] sum b"),
        ("k, k ->", [(3,), (3,)], "[a] [a] -> [] sum a"),
        ("a, b -> a b", [(3,), (3,)], "[a] [b] -> [a, b]"),
        ("m k, n k, n -> m n", [(2, 3), (4, 3), (4,)], "[a, b] [c, b] [c] -> [a, c] sum b"),
        ("m k, n k, n -> m n", [(2, 3), (4, 3), None], "[a, b] [c, b] -> [a, c] sum b"),
        # leading dims broadcast, aligned at the right
        ("... k, k -> ...", [(5, 2, 3), (3,)], "[a, b, c] [c] -> [a, b] sum c"),
        ("... k, ... k -> ... k", [(5, 2, 3), (2, 3)], "[a, b, c] [b, c] -> [a, b, c]"),
        ("... k, ... k -> ... k", [(5, 1, 3), (2, 3)], "[a, 1, b] [c, b] -> [a, c, b]"),
        ("... k -> ... k", [(3,)], "[a] -> [a]"),
        # a dim of size 1 is stretched, whichever comes first
        ("m k, k -> m k", [(2, 1), (3,)], "[a, 1] [b] -> [a, b]"),
        ("m k, k -> m k", [(2, 3), (1,)], "[a, b] [1] -> [a, b]"),
        # an operand may have fewer dims than its text: those at the right
        ("m n, m n -> m n", [(2, 3), (3,)], "[a, b] [b] -> [a, b]"),
        ("m n, m n -> m n", [(2, 3), ()], "[a, b] [] -> [a, b]"),
        # what an operator mixes is barred, in every operand
        ("m !k -> m k", [(2, 3)], "[a, b] -> [a, b] bar b"),
        ("m !k, k n -> m n", [(2, 3), (3, 4)], "[a, b] [b, c] -> [a, c] sum b bar b"),
        # a letter twice in one operand is a diagonal
        ("i i -> i", [(3, 3)], "[a, a] -> [a]"),
        # letters of unlike sizes cannot be the same dim
        ("m, m -> m", [(4,), (6,)], "[a] [b] -> [a] bar a b"),
    ],
)
def test_a_text_says(text: str, operands: list[Any], expected: str) -> None:
    assert said(text, *operands) == expected


def test_a_dim_of_size_one_is_not_summed() -> None:
    assert said("m k, k n -> m n", (2, 1), (1, 4)) == "[a, 1] [1, b] -> [a, b]"


def test_a_letter_that_no_operand_has_is_an_error() -> None:
    with pytest.raises(KeyError):
        said("m -> n", (2,))


def test_bars_carry_the_operator_and_the_node() -> None:
    ctx, graph = Context(), Graph()
    node = graph.placeholder("x")
    ctx.values[node] = ctx.fresh([(2, ()), (3, ())])
    ctx.table.node = "here"
    apply(ctx, graph.call_function(aten.softmax.int, ()), "m !k -> m k", [node])
    (bar,) = ctx.table.bars().values()
    assert (bar.reason, bar.node) == ("aten.softmax mixes the items of this dim", "here")


def test_an_operator_is_named_without_its_overload() -> None:
    graph = Graph()
    assert name(graph.call_function(aten.sum.dim_IntList)) == "aten.sum"
    assert name(graph.call_function(len)) == "len"
    assert name(graph.placeholder("x")) == "x"


# ---- rules as lines


def line(case: Case) -> str:
    """A call in the same words, with all that its rule stated."""
    names = Lettered()

    def axes(node: Node) -> str:
        return "[" + ", ".join(lettered(dim) for dim in case.inferred.dims[node]) + "]"

    def lettered(dim: object) -> str:
        return re.sub(r"a\d+", lambda found: names[found[0]], str(dim))

    left = " ".join(axes(node) for node in case.inputs)
    uses = zip(case.inferred.uses, case.inferred.use_dims, strict=True)
    right = axes(case.results[0])
    kinds = [f" {use.kind} {lettered(dim)}" for use, dim in uses]
    bars = sorted(names[a] for a in case.inferred.bars if a in names.letters)
    text = f"{left} -> {right}{''.join(kinds)}"
    return text + (f" bar {' '.join(bars)}" if bars else "")


SDPA = aten.scaled_dot_product_attention.default


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            (aten.linear.default, x(2, 3, 4), x(5, 4), x(5)),
            "[a, b, c] [d, c] [d] -> [a, b, d] contract c gemm d",
        ),
        (
            (aten.addmm.default, x(5), x(3, 4), x(4, 5)),
            "[a] [b, c] [c, a] -> [b, a] contract c gemm a",
        ),
        (
            (aten.baddbmm.default, x(2, 3, 5), x(2, 3, 4), x(2, 4, 5)),
            "[a, b, c] [a, b, d] [a, d, c] -> [a, b, c] contract d attend a gemm c",
        ),
        ((aten.mm.default, x(3, 4), x(4, 5)), "[a, b] [b, c] -> [a, c] contract b gemm c"),
        (
            (aten.bmm.default, x(2, 3, 4), x(2, 4, 5)),
            "[a, b, c] [a, c, d] -> [a, b, d] contract c gemm d attend a",
        ),
        ((aten.matmul.default, x(3), x(3)), "[a] [a] -> [] contract a"),
        (
            (aten.matmul.default, x(4), x(2, 4, 5)),
            "[a] [b, a, c] -> [b, c] contract a gemm c",
        ),
        (
            (aten.einsum.default, "bqd, bkd -> bqk", [x(2, 3, 4), x(2, 5, 4)]),
            "[a, b, c] [a, d, c] -> [a, b, d] contract c attend a gemm d",
        ),
        (
            (SDPA, x(2, 3, 4, 5), x(2, 3, 6, 5), x(2, 3, 6, 7)),
            "[a, b, c, d] [a, b, e, d] [a, b, e, f] -> [a, b, c, f]"
            " attend a attend b gemm f bar d e",
        ),
        (
            (SDPA, x(2, 3, 4, 5), x(2, 3, 4, 5), x(2, 3, 4, 5), None, 0.0, True),
            "[a, b, c, d] [a, b, e, d] [a, b, e, f] -> [a, b, c, f]"
            " attend a attend b gemm f bar c d e",
        ),
        (
            (SDPA, x(2, 6, 4, 5), x(2, 3, 4, 5), x(2, 3, 4, 5), {"enable_gqa": True}),
            "[a, b*c, d, e] [a, b, f, e] [a, b, f, g] -> [a, b*c, d, g]"
            " attend a attend b*c gemm g bar e f",
        ),
        (
            (aten.embedding.default, x(7, 3), torch.zeros(2, 4, dtype=torch.long)),
            "[a, b] [c, d] -> [c, d, b] lookup a",
        ),
        (
            (aten.cross_entropy_loss.default, x(2, 5), torch.zeros(2, dtype=torch.long)),
            "[a, b] [a] -> [] classes b bar a",
        ),
        ((aten.sum.dim_IntList, x(2, 3), [1]), "[a, b] -> [a] contract b"),
        ((aten.mean.dim, x(2, 3), [1], True), "[a, b] -> [a, 1] contract b norm b"),
        ((aten.layer_norm.default, x(2, 3), [3], x(3)), "[a, b] [b] -> [a, b] bar b"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_a_rule_says(call: tuple[Any, ...], expected: str) -> None:
    op, *args = call
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    assert line(one(op, *args, **kwargs)) == expected
