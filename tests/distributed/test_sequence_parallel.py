"""Slices of the sequence on ranks that are processes: parity, traffic, training, recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autotp
from autotp.runtime.group import Group
from autotp.runtime.sequence import (
    gather_from_sequence,
    gather_sequence_to_region,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
)
from tests.distributed.cases import (
    assert_alike,
    assert_below,
    labelled,
    parity,
    tokens,
    train,
    whole_parameters,
)
from tests.models import refill, tiny_gpt2
from tests.spawn import run

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LENGTHS = (10, 2)  # neither divides by 3; of 2 one rank has nothing


def on_ranks(rank: int, world: int) -> dict[str, Any]:
    model = refill(tiny_gpt2(n_inner=130))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tp = autotp.parallelize(model, sequence_parallel=True, logits="gather")
    found: dict[str, Any] = {}
    for length in LENGTHS:
        found[str(length)] = parity(model, tp, labelled(tokens(3, length)), steps=3)
        model.load_state_dict(start)
        tp.load_state_dict(start)
    found["conversions"] = conversions(Group(torch.distributed.group.WORLD))

    dropping = refill(tiny_gpt2(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)).train()
    tp = autotp.parallelize(dropping, sequence_parallel=True)
    start = {name: tensor.clone() for name, tensor in dropping.state_dict().items()}
    x = tokens(3, 10)
    for name in ("kept", "recomputed"):
        tp.load_state_dict(start)
        torch.manual_seed(rank)
        found[name] = trained(tp, x)
        tp.activation_checkpointing_enable()
    found["whole"] = whole_parameters(tp)
    tp = autotp.parallelize(dropping, sequence_parallel=True, random="whole")
    torch.manual_seed(5)
    wanted = trained(dropping, x)
    torch.manual_seed(5 + rank)
    found["as the model"] = (trained(tp, x), wanted)
    return found


def trained(model: Any, x: torch.Tensor) -> list[float]:
    """Losses of six steps."""
    loss, _ = labelled(x)(model)
    loss.backward()
    return [loss.item(), *train(model, labelled(x), 6)]


def conversions(group: Group) -> dict[str, Any]:
    """Values, gradients and gradients of gradients of each conversion, against those of the
    whole."""
    found: dict[str, Any] = {}
    for size in (7, 2):
        generator = torch.Generator().manual_seed(size)
        whole, weight = torch.randn(2, 3, size, 2, generator=generator, dtype=torch.float64)
        edges = [size * rank // group.size for rank in range(group.size + 1)]
        mine = slice(edges[group.rank], edges[group.rank + 1])
        partial = (whole * (group.rank + 1)).requires_grad_()
        part = reduce_scatter_to_sequence(partial, 1, group)
        total = sum(range(1, group.size + 1))
        found[f"reduce-scatter {size}"] = distance(part, total * whole[:, mine])
        (grad,) = torch.autograd.grad((part.pow(3) * weight[:, mine]).sum(), partial)
        found[f"its gradient {size}"] = distance(grad, 3 * (total * whole).pow(2) * weight)

        x = whole.clone().requires_grad_()
        part = scatter_to_sequence(x, 1, group)
        joined = gather_sequence_to_region(part, 1, size, group)
        found[f"gather {size}"] = distance(joined, whole)
        loss = (joined.pow(3) * weight * (group.rank + 1)).sum()  # differs: gradients are summed
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        found[f"gradients are summed {size}"] = distance(first, 3 * total * whole.pow(2) * weight)

        x = whole.clone().requires_grad_()
        joined = gather_from_sequence(scatter_to_sequence(x, 1, group), 1, size, group)
        (first,) = torch.autograd.grad((joined.pow(3) * weight).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * weight).sum(), x)
        found[f"gradients are alike {size}"] = distance(first, 3 * whole.pow(2) * weight)
        found[f"second gradient {size}"] = distance(second, 6 * whole * weight.pow(2))
    return found


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).detach().abs().max()) if wanted.numel() else 0.0


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run(on_ranks, request.param, timeout=400)


def test_values_gradients_and_traffic_are_as_planned(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for length in LENGTHS:
            case = found[str(length)]
            assert_below(1e-5, case["errors"])
            assert_below(1e-5, case["after"])
            planned = case["planned"]
            assert planned["forward"] == 0, "every g became a reduce-scatter"
            gathers = planned["sequence_gathers"] + planned["sequence_wholes"]
            assert case["forward"] == {
                "allreduce": planned["loss"],
                "allgather": gathers + planned["gathers"],
                "reduce_scatter": planned["reduce_scatters"],
            }
            assert case["backward"] == {
                "allreduce": planned["backward"],
                "allgather": planned["backward_sequence_gathers"],
                "reduce_scatter": planned["backward_reduce_scatters"],
            }
    for length in LENGTHS:
        assert_alike([found[str(length)]["whole"] for found in ranks])


def test_conversions_and_their_gradients(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_below(1e-12, found["conversions"])


def test_dropout_trains_alike_and_is_replayed(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["kept"] == found["recomputed"] == ranks[0]["kept"]
        own, wanted = found["as the model"]
        assert own == pytest.approx(wanted, rel=1e-5)
    assert_alike([found["whole"] for found in ranks])
