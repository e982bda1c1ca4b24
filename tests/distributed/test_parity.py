"""Ranks that are processes compute and train as the whole model does.

One spawn for each world size, with many checks: starting the ranks is what takes the time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp
from examples.nanogpt import GPT, GPTConfig
from tests.distributed.cases import (
    assert_alike,
    assert_below,
    labelled,
    own_loss,
    parity,
    targets,
    tokens,
    train,
    whole_parameters,
)
from tests.models import WIDTH, mlp, refill, tiny_gpt2
from tests.spawn import run

pytestmark = [pytest.mark.dist, pytest.mark.slow]
DEADLINE = 400.0
LAYERS = 2


def two(rank: int, world: int) -> dict[str, Any]:
    """GPT-2 of Hugging Face and of plain PyTorch, and 25 heads, on 2 ranks."""
    x = tokens(3, 10)
    model = refill(tiny_gpt2(n_inner=130))
    found = {"gpt2": parity(model, autotp.parallelize(model, logits="gather"), labelled(x))}
    odd = refill(tiny_gpt2(n_layer=1, n_head=25, n_embd=50))
    found["25 heads"] = parity(odd, autotp.parallelize(odd, logits="gather"), labelled(x))
    plain = refill(GPT(GPTConfig(layers=1)))
    example = (x[:2], targets(x[:2]))
    tp = autotp.parallelize(plain, example_inputs=example, logits="gather")
    found["plain"] = parity(plain, tp, lambda m: m(x, targets(x).clamp(min=-1))[::-1])
    return found


def three(rank: int, world: int) -> dict[str, Any]:
    """Widths that 3 does not divide, in float32 and float64; dropout under other seeds."""
    x = tokens(2, 9)
    model = refill(tiny_gpt2(n_inner=130))
    found = {"gpt2": parity(model, autotp.parallelize(model, logits="gather"), labelled(x))}
    model = refill(tiny_gpt2(n_inner=130).double())
    example = {"input_ids": x, "use_cache": False}
    tp = autotp.parallelize(model, tp=3, example_inputs=example, logits="gather")
    found["float64"] = parity(model, tp, own_loss(x))
    dropping = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    tp = autotp.parallelize(refill(tiny_gpt2(n_layer=1, **dropping)).train())
    torch.manual_seed(rank)  # as by a user who does not know that ranks share one model
    same = [labelled(x)(tp)[0].item() for _ in range(2)]
    losses = train(tp, labelled(x), 6)
    found["dropout"] = {"same": same, "losses": losses, "whole": whole_parameters(tp)}
    return found


def four(rank: int, world: int) -> dict[str, Any]:
    """All 4 ranks, pairs of them, a mesh and a group."""
    model = refill(tiny_gpt2(n_inner=130))
    x = tokens(2, 9)
    found = {"gpt2": parity(model, autotp.parallelize(model, logits="gather"), labelled(x))}
    model = refill(tiny_gpt2(n_layer=1))
    batch = tokens(2, 9, seed=rank // 2)  # pairs train on batches of their own
    tp = autotp.parallelize(model, tp=2, logits="gather")
    found["pairs"] = parity(model, tp, labelled(batch), steps=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found["mesh"] = small(rank // 2, mesh=mesh)
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    found["group"] = small(rank % 2, group=groups[rank % 2])
    return found


def small(seed: int, **where: Any) -> dict[str, Any]:
    """A small model on some of the ranks, which compute on a batch of their own."""
    model = refill(mlp())
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
    tp = autotp.parallelize(model, example_inputs=(x,), **where)

    def step(m: nn.Module) -> tuple[Tensor, Tensor]:
        y = m(x)
        return y.square().mean(), y

    return parity(model, tp, step, steps=2)


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run(two, 2, timeout=DEADLINE)


@pytest.fixture(scope="module")
def on_three() -> list[dict[str, Any]]:
    return run(three, 3, timeout=DEADLINE)


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    return run(four, 4, timeout=DEADLINE)


def one() -> dict[str, Any]:
    model = refill(tiny_gpt2(n_inner=130))
    return parity(model, autotp.parallelize(model, tp=1), labelled(tokens(2, 9)))


def check(ranks: list[dict[str, Any]], limit: float = 1e-5) -> None:
    """Equal to the model, communicating as planned, and alike on all ranks."""
    for number, found in enumerate(ranks):
        assert found["rank"] == (number, len(ranks))
        assert_below(limit, found["errors"])
        # rounding grows over ten steps, as a fused formula rounds in another order; float64 tells
        # that it is rounding
        assert_below(max(5 * limit, 1e-11), found["after"])
        assert found["moved"] > 1e-4, "training moves every parameter"
        assert found["losses"] == ranks[0]["losses"], "to the bit"
        planned = found["planned"]
        gathers = {"allgather": planned["gathers"]} if planned["gathers"] else {}
        assert found["forward"] == {"allreduce": planned["forward"] + planned["loss"], **gathers}
        assert found["backward"] == {"allreduce": planned["backward"]}
        assert found["bytes"][0] == found["bytes"][1]
    assert_alike([found["whole"] for found in ranks])


def test_one_rank_computes_the_same_and_talks_to_nobody() -> None:
    found = one()
    assert_below(1e-5, found["errors"])
    assert_below(1e-5, found["after"])
    assert found["forward"] == found["backward"] == {}
    assert set(found["planned"].values()) == {0}
    assert found["bytes"][0] == found["bytes"][1]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gpt2_computes_and_trains_the_same(world: int, request: pytest.FixtureRequest) -> None:
    ranks = request.getfixturevalue({2: "on_two", 3: "on_three", 4: "on_four"}[world])
    check([found["gpt2"] for found in ranks])
    uneven = {2: (65, 65), 3: (44, 43, 43), 4: (33, 33, 32, 32)}[world]
    for found in ranks:
        assert uneven in found["gpt2"]["widths"].values()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_layer_takes_two_all_reduces_forward_and_two_backward(
    world: int, request: pytest.FixtureRequest
) -> None:
    # one more each way and two small ones in the loss for the vocabulary; the logits are gathered
    for found in request.getfixturevalue({2: "on_two", 3: "on_three", 4: "on_four"}[world]):
        gpt2 = found["gpt2"]
        assert gpt2["kinds"].count("vocabulary") == 1
        assert gpt2["forward"] == {"allreduce": 2 * LAYERS + 1 + 2, "allgather": 1}
        assert gpt2["backward"] == {"allreduce": 2 * LAYERS + 1}


def test_25_heads_on_two_ranks(on_two: list[dict[str, Any]]) -> None:
    check([found["25 heads"] for found in on_two])
    assert (13, 12) in on_two[0]["25 heads"]["widths"].values()


def test_plain_pytorch_gpt(on_two: list[dict[str, Any]]) -> None:
    check([found["plain"] for found in on_two])
    assert set(on_two[0]["plain"]["kinds"]) == {"attention", "mlp", "vocabulary"}


def test_float64_is_exact_but_for_rounding(on_three: list[dict[str, Any]]) -> None:
    check([found["float64"] for found in on_three], limit=1e-12)
    assert on_three[0]["float64"]["dtypes"] == {"torch.float64"}


def test_dropout_is_one_draw_of_all_ranks(on_three: list[dict[str, Any]]) -> None:
    for found in on_three:
        assert found["dropout"]["same"] == on_three[0]["dropout"]["same"]
        assert found["dropout"]["losses"] == on_three[0]["dropout"]["losses"]
        first, second = found["dropout"]["same"]
        assert first != second, "it drops"
    assert_alike([found["dropout"]["whole"] for found in on_three])


def test_a_world_of_four_holds_two_groups_of_two(on_four: list[dict[str, Any]]) -> None:
    pairs = [found["pairs"] for found in on_four]
    check(pairs[:2])
    check(pairs[2:])
    assert pairs[0]["losses"] != pairs[2]["losses"]


def test_a_mesh_or_a_group_says_who_shares_the_model(on_four: list[dict[str, Any]]) -> None:
    mesh, group = ([found[name] for found in on_four] for name in ("mesh", "group"))
    check(mesh[:2])
    check(mesh[2:])
    check([group[0], group[2]])
    check([group[rank] for rank in sorted((1, 3), key=lambda rank: group[rank]["rank"])])
    assert mesh[0]["losses"] != mesh[2]["losses"]
