"""Partial sums that are added share one all-reduce, and nothing else is moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.runtime.collectives import reduce_from_region
from tests.models import Function, refill
from tests.oneprocess import assert_same

WIDTH, INNER = 12, 10


def branches(forward: Any) -> nn.Module:
    """Two MLPs under a function that puts them together."""
    parts = {name: nn.Linear(WIDTH, INNER) for name in ("up1", "up2")}
    parts |= {name: nn.Linear(INNER, WIDTH) for name in ("down1", "down2")}
    norm = nn.LayerNorm(WIDTH)  # bars the width
    whole = Function(lambda m, x: m.norm(forward(m, m.norm(x))), norm=norm, **parts)
    return refill(whole.double())


def first(m: Any, x: Tensor) -> Tensor:
    return m.down1(torch.tanh(m.up1(x)))


def second(m: Any, x: Tensor) -> Tensor:
    return m.down2(torch.tanh(m.up2(x)))


def reused(m: Any, x: Tensor) -> Tensor:
    a = first(m, x)
    return a + second(m, x) + a.exp()


def written(m: Any, x: Tensor) -> Tensor:
    a = first(m, x)
    view = a[:, 1:]
    a.add_(second(m, x))
    return a + view.sum()


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        a = first(m, x)
    return a + second(m, x)


MERGED = {
    "beside the residual": lambda m, x: first(m, x) + second(m, x) + x,
    "residual first": lambda m, x: x + first(m, x) + second(m, x),
    "in place": lambda m, x: first(m, x).add_(second(m, x)) + x,
    "in place, and read": lambda m, x: first(m, x).add_(second(m, x)).add_(x),
    "in brackets": lambda m, x: (x + first(m, x)) + (second(m, x) + 1.0 * x),
    "dropout that is off": lambda m, x: nn.functional.dropout(first(m, x), 0.0) + second(m, x),
}
APART = {
    "behind each other": lambda m, x: second(m, first(m, x) + x) + x,
    "a function between": lambda m, x: torch.tanh(first(m, x)) + second(m, x),
    "one is read again": reused,
    "another factor": lambda m, x: torch.add(first(m, x), second(m, x), alpha=2),
    "in place under a view": written,
    "difference": lambda m, x: first(m, x) - second(m, x),
    "one without gradient": without_gradient,
    "another shape": lambda m, x: first(m, x) + second(m, x[:, :1]),
}


def values() -> Tensor:
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [*MERGED, *APART])
@pytest.mark.parametrize("tp", [2, 3])
def test_sums_share_an_all_reduce_where_that_is_the_same(name: str, tp: int) -> None:
    model, x = branches((MERGED | APART)[name]), values()
    lockstep = autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,))
    plan = lockstep.plan
    reductions = [n for n in plan.program().graph.nodes if n.target is reduce_from_region]
    assert len(reductions) == plan.collectives.forward == (1 if name in MERGED else 2)
    assert_same(model, lockstep, (x,))


def test_models_with_parallel_branches_need_one_all_reduce_a_layer() -> None:
    from transformers import GPTJConfig, GPTJForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

    neox = GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=64,
        use_parallel_residual=True,
    )
    gptj = GPTJConfig(n_embd=32, n_layer=3, n_head=4, rotary_dim=4, vocab_size=64)
    words = torch.zeros(2, 5, dtype=torch.long)
    step = {"input_ids": words, "labels": words, "use_cache": False}
    for model in (GPTNeoXForCausalLM(neox), GPTJForCausalLM(gptj)):
        counts = autotp.plan(model.train(), 2, example_inputs=step).collectives
        assert counts.forward == counts.backward == 3 + 1  # a layer each, and embedding or head
        assert counts.loss == 2
