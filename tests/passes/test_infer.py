"""Axis inference: what every dim is made of, and what bars an axis."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from autotp.axes import leaves
from autotp.program import Program
from passes.infer import Inferred, infer
from tests import small
from tests.passes.stages import Fn, captured, values
from tests.small import WIDTH


def inferred(model: nn.Module, *args: Any) -> tuple[Program, Inferred]:
    program = captured(model, *args)
    return program, infer(program)


def dims(program: Program, found: Inferred, name: str) -> str:
    """The dims of the value or tensor of this name: `[a, b*c]`, axes lettered as they first
    occur."""
    node = next(n for n in program.graph.nodes if name in (n.name, str(n.target)))
    return lettered(", ".join(str(dim) for dim in found.dims[node]))


def lettered(text: str) -> str:
    letters: dict[str, str] = {}
    return (
        "["
        + re.sub(r"a\d+", lambda m: letters.setdefault(m[0], "abcdefgh"[len(letters)]), text)
        + "]"
    )


def axes(program: Program, found: Inferred, name: str) -> list[str]:
    node = next(n for n in program.graph.nodes if name in (n.name, str(n.target)))
    return [axis.name for dim in found.dims[node] for axis in leaves(dim)]


def bar(program: Program, found: Inferred, name: str) -> tuple[str, str] | None:
    """Reason and node of the bar on the first axis of a tensor."""
    held = found.bars.get(axes(program, found, name)[0])
    return held and (held.reason, held.node)


def test_a_fused_projection_is_a_sum_of_three_products_of_heads() -> None:
    program, found = inferred(small.BlockQkv())
    assert dims(program, found, "qkv.weight") == "[a*b + a*b + a*c, d]"
    assert dims(program, found, "qkv.bias") == "[a*b + a*b + a*c]"
    assert dims(program, found, "out.weight") == "[a, b*c]"


def test_an_interleaved_projection_is_heads_of_three_parts() -> None:
    program, found = inferred(small.InterleavedQkv())
    assert dims(program, found, "qkv.weight") == "[a*(b + b + c), d]"


def test_key_heads_of_a_grouped_attention_are_an_axis_of_the_queries() -> None:
    for how in ("enable_gqa", "repeat_interleave", "expand"):
        program, found = inferred(small.Grouped(how))
        heads, _, size = axes(program, found, "q.weight")[:3]
        key_heads, key_size = axes(program, found, "k.weight")[:2]
        assert (heads, size) == (key_heads, key_size), how


def test_both_products_of_an_mlp_have_one_axis_in_common() -> None:
    program, found = inferred(small.Mlp())
    assert axes(program, found, "up.weight")[0] == axes(program, found, "down.weight")[1]
    assert axes(program, found, "up.weight")[0] == axes(program, found, "up.bias")[0]


def test_products_whose_results_are_multiplied_have_one_axis() -> None:
    program, found = inferred(small.GatedMlp())
    assert axes(program, found, "gate.weight")[0] == axes(program, found, "up.weight")[0]


def test_a_view_splits_an_axis_and_a_reshape_joins_it_again() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.tanh((x @ self.w).unflatten(-1, (3, 4))).flatten(-2)

    program, found = inferred(Fn(forward, w=(WIDTH, 12)))
    assert dims(program, found, "tanh") == "[a, b, c, d]"
    assert dims(program, found, "flatten") == "[a, b, c*d]"
    assert dims(program, found, "w") == "[a, b*c]"


def test_a_permutation_carries_axes_along() -> None:
    model = Fn(lambda self, x: (x @ self.w).permute(2, 0, 1).transpose(0, 1), w=(WIDTH, 3))
    program, found = inferred(model)
    assert axes(program, found, "transpose") == [
        axes(program, found, "matmul")[i] for i in (0, 2, 1)
    ]


def test_batch_and_length_have_no_size() -> None:
    program, found = inferred(small.Mlp())
    node = next(n for n in program.graph.nodes if n.op == "placeholder")
    assert [dim.size for dim in found.dims[node]] == [None, None, WIDTH]


def test_a_value_of_several_tensors_has_dims_for_each() -> None:
    program, found = inferred(small.FusedGate())
    (chunk,) = (n for n in program.graph.nodes if n.name == "chunk")
    first, second = (lettered(", ".join(map(str, dims))) for dims in found.dims[chunk])
    assert first == second == "[a, b, c]"


def test_a_softmax_bars_the_axis_that_it_mixes() -> None:
    program, found = inferred(small.SoftmaxBetween())
    assert bar(program, found, "up.weight") == ("aten.softmax mixes the items of it", "softmax")


def test_a_softmax_over_one_axis_leaves_the_others_free() -> None:
    program, found = inferred(Fn(lambda self, x: torch.softmax(x @ self.w, 1), w=(WIDTH, 3)))
    batch, length, width = axes(program, found, "matmul")
    assert length in found.bars
    assert batch not in found.bars and width not in found.bars


def test_a_norm_bars_the_axis_that_it_normalizes() -> None:
    program, found = inferred(small.NormBetween())
    assert bar(program, found, "up.weight") == ("aten.layer_norm normalizes over it", "layer_norm")


def test_a_norm_of_each_head_bars_the_head_size_alone() -> None:
    program, found = inferred(small.NormedAttention())
    heads, size = axes(program, found, "q.weight")[:2]
    assert heads not in found.bars and size in found.bars


def test_an_operator_without_a_rule_bars_all_that_it_touches_and_is_counted() -> None:
    program, found = inferred(small.UnknownBetween())
    reason = ("there is no rule for autotp_tests.twice", "twice")
    assert bar(program, found, "up.weight") == reason
    assert bar(program, found, "down.bias") is None
    assert set(axes(program, found, "linear")) <= set(found.bars)
    assert found.no_rule == {"autotp_tests.twice": 1}


def test_a_view_that_mixes_an_axis_with_positions_bars_it() -> None:
    program, found = inferred(small.MixedByView())
    assert bar(program, found, "up.weight") == ("aten.view mixes it with other dims", "view")


def test_views_that_do_not_divide_alike_bar_the_axis() -> None:
    program, found = inferred(small.UnlikeViews())
    held = bar(program, found, "up.weight")
    assert held == ("aten.unflatten mixes it with other dims", "unflatten_1")


def test_the_first_of_two_bars_is_the_reason() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cumsum(torch.softmax(x @ self.w, -1), -1)

    program, found = inferred(Fn(forward, w=(WIDTH, 3)))
    assert found.bars[axes(program, found, "w")[1]].node == "softmax"


def test_an_axis_in_two_dims_of_one_tensor_is_barred() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = x @ self.w
        return h[:, :, :, None] * h[:, :, None, :]

    program, found = inferred(Fn(forward, w=(WIDTH, 3)))
    assert found.bars[axes(program, found, "w")[1]].reason == "it is in two dims of one tensor"


def test_a_bar_on_a_part_of_a_sum_leaves_the_other_parts_free() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h, scores = (x @ self.w).split([8, 3], -1)
        return torch.cat([torch.tanh(h), torch.softmax(scores, -1)], -1)

    program, found = inferred(Fn(forward, w=(WIDTH, 11)))
    _, free, barred = axes(program, found, "w")
    assert free not in found.bars and barred in found.bars


def test_products_and_contractions_are_recorded_with_their_weights() -> None:
    program, found = inferred(small.Mlp())
    gemms = [str(use.operand.target) for use in found.uses if use.kind == "gemm" and use.operand]
    assert gemms == ["up.weight", "down.weight"]
    contracted = [
        dim for use, dim in zip(found.uses, found.use_dims, strict=True) if use.kind == "contract"
    ]
    assert [axis.name for dim in contracted for axis in leaves(dim)] == [
        axes(program, found, "up.weight")[1],
        axes(program, found, "down.weight")[1],
    ]


def test_rows_of_a_table_are_recorded_as_looked_up() -> None:
    program, found = inferred(small.Transformer(1), torch.zeros(2, 5, dtype=torch.long))
    (dim,) = (d for use, d in zip(found.uses, found.use_dims, strict=True) if use.kind == "lookup")
    assert [axis.name for axis in leaves(dim)] == axes(program, found, "embed.weight")[:1]


def test_a_loss_records_its_classes() -> None:
    model = Fn(lambda self, x, y: F.cross_entropy(x @ self.w, y), w=(WIDTH, 5))
    program, found = inferred(model, values(4, WIDTH), torch.zeros(4, dtype=torch.long))
    (dim,) = (d for use, d in zip(found.uses, found.use_dims, strict=True) if use.kind == "classes")
    assert [axis.name for axis in leaves(dim)] == [axes(program, found, "w")[1]]


def test_inference_changes_nothing_in_the_graph() -> None:
    program = captured(small.BlockQkv())
    before = [(n, n.target, n.args, set(n.meta)) for n in program.graph.nodes]
    infer(program)
    assert before == [(n, n.target, n.args, set(n.meta)) for n in program.graph.nodes]


def test_inference_says_the_same_every_time() -> None:
    program = captured(small.Transformer(), torch.zeros(2, 5, dtype=torch.long))
    one, two = infer(program), infer(program)
    assert one.dims == two.dims and one.bars == two.bars and one.use_dims == two.use_dims


def test_every_dim_has_the_size_of_its_value() -> None:
    from autotp.axes import size

    program, found = inferred(small.Transformer(), torch.zeros(2, 5, dtype=torch.long))

    def compare(node: Node) -> None:
        value, trees = node.meta.get("val"), found.dims[node]
        if isinstance(value, Tensor) and trees is not None:
            assert len(trees) == value.dim(), node
            for tree, actual in zip(trees, value.shape, strict=True):
                assert size(tree) is None or size(tree) == actual, node

    for node in program.graph.nodes:
        compare(node)
