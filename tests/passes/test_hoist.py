"""One f above the norms of parallel branches: gradients are the model's, and others stay below."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.runtime.collectives import copy_all_to_region, copy_to_region
from tests.models import Function, refill
from tests.oneprocess import assert_same

WIDTH, INNER = 12, 10


def branches(forward: Any) -> nn.Module:
    """Two MLPs of norms of one value, and a norm before that bars the width."""
    parts: dict[str, nn.Module] = {name: nn.Linear(WIDTH, INNER) for name in ("up1", "up2")}
    parts |= {name: nn.Linear(INNER, WIDTH) for name in ("down1", "down2")}
    parts |= {name: nn.LayerNorm(WIDTH) for name in ("norm", "norm1", "norm2")}
    parts |= {"scale": nn.RMSNorm(WIDTH, eps=1e-6), "gate": nn.Linear(WIDTH, 1)}
    parts["plain"] = nn.LayerNorm(WIDTH, elementwise_affine=False)
    whole = Function(lambda m, x: m.norm(x + forward(m, m.norm(x))), **parts)
    return refill(whole.double())


def first(m: Any, x: Tensor) -> Tensor:
    return m.down1(torch.tanh(m.up1(x)))  # type: ignore[no-any-return]


def second(m: Any, x: Tensor) -> Tensor:
    return m.down2(torch.tanh(m.up2(x)))  # type: ignore[no-any-return]


def read_whole(m: Any, x: Tensor) -> Tensor:
    a = m.norm1(x)
    return first(m, a) + second(m, m.norm2(x)) + a


def written(m: Any, x: Tensor) -> Tensor:
    mine = x.clone()
    y = first(m, mine.neg())
    mine.mul_(2.0)
    return y + second(m, mine * 3.0)


def twice(m: Any, x: Tensor) -> Tensor:
    """A norm of two layers: its parameters are read before the f of the second one."""
    y = x + first(m, m.norm1(x)) + second(m, m.norm2(x))
    return y + first(m, m.norm1(y)) + second(m, m.norm2(y))


def random(m: Any, x: Tensor) -> Tensor:
    dropped = nn.functional.dropout(x, 0.5, training=m.training)
    return first(m, m.norm1(x)) + second(m, dropped)


# How often activations and parameters of norms are reduced in the backward.
CASES: dict[str, tuple[Any, int, int]] = {
    "two norms": (lambda m, x: first(m, m.norm1(x)) + second(m, m.norm2(x)), 1, 1),
    "a norm and the value": (lambda m, x: first(m, m.norm1(x)) + second(m, x), 1, 1),
    "the value and a norm": (lambda m, x: first(m, x) + second(m, m.norm1(x)), 1, 1),
    "two kinds": (lambda m, x: first(m, m.scale(x)) + second(m, m.norm2(x)), 1, 1),
    "no parameters": (lambda m, x: first(m, m.plain(x)) + second(m, x), 1, 0),
    "functions": (lambda m, x: first(m, x.sin()) + second(m, x.cos()), 1, 0),
    "in two layers": (twice, 2, 2),
    "one norm": (lambda m, x: first(m, m.norm1(x)) + second(m, m.norm1(x)), 1, 1),
    "large parameters": (lambda m, x: first(m, m.gate(x) * x) + second(m, m.norm2(x)), 2, 0),
    "read whole": (read_whole, 2, 0),
    "another shape": (lambda m, x: first(m, x[:, :1].sin()) + second(m, m.norm2(x)), 2, 0),
    "written between": (written, 2, 0),
    "behind each other": (lambda m, x: second(m, m.norm2(x + first(m, m.norm1(x)))), 2, 0),
    "draws": (random, 2, 0),
}


def values() -> Tensor:
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def f_in(plan: autotp.Plan) -> tuple[int, int]:
    nodes = plan.program().graph.nodes
    return tuple(sum(n.target is f for n in nodes) for f in (copy_to_region, copy_all_to_region))  # type: ignore[return-value]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tp", [2, 3])
def test_branches_share_f_where_that_is_the_same(name: str, tp: int) -> None:
    forward, large, small = CASES[name]
    model, x = branches(forward), values()
    if name == "draws":  # what is drawn is compared elsewhere
        counts = autotp.plan(model, tp, example_inputs=(x,)).collectives
        assert (counts.backward, counts.parameters) == (large, small)
        return
    lockstep = autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,))
    counts = lockstep.plan.collectives
    assert f_in(lockstep.plan) == (counts.backward, counts.parameters) == (large, small)
    assert_same(model, lockstep, (x.requires_grad_(),))


@pytest.mark.parametrize("frozen", [["norm1.weight"], ["norm1", "norm2"]])
def test_frozen_parameters_are_not_reduced(frozen: list[str]) -> None:
    model = branches(CASES["two norms"][0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(part) for part in frozen))
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3, example_inputs=(values(),))
    assert lockstep.plan.collectives.parameters == (len(frozen) == 1)
    assert_same(model, lockstep, (values(),))


def test_parameters_of_each_dtype_are_reduced_together() -> None:
    model = branches(lambda m, x: first(m, m.norm1(x)) + second(m, x * m.single))
    model.single = nn.Parameter(torch.linspace(0.5, 2.0, WIDTH))  # the others are float64
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3, example_inputs=(values(),))
    counts = lockstep.plan.collectives
    assert f_in(lockstep.plan) == (1, 2) and (counts.backward, counts.parameters) == (1, 2)
    assert_same(model, lockstep, (values(),), 1e-6)


def test_sequence_parallelism_keeps_the_norms_on_slices() -> None:
    model = branches(CASES["two norms"][0])
    plan = autotp.plan(model, 2, example_inputs=(values(),), sequence_parallel=True)
    assert plan.collectives.reduce_scatters == 1
    assert f_in(plan)[1] == plan.collectives.parameters == 0


def test_models_with_a_norm_for_each_branch_reduce_once_a_layer() -> None:
    from transformers import FalconConfig, FalconForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

    neox = GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=64,
    )
    falcon = FalconConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_kv_heads=4,
        new_decoder_architecture=True,
        vocab_size=64,
    )
    words = torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(0))
    step = {"input_ids": words, "labels": words, "use_cache": False}
    for model in (GPTNeoXForCausalLM(neox), FalconForCausalLM(falcon)):
        lockstep = autotp.parallelize(refill(model), devices=["cpu"] * 3, example_inputs=step)
        counts = lockstep.plan.collectives
        assert (counts.forward, counts.backward, counts.parameters) == (4, 4, 3)
        assert_same(model, lockstep, step, 1e-5)
