"""Pair matching: which axes are produced by some products and contracted by others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.infer import infer
from passes.match import GemmPair, match
from tests import small
from tests.passes.stages import Fn, captured
from tests.small import HEADS, INNER, SIZE, WIDTH

Found = tuple[str, int, str, str]
QKV = "q.weight k.weight v.weight"
HEADED: Found = ("attention", HEADS, QKV, "out.weight")


def pairs(model: nn.Module, *args: Any) -> tuple[GemmPair, ...]:
    program = captured(model, *args)
    return match(program, infer(program))


def free(model: nn.Module, *args: Any) -> list[Found]:
    """Pairs that nothing bars and that are worth sharding: kind, units, columns, rows."""
    return [
        (pair.kind, pair.units, " ".join(pair.columns), " ".join(pair.rows))
        for pair in pairs(model, *args)
        if pair.bar is None and pair.kind != "value"
    ]


PAIRED: dict[str, tuple[Callable[[], nn.Module], list[Found]]] = {
    "mlp": (small.Mlp, [("mlp", 8, "up.weight", "down.weight")]),
    "gated mlp": (small.GatedMlp, [("mlp", 8, "gate.weight up.weight", "down.weight")]),
    "gated mlp, fused": (small.FusedGate, [("mlp", 8, "both.weight", "down.weight")]),
    "read three times": (small.TwoReaders, [("mlp", 8, "up.weight", "down.weight")]),
    "two rows": (small.TwoRows, [("mlp", 8, "up.weight", "a.weight b.weight")]),
    "fused qkv": (small.BlockQkv, [("attention", HEADS, "qkv.weight", "out.weight")]),
    "interleaved": (small.InterleavedQkv, [("attention", HEADS, "qkv.weight", "out.weight")]),
    "indexed": (small.IndexedQkv, [("attention", HEADS, "qkv.weight", "out.weight")]),
    "apart": (small.Attention, [HEADED]),
    "written out": (small.EagerAttention, [HEADED]),
    "normalized": (small.NormedAttention, [HEADED]),
    "slopes by counting": (small.SlopedAttention, [HEADED]),
    "slopes in a buffer": (small.BufferedSlopes, [HEADED]),
    "relative bias": (small.RelativeBias, [HEADED]),
    "shared bias": (small.SharedBias, [HEADED]),
    "low rank": (
        small.LowRank,
        [
            ("mlp", 8, "up.weight up_b.weight", "down.weight down_a.weight"),
            ("mlp", 2, "up_a.weight", "up_b.weight"),
            ("mlp", 2, "down_a.weight", "down_b.weight"),
        ],
    ),
    "plain list": (
        small.PlainList,
        [
            ("mlp", 8, "one.block.up.weight", "one.block.down.weight"),
            ("mlp", 7, "two.block.up.weight", "two.block.down.weight"),
        ],
    ),
    "shared module": (
        small.SharedBlock,
        [("mlp", 8, "layers.0.block.up.weight", "layers.0.block.down.weight")],
    ),
}


@pytest.mark.parametrize("name", PAIRED)
def test_is_paired(name: str) -> None:
    make, expected = PAIRED[name]
    assert sorted(free(make())) == sorted(expected)


@pytest.mark.parametrize("how", ["enable_gqa", "repeat_interleave", "expand"])
def test_a_grouped_attention_is_paired_by_its_key_heads(how: str) -> None:
    assert ("attention", 3, QKV, "out.weight") in free(small.Grouped(how))


BARRED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "norm": (small.NormBetween, "aten.layer_norm normalizes over it", "layer_norm"),
    "softmax": (small.SoftmaxBetween, "aten.softmax mixes the items of it", "softmax"),
    "norm elsewhere": (small.ReadElsewhere, "aten.layer_norm normalizes over it", "layer_norm"),
    "mixing view": (small.MixedByView, "aten.view mixes it with other dims", "view"),
    "unlike views": (small.UnlikeViews, "aten.unflatten mixes it with other dims", "unflatten_1"),
    "no rule": (small.UnknownBetween, "there is no rule for autotp_tests.twice", "twice"),
}


@pytest.mark.parametrize("name", BARRED)
def test_is_not_paired_and_the_bar_says_why(name: str) -> None:
    make, reason, node = BARRED[name]
    assert free(make()) == []
    assert {(p.bar.reason, p.bar.node) for p in pairs(make()) if p.bar} <= {(reason, node)}


def test_a_pair_that_is_barred_is_still_a_pair() -> None:
    (pair,) = pairs(small.SoftmaxBetween())
    assert (pair.kind, pair.columns, pair.rows) == ("mlp", ("up.weight",), ("down.weight",))
    assert pair.bar is not None and pair.bar.node == "softmax"


def test_a_product_alone_is_no_pair() -> None:
    assert pairs(nn.Linear(WIDTH, 8)) == ()


def test_two_products_of_one_input_are_no_pair() -> None:
    model = Fn(lambda self, x: (self.a(x), self.b(x)), a=nn.Linear(WIDTH, 8), b=nn.Linear(WIDTH, 8))
    assert pairs(model) == ()


def test_a_weight_that_is_transposed_by_hand_is_paired() -> None:
    model = Fn(
        lambda self, x: torch.tanh(x @ self.up.T) @ self.down.T, up=(8, WIDTH), down=(WIDTH, 8)
    )
    assert free(model) == [("mlp", 8, "up", "down")]


def test_a_convolution_style_weight_is_paired() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        flat = torch.addmm(self.b, x.flatten(0, 1), self.up)
        return torch.addmm(self.c, torch.tanh(flat), self.down).unflatten(0, x.shape[:2])

    model = Fn(forward, up=(WIDTH, 8), b=(8,), down=(8, WIDTH), c=(WIDTH,))
    assert free(model) == [("mlp", 8, "up", "down")]


def test_einsum_is_a_product() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.einsum(
            "bsf,fo->bso", torch.tanh(torch.einsum("bsi,if->bsf", x, self.up)), self.down
        )

    assert free(Fn(forward, up=(WIDTH, 8), down=(8, WIDTH))) == [("mlp", 8, "up", "down")]


def test_the_head_size_of_values_alone_is_no_attention_pair() -> None:
    kinds = {(pair.kind, pair.units) for pair in pairs(small.Attention())}
    assert ("value", SIZE) in kinds
    assert ("attention", SIZE) not in kinds


def test_a_tied_head_and_embedding_are_a_vocabulary_pair() -> None:
    found = free(small.Transformer(1), torch.zeros(2, 5, dtype=torch.long))
    assert ("vocabulary", 11, "embed.weight", "embed.weight") in found


def test_a_table_of_positions_is_no_pair() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x + self.table(torch.arange(x.shape[1], device=x.device)))))

    parts = {"table": nn.Embedding(9, WIDTH), "up": nn.Linear(WIDTH, 8), "down": nn.Linear(8, 3)}
    assert free(Fn(forward, **parts)) == [("mlp", 8, "up.weight", "down.weight")]


def test_pairs_are_in_the_order_of_the_graph() -> None:
    model = nn.Sequential(
        *(small.Residual(m) for m in (small.BlockQkv(), small.Mlp(), small.Mlp(6)))
    )
    kinds = [(kind, units) for kind, units, *_ in free(model)]
    assert kinds == [("attention", HEADS), ("mlp", 8), ("mlp", 6)]


def test_attention_and_mlp_added_in_parallel_are_two_pairs() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x)) + self.mlp(self.norm(x))

    parts = {"norm": nn.LayerNorm(WIDTH), "attention": small.Attention(), "mlp": small.Mlp()}
    assert [(kind, units) for kind, units, *_ in free(Fn(forward, **parts))] == [
        ("attention", HEADS),
        ("mlp", 8),
    ]


def test_a_product_of_values_with_values_is_not_taken_for_a_weight() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down((self.up(x) @ self.other(x).transpose(1, 2)).softmax(-1) @ x)

    parts = [nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, 3)]
    model = Fn(forward, **dict(zip(("up", "other", "down"), parts, strict=True)))
    assert all("other.weight" not in pair.rows for pair in pairs(model))
