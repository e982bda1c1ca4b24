"""Small models with one structure each, sharded over 2 and 3 ranks in one process.

Outputs, input gradients and every parameter's gradient on every rank are those of the model, at
another batch and length than the captured one. What is paired is in `tests/passes/test_match.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import small
from tests.oneprocess import assert_same, parallel, parallels, refill
from tests.passes.stages import Fn, values
from tests.small import INNER, WIDTH

PAIRED: dict[str, Callable[[], nn.Module]] = {
    "mlp": small.Mlp,
    "gated mlp": small.GatedMlp,
    "gated mlp, fused": small.FusedGate,
    "column output read three times": small.TwoReaders,
    "column output read by two rows": small.TwoRows,
    "fused qkv, blocks": small.BlockQkv,
    "fused qkv, interleaved": small.InterleavedQkv,
    "fused qkv, indexed": small.IndexedQkv,
    "q, k and v apart": small.Attention,
    "attention written out": small.EagerAttention,
    "normalized q and k": small.NormedAttention,
    "slopes by counting": small.SlopedAttention,
    "slopes joined of two series": small.JoinedSlopes,
    "slopes in a buffer": small.BufferedSlopes,
    "relative bias table": small.RelativeBias,
    "bias shared by heads": small.SharedBias,
    "grouped, repeat_interleave": lambda: small.Grouped("repeat_interleave"),
    "grouped, expand": lambda: small.Grouped("expand"),
    "grouped, enable_gqa": lambda: small.Grouped("enable_gqa"),
    "low rank": small.LowRank,
    "large products beside a norm": small.WideNormBetween,
    "plain list of modules": small.PlainList,
    "shared module": small.SharedBlock,
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "norm between": small.NormBetween,
    "softmax between": small.SoftmaxBetween,
    "read elsewhere": small.ReadElsewhere,
    "mixed by view": small.MixedByView,
    "unlike views": small.UnlikeViews,
    "unknown operator between": small.UnknownBetween,
}


def check(model: nn.Module, *tps: int) -> None:
    refill(model.double())
    for lockstep in parallels(model, tps, (values(2, 5, WIDTH),)):
        assert lockstep.plan.axes, "something is split"
        assert_same(model, lockstep, (values(3, 7, WIDTH),))


@pytest.mark.parametrize("name", PAIRED)
def test_paired_models_compute_the_same(name: str) -> None:
    model = refill(PAIRED[name]().double())
    for lockstep in parallels(model, (2, 3), (values(2, 5, WIDTH),)):
        assert lockstep.plan.axes, "something is split"
        assert_same(model, lockstep, (values(3, 7, WIDTH),))


@pytest.mark.parametrize("name", WHOLE)
def test_models_without_a_pair_compute_the_same(name: str) -> None:
    model = refill(WHOLE[name]().double())
    lockstep = parallel(model, 2, (values(2, 5, WIDTH),))
    assert not lockstep.plan.axes
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def test_a_transformer_with_a_tied_head_and_a_loss_computes_the_same() -> None:
    model = refill(small.Transformer().double())
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(0, 11, shape, generator=generator)  # noqa: E731
    for lockstep in parallels(model, (1, 2, 3, 5), {"tokens": draw(2, 5), "targets": draw(2, 5)}):
        assert_same(model, lockstep, {"tokens": draw(3, 7), "targets": draw(3, 7)})
        if lockstep.tp_size == 3:  # without targets: a further capture on each rank
            assert_same(model, lockstep, {"tokens": draw(3, 7)})


def test_an_output_that_is_split_is_gathered() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.up(x)
        return self.down(torch.tanh(h)), h, h.transpose(0, 1) * 2

    parts = {"up": nn.Linear(WIDTH, 7), "down": nn.Linear(7, WIDTH)}
    model = refill(Fn(forward, **parts).double())
    lockstep = parallel(model, 3, (values(2, 5, WIDTH),))
    assert lockstep.plan.collectives.gathers == 2
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def test_an_input_that_meets_split_values_enters_by_parts() -> None:
    def forward(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        return self.down(self.up(x) * gate)

    model = Fn(forward, up=nn.Linear(WIDTH, 7), down=nn.Linear(7, WIDTH))
    refill(model.double())
    lockstep = parallel(model, 3, (values(2, 5, WIDTH), values(2, 5, 7)))
    assert lockstep.plan.axes
    assert_same(model, lockstep, (values(3, 6, WIDTH), values(3, 6, 7)))


def test_in_place_operators_compute_the_same() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.up(x)
        h += self.shift
        y = self.down(F.relu(h, inplace=True))
        y += x
        return y.mul_(2)

    model = Fn(forward, up=nn.Linear(WIDTH, 7), shift=(7,), down=nn.Linear(7, WIDTH))
    refill(model.double())
    lockstep = parallel(model, 3, (values(2, 5, WIDTH),))
    assert lockstep.plan.axes
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def test_parameters_that_are_sums_of_views_compute_the_same() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.T + self.shift) @ self.down.reshape(7, WIDTH)

    model = Fn(forward, up=(7, WIDTH), shift=(7,), down=(7 * WIDTH,))
    refill(model.double())
    lockstep = parallel(model, 3, (values(2, 5, WIDTH),))
    assert lockstep.plan.axes
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


@pytest.mark.parametrize("frozen", ["up", "down", "all but low rank"])
def test_gradients_of_models_with_frozen_parameters_are_the_same(frozen: str) -> None:
    model = refill(small.LowRank().double())
    for name, parameter in model.named_parameters():
        whole = frozen == "all but low rank" and "_" not in name
        parameter.requires_grad_(not (whole or name.startswith(f"{frozen}.")))
    lockstep = parallel(model, 3, (values(2, 5, WIDTH),))
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def test_a_frozen_parameter_can_be_trained_later() -> None:
    model = refill(small.NormedAttention().double()).requires_grad_(False)
    model.out.weight.requires_grad_(True)
    lockstep = parallel(model, 3, (values(2, 5, WIDTH),))
    model.requires_grad_(True)
    lockstep.requires_grad_(True)
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def test_constants_of_a_second_call_form_are_its_own() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scale = [1.0, 2.0, 3.0] if self.training else [4.0, 5.0, 6.0]
        return self.down(torch.tanh(self.up(x))) * torch.tensor(scale)

    model = Fn(forward, up=nn.Linear(WIDTH, 7), down=nn.Linear(7, 3))
    refill(model.double())
    lockstep = parallel(model, 2, (values(2, 5, WIDTH),))
    assert_same(model, lockstep, (values(3, 7, WIDTH),))
    model.eval()
    for rank in lockstep.ranks:
        rank.eval()
    assert_same(model, lockstep, (values(3, 7, WIDTH),))


def test_a_constant_of_each_head_is_split() -> None:
    class Scaled(small.Attention):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            per_head = torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5])
            return F.scaled_dot_product_attention(q * per_head[:, None, None], k, v)

    check(Scaled(), 3)


def test_running_statistics_are_kept_as_the_model_keeps_them() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, 3))
    refill(model.double())
    lockstep = parallel(model, 2, (values(4, WIDTH),))
    assert lockstep.plan.axes
    x = values(5, WIDTH)
    model(x)
    lockstep(x)
    for rank in lockstep.ranks:
        for name, buffer in rank.named_buffers():
            assert torch.allclose(buffer, dict(model.named_buffers())[name]), name


def test_attention_and_mlp_added_in_parallel_compute_the_same() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h) + self.mlp(h)

    parts = {"norm": nn.LayerNorm(WIDTH), "attention": small.BlockQkv(), "mlp": small.Mlp()}
    check(Fn(forward, **parts), 2, 3)


def test_a_fused_product_of_attention_and_mlp_computes_the_same() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        *qkv, h = self.fused(x).split([INNER, INNER, INNER, 8], -1)
        q, k, v = (small.heads(part) for part in qkv)
        mixed = small.joined(F.scaled_dot_product_attention(q, k, v))
        return self.out(torch.cat([mixed, F.gelu(h)], -1))

    model = Fn(forward, fused=nn.Linear(WIDTH, 3 * INNER + 8), out=nn.Linear(INNER + 8, WIDTH))
    check(model, 3)


def test_a_fused_product_whose_other_part_stays_whole_computes_the_same() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h, scores = self.fused(x).split([8, 3], -1)
        return self.down(torch.tanh(h)) + self.other(torch.softmax(scores, -1))

    parts = [nn.Linear(WIDTH, 11), nn.Linear(8, WIDTH), nn.Linear(3, WIDTH)]
    model = Fn(forward, **dict(zip(("fused", "down", "other"), parts, strict=True)))
    refill(model.double())
    lockstep = parallel(model, 2, (values(2, 5, WIDTH),))
    assert not lockstep.plan.is_sharded("fused.weight")
    assert_same(model, lockstep, (values(3, 7, WIDTH),))
