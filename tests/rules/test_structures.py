"""Structures that real models have: split where an axis exists, and exact in any case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from tests.models import HEADS, INNER, SIZE, WIDTH, Function, refill

TP = 2


def proved(model: nn.Module, *example: Tensor, tp: int = TP) -> autotp.Plan:
    """The plan of a model that is exact."""
    report = autotp.verify(refill(model).double(), tp, example_inputs=tuple(example))
    report.raise_if_failed()
    assert report.rows
    return report.plan


def split(plan: autotp.Plan) -> set[str]:
    """Names of the parameters that lie in parts."""
    return {t.name for t in plan.tensors if plan.is_sharded(t.name)}


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def _attention(norm: Any) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = norm(m, m.q(x)), m.k(x), m.v(x)
        parts = (t.view(*x.shape[:2], -1, SIZE).transpose(1, 2) for t in (q, k, v))
        return m.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))

    wide = HEADS * SIZE
    linears = {name: nn.Linear(WIDTH, wide) for name in "qkv"}
    return Function(forward, **linears, out=nn.Linear(wide, WIDTH), norm=nn.RMSNorm(wide))


def test_a_norm_across_heads_splits_them_and_sums_its_squares_over_ranks() -> None:
    model = _attention(lambda m, q: _rms(q, m.norm.weight))
    plan = proved(model, values(2, 3, WIDTH))
    assert {"q.weight", "k.weight", "v.weight", "out.weight", "norm.weight"} <= split(plan)
    assert plan.collectives.forward == 2  # of the norm and of the output
    plain = proved(_attention(lambda m, q: q), values(2, 3, WIDTH))
    assert plain.collectives.forward == 1


def test_a_norm_between_two_products_bars_their_axis() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.down(_rms(m.up(x), m.norm.weight))

    up, down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
    plan = proved(Function(forward, up=up, down=down, norm=nn.RMSNorm(INNER)), values(2, 3, WIDTH))
    assert not split(plan)
    assert {k.reason for k in plan.kept if k.name == "up.weight"} == {"aten.mean reduces over it"}


@pytest.mark.parametrize("groups", [INNER, 1])
def test_a_convolution_keeps_channels_split_only_if_each_has_its_own_filter(groups: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.down(m.conv(m.up(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))

    model = Function(
        forward,
        up=nn.Linear(WIDTH, INNER),
        conv=nn.Conv1d(INNER, INNER, 3, groups=groups, padding=2),
        down=nn.Linear(INNER, WIDTH),
    )
    found = split(proved(model, values(2, 5, WIDTH), tp=3))
    every = {"up.weight", "up.bias", "conv.weight", "conv.bias", "down.weight"}
    assert every <= found if groups > 1 else not {"up.weight", "conv.weight"} & found


def test_experts_weights_in_a_grouped_product_are_split_inside_each_expert() -> None:
    pytest.importorskip("transformers.integrations.moe")

    def forward(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        product = torch.ops.transformers.grouped_mm_fallback
        return product(F.gelu(product(x, m.up, ends)), m.down, ends)

    model = Function(forward)
    model.up = nn.Parameter(torch.empty(2, WIDTH, INNER))
    model.down = nn.Parameter(torch.empty(2, INNER, WIDTH))
    ends = torch.tensor([2, 6], dtype=torch.int32)
    plan = proved(model, values(6, WIDTH), ends, tp=3)
    assert split(plan) == {"up", "down"}
    assert plan.local_shape("up", 0) == (2, WIDTH, 4)


def test_index_select_passes_the_dims_it_does_not_index() -> None:
    def forward(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
        return m.down(m.up(x).index_select(1, chosen))

    model = Function(forward, up=nn.Linear(WIDTH, INNER), down=nn.Linear(INNER, WIDTH))
    plan = proved(model, values(2, 5, WIDTH), torch.tensor([3, 0, 1]))
    assert {"up.weight", "down.weight"} <= split(plan)


def test_index_select_bars_the_dim_it_indexes() -> None:
    def forward(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
        return m.down(m.up(x).index_select(-1, chosen))

    model = Function(forward, up=nn.Linear(WIDTH, INNER), down=nn.Linear(INNER, WIDTH))
    order = torch.arange(INNER).flip(0)
    assert not split(proved(model, values(2, 5, WIDTH), order))


@pytest.mark.parametrize("index", [[-1], [0, 1], [1, 0]])
def test_a_list_as_an_index_is_captured(index: Sequence[int]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.down(F.gelu(m.up(x)[:, list(index)]))

    model = Function(forward, up=nn.Linear(WIDTH, INNER), down=nn.Linear(INNER, WIDTH))
    assert {"up.weight", "down.weight"} <= split(proved(model, values(2, 5, WIDTH)))


@pytest.mark.parametrize(("heads", "key_heads", "tp"), [(8, 2, 4), (8, 2, 3), (8, 1, 4), (6, 2, 4)])
def test_fewer_key_heads_than_ranks_are_exact(heads: int, key_heads: int, tp: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], -1, SIZE).transpose(1, 2) for t in (m.q(x), m.k(x), m.v(x)))
        k, v = (
            t[:, :, None].expand(-1, -1, heads // key_heads, -1, -1).flatten(1, 2) for t in (k, v)
        )
        return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    k, v = (nn.Linear(WIDTH, SIZE * key_heads) for _ in range(2))
    q, out = nn.Linear(WIDTH, SIZE * heads), nn.Linear(SIZE * heads, WIDTH)
    plan = proved(Function(forward, q=q, k=k, v=v, out=out), values(2, 3, WIDTH), tp=tp)
    if heads // key_heads >= tp:  # the queries of each key head are dealt out
        assert split(plan) == {"q.weight", "q.bias", "out.weight"}
    else:  # no heads are split: the larger products take their inputs in parts
        assert split(plan) == {"q.weight", "out.weight"}
        assert [(axis.kind, axis.rows) for axis in plan.axes] == [
            ("input", ("q.weight",)),
            ("input", ("out.weight",)),
        ]


def test_a_new_tensor_of_batch_times_heads_is_made_at_its_local_size() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, -1, SIZE).transpose(1, 2).flatten(0, 1)
            for t in (m.q(x), m.k(x), m.v(x))
        )
        start = torch.zeros(batch * HEADS, length, length, dtype=x.dtype, device=x.device)
        scores = torch.baddbmm(start, q, k.transpose(1, 2)).softmax(-1)
        mixed = torch.bmm(scores, v).view(batch, HEADS, length, SIZE)
        return m.out(mixed.transpose(1, 2).flatten(2))

    linears = {name: nn.Linear(WIDTH, HEADS * SIZE) for name in "qkv"}
    model = Function(forward, **linears, out=nn.Linear(HEADS * SIZE, WIDTH))
    found = split(proved(model, values(2, 3, WIDTH)))
    assert {"q.weight", "k.weight", "v.weight", "out.weight"} <= found


def test_complex_rotation_passes_heads() -> None:
    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        angles = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None].expand(-1, 2)
        turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        return torch.view_as_real(pairs * turn).flatten(3)

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], -1, SIZE) for t in (m.q(x), m.k(x), m.v(x)))
        parts = (t.transpose(1, 2) for t in (rotate(q), rotate(k), v))
        return m.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))

    linears = {name: nn.Linear(WIDTH, HEADS * SIZE) for name in "qkv"}
    model = Function(forward, **linears, out=nn.Linear(HEADS * SIZE, WIDTH))
    found = split(proved(model, values(2, 3, WIDTH)))
    assert {"q.weight", "k.weight", "v.weight", "out.weight"} <= found


def test_dims_behind_a_reshape_of_positions_pass() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.up(x)
        missing = (4 - h.shape[1] % 4) % 4
        chunks = F.pad(h, (0, 0, 0, missing)).reshape(h.shape[0], -1, 4, h.shape[2])
        return m.down(chunks.cumsum(2).reshape(h.shape[0], -1, h.shape[2])[:, : h.shape[1]])

    model = Function(forward, up=nn.Linear(WIDTH, INNER), down=nn.Linear(INNER, WIDTH))
    plan = proved(model, values(2, 6, WIDTH), tp=3)
    assert {"up.weight", "down.weight"} <= split(plan)


def test_the_shape_of_another_value_is_read_without_its_gradient() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        like = m.other(x)[..., None]
        turned = torch.stack([x, like[..., 0]], -1).sum(-1).reshape_as(like[..., 0])
        return m.down(m.up(turned)) + like[..., 0]

    up, down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
    model = Function(forward, up=up, down=down, other=nn.Linear(WIDTH, WIDTH))
    assert {"up.weight", "down.weight"} <= split(proved(model, values(2, 3, WIDTH)))


def test_a_region_without_gradients_ends_for_ranks_in_one_process() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = m.up(x).abs().amax()
        return m.down(m.up(x)) / scale

    model = Function(forward, up=nn.Linear(WIDTH, INNER), down=nn.Linear(INNER, WIDTH))
    proved(model, values(2, 3, WIDTH))
    assert torch.is_grad_enabled()
