"""Attention takes groups of heads where keys and values were repeated; all else stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.pipeline import rank_program
from tests.models import refill
from tests.oneprocess import assert_same

aten = torch.ops.aten
WIDTH, SIZE = 6, 4
Repeat = Callable[[Tensor, int], Tensor]


def expand(x: Tensor, times: int) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def interleave(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, dim=1)


def negative(x: Tensor, times: int) -> Tensor:
    return x.unsqueeze(-3).expand(-1, -1, times, -1, -1).flatten(1, 2)


def round_robin(x: Tensor, times: int) -> Tensor:
    """Key head 0, 1, 0, 1: no query head is beside its own."""
    b, h, s, d = x.shape
    return x[:, None].expand(b, times, h, s, d).reshape(b, h * times, s, d)


def along_tokens(x: Tensor, times: int) -> Tensor:
    b, h, s, d = x.shape
    return x.repeat_interleave(times, dim=2).reshape(b, h * times, s, d)


def written(x: Tensor, times: int) -> Tensor:
    mine = x.clone()
    many = expand(mine, times)
    mine.add_(1.0)
    return many


def without_gradient(x: Tensor, times: int) -> Tensor:
    with torch.no_grad():
        return expand(x, times)


class Grouped(nn.Module):
    """`key_heads` serve `heads`; how keys are repeated and what attention is told is given."""

    def __init__(self, repeat: Repeat, heads: int = 6, key_heads: int = 3, **given: Any) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, heads * SIZE), nn.Linear(heads * SIZE, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * SIZE) for _ in range(2))
        self.repeat, self.times, self.given = repeat, heads // key_heads, given

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = self.many(k), self.many(v)
        y = F.scaled_dot_product_attention(q, k, v, **self.options(x))
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def many(self, x: Tensor) -> Tensor:
        return self.repeat(x, self.times)

    def options(self, x: Tensor) -> dict[str, Any]:
        return self.given


class Masked(Grouped):
    def options(self, x: Tensor) -> dict[str, Any]:
        places = torch.arange(x.shape[1], device=x.device)
        return {"attn_mask": (places[:, None] - places).abs() < 3}


class Apart(Grouped):
    """Keys are repeated by a module, whose hooks see them."""

    def __init__(self) -> None:
        super().__init__(expand)
        self.repeater = Repeater()

    def many(self, x: Tensor) -> Tensor:
        return self.repeater(x)  # type: ignore[no-any-return]


class Repeater(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return expand(x, 2)


class KeysOnly(Grouped):
    """Values have a head for each query head."""

    def __init__(self) -> None:
        super().__init__(expand)
        self.v = nn.Linear(WIDTH, 6 * SIZE)

    def many(self, x: Tensor) -> Tensor:
        return x if x.shape[1] == 6 else expand(x, 2)


def values(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 5, WIDTH, dtype=dtype, generator=generator)


def grouped(model: nn.Module, tp: int, x: Tensor) -> list[bool]:
    """For each attention of each rank whether it takes groups."""
    plan = autotp.plan(model, tp, example_inputs=(x,))
    found = []
    for rank in range(tp):
        for shapes in (False, True):
            graph = rank_program(plan, rank, shapes=shapes).graph
            calls = graph.find_nodes(
                op="call_function", target=aten.scaled_dot_product_attention.default
            )
            found += [bool(call.kwargs.get("enable_gqa")) for call in calls]
    return found


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "key_heads"), [(6, 3), (6, 1), (8, 4), (4, 2)])
@pytest.mark.parametrize("repeat", [expand, interleave, negative])
def test_keys_are_read_as_they_are(repeat: Repeat, heads: int, key_heads: int, tp: int) -> None:
    model = refill(Grouped(repeat, heads, key_heads, is_causal=True).double())
    x = values()
    assert grouped(model, tp, x) == [True] * 2 * tp
    assert_same(model, autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,)), (x,))


OTHERS = {
    "round robin": lambda: Grouped(round_robin),
    "along tokens": lambda: Grouped(along_tokens),
    "written to": lambda: Grouped(written),
    "in another region": lambda: Grouped(without_gradient),
    "masked": lambda: Masked(expand),
    "of another module": Apart,
    "keys alone": KeysOnly,
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_others_stay(make: Callable[[], nn.Module], tp: int) -> None:
    model, x = refill(make().double()), values()
    assert not any(grouped(model, tp, x))
    assert_same(model, autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,)), (x,))


def test_with_cuda_half_precision_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for dtype, wanted in ((torch.float64, False), (torch.float32, False), (torch.bfloat16, True)):
        model = refill(Grouped(expand).to(dtype))
        assert grouped(model, 2, values(dtype)) == [wanted] * 4


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTP_WITHOUT", "group")
    assert not any(grouped(refill(Grouped(expand).double()), 2, values()))
