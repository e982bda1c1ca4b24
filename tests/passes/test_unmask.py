"""Masks that a flag says become the flag; all others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from tests.models import refill
from tests.oneprocess import assert_same

aten = torch.ops.aten
WIDTH, HEADS = 12, 3


class Masked(nn.Module):
    """Attention with a mask that a function makes of the lengths of queries and keys."""

    def __init__(self, mask: Callable[[int, int, Tensor], Any]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask = mask

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if past is not None:
            k, v = torch.cat([past, k], 2), torch.cat([past, v], 2)
        mask = self.mask(length, k.shape[2], x)
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


def causal(queries: int, keys: int, x: Tensor) -> Tensor:
    q, k = torch.arange(queries) + (keys - queries), torch.arange(keys)
    return (k[None, None, None, :] <= q[None, None, :, None]).expand(x.shape[0], -1, queries, keys)


def turned(queries: int, keys: int, x: Tensor) -> Tensor:
    q, k = torch.arange(queries), torch.arange(keys)
    return q[:, None] >= k[None]


def strict(queries: int, keys: int, x: Tensor) -> Tensor:
    return torch.arange(keys)[None] < torch.arange(queries)[:, None] + 2


def ahead(queries: int, keys: int, x: Tensor) -> Tensor:
    return torch.arange(keys)[None] <= torch.arange(queries)[:, None] + 1


def documents(queries: int, keys: int, x: Tensor, step: int = 1) -> Tensor:
    """As Transformers: also within one document only, and documents begin where positions jump."""
    batch = x.shape[0]
    places = torch.arange(keys)[None].expand(batch, -1)
    jumps = torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != step
    number = jumps.cumsum(-1)
    rows = torch.arange(batch)[:, None, None, None]
    q, k = torch.arange(queries)[None, None, :, None], torch.arange(keys)[None, None, None]
    seen = places.new_ones((), dtype=torch.bool) & (places[rows, k] <= places[rows, q])
    return seen & (number[rows, q] == number[rows, k])


def each_its_own(queries: int, keys: int, x: Tensor) -> Tensor:
    return documents(queries, keys, x, step=2)


def one_row(queries: int, keys: int, x: Tensor) -> Tensor:
    return (torch.arange(keys)[None] <= torch.arange(1)[:, None]).expand(queries, -1)


def later(queries: int, keys: int, x: Tensor) -> Tensor:
    places = torch.arange(keys + 1)[1:]
    return places[None, :keys] <= torch.arange(queries)[:, None] + 1


def window(queries: int, keys: int, x: Tensor) -> Tensor:
    q, k = torch.arange(queries)[:, None], torch.arange(keys)[None]
    return (k <= q) & (k > q - 3)


def written(queries: int, keys: int, x: Tensor) -> Tensor:
    mask = torch.arange(keys)[None] <= torch.arange(queries)[:, None]
    mask[:, 0].fill_(True)
    mask[-1:].fill_(True)
    mask[0].fill_(True)
    return mask


def backwards(queries: int, keys: int, x: Tensor) -> Tensor:
    return torch.arange(queries)[:, None] <= torch.arange(keys)[None]


def numbers(queries: int, keys: int, x: Tensor) -> Tensor:
    return (torch.arange(keys)[None] <= torch.arange(queries)[:, None]).double()


def attention(model: nn.Module, *inputs: Tensor) -> tuple[Any, ...]:
    """Mask and causal flag of the attention in the captured graph."""
    graph = autotp.plan(model, 2, example_inputs=inputs).stages[0][1].graph
    node = next(n for n in graph.nodes if n.target is aten.scaled_dot_product_attention.default)
    mask, _, flag = (*node.args[3:], None, 0.0, False)[:3]
    assert not any(n.target is aten.le.Tensor for n in graph.nodes) or mask is not None
    return mask, flag


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def model_of(mask: Any) -> nn.Module:
    return refill(Masked(mask).double())


def later_row(queries: int, keys: int, x: Tensor) -> Tensor:
    """Places of a row of their own, which count from 2."""
    places = torch.arange(2 * keys).view(2, keys) + 2
    row, q = torch.ones(1, 1, dtype=torch.int64), torch.arange(queries)[:, None]
    return torch.arange(keys)[None] <= places[row, q] - keys


OTHERS = [later_row, strict, ahead, window, written, backwards, numbers, each_its_own, one_row]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mask", [causal, turned, documents, later])
def test_a_causal_mask_becomes_the_flag(mask: Any, batch: int) -> None:
    model, x = model_of(mask), values(batch, 5, WIDTH)
    assert attention(model, x) == (None, True)
    lockstep = autotp.parallelize(model, devices=["cpu"] * 2, example_inputs=(x,))
    assert_same(model, lockstep, (x,))
    assert_same(model, lockstep, (values(3, 8, WIDTH),))


def test_a_single_query_that_sees_every_key_needs_no_mask() -> None:
    model, x, past = model_of(causal), values(2, 1, WIDTH), values(2, HEADS, 6, 4)
    assert attention(model, x, past) == (None, False)
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3, example_inputs=(x, past))
    assert_same(model, lockstep, (x, past))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mask", OTHERS)
def test_every_other_mask_stays(mask: Any, batch: int) -> None:
    model, x = model_of(mask), values(batch, 5, WIDTH)
    assert attention(model, x)[0] is not None
    lockstep = autotp.parallelize(model, devices=["cpu"] * 2, example_inputs=(x,))
    assert_same(model, lockstep, (x,))


def test_queries_behind_a_past_keep_their_mask() -> None:
    model, x, past = model_of(causal), values(2, 3, WIDTH), values(2, HEADS, 6, 4)
    assert attention(model, x, past)[0] is not None
    lockstep = autotp.parallelize(model, devices=["cpu"] * 2, example_inputs=(x, past))
    assert_same(model, lockstep, (x, past))
