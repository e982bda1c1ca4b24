"""What cannot work is refused on every rank alike, in time, and the ranks can go on afterwards."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp
from autotp.runtime import launch
from tests.models import WIDTH, gated_mlp, mlp, refill
from tests.spawn import run

RANKS = 4
SOON = 30.0  # seconds
BAD = (0, -1, True, "2", 3)


class Asks(nn.Module):
    """Its path depends on values, which no graph can follow."""

    def __init__(self, asks: bool = True) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and x.sum() > 0:
            return -x
        return x


ASKING_LINE = Asks.forward.__code__.co_firstlineno + 1


def asking(asks: bool = True) -> nn.Module:
    """A model whose second module asks."""
    return nn.Sequential(refill(mlp()), Asks(asks))


def attempt(model: nn.Module, given: Any = "x", **kwargs: Any) -> dict[str, Any]:
    """The error of a call of parallelize, how long it took, and whether the ranks still talk."""
    x = torch.zeros(2, 5, WIDTH)
    begun = time.monotonic()
    found: dict[str, Any] = {"kind": None, "text": ""}
    try:
        autotp.parallelize(model, example_inputs=(x,) if given == "x" else given, **kwargs)
    except Exception as error:
        found = {
            "kind": type(error).__name__,
            "value": isinstance(error, ValueError),
            "from": type(error.__context__).__name__,
            "text": str(error),
        }
    found["seconds"] = time.monotonic() - begun
    total = torch.ones(1)
    dist.all_reduce(total)
    found["after"] = total.item()
    return found


def refusals(rank: int, world: int) -> dict[str, Any]:
    """Every refusal on one set of ranks, one after the other."""
    found: dict[str, Any] = {f"tp={tp!r}": attempt(mlp(), tp=tp) for tp in BAD}
    ddp = nn.parallel.DistributedDataParallel(refill(mlp()))
    found["wrapped"] = attempt(ddp)
    split = autotp.parallelize(refill(mlp()), example_inputs=(torch.zeros(2, 5, WIDTH),))
    found["already"] = attempt(split)
    found["no inputs"] = attempt(refill(mlp()), given=None)
    found["no model"] = attempt([mlp()])  # type: ignore[arg-type]
    found["not captured"] = attempt(asking())
    found["one not captured"] = attempt(asking(rank == 2))
    found["one calls wrongly"] = attempt(refill(mlp()), {"y": 1} if rank == 1 else "x")
    found["model"] = attempt(refill(gated_mlp() if rank == 3 else mlp()))
    found["size"] = attempt(nn.Sequential(*(refill(mlp()) for _ in range(2 if rank == 3 else 1))))
    found["tp"] = attempt(refill(mlp()), tp=2 if rank == 0 else 4)
    found["weights"] = attempt(changed(rank == 3))
    found["no weights"] = attempt(refill(mlp()).to("meta" if rank == 3 else "cpu"))
    version = torch.__version__
    if rank == 1:
        torch.__version__ = "2.0.0"  # type: ignore[attr-defined]
    found["version"] = attempt(refill(mlp()))
    torch.__version__ = version  # type: ignore[attr-defined]
    found["nothing"] = attempt(refill(mlp()))
    launch.ARRIVAL = 2.0
    found["alone"] = attempt(refill(mlp()), tp=1 if rank == 0 else 4)
    return found


def changed(here: bool) -> nn.Module:
    """A model with one number changed on one rank."""
    model = refill(mlp())
    if here:
        with torch.no_grad():
            model.get_parameter("block.0.bias")[3] += 0.5
    return model


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run(refusals, RANKS, timeout=300)


def same(four: list[dict[str, Any]], name: str, kind: str) -> str:
    """The error's text, the same on every rank."""
    ranks = [found[name] for found in four]
    assert [found["kind"] for found in ranks] == [kind] * RANKS
    assert {found["text"] for found in ranks} == {ranks[0]["text"]}
    return str(ranks[0]["text"])


@pytest.mark.dist
def test_after_every_refusal_the_ranks_go_on(four: list[dict[str, Any]]) -> None:
    for found in four:
        for name, refused in found.items():
            assert refused["after"] == RANKS, name
            assert refused["seconds"] < SOON, name
        assert found["nothing"]["kind"] is None, found["nothing"]["text"]


@pytest.mark.dist
@pytest.mark.parametrize("tp", BAD)
def test_a_bad_tp_is_a_value_error(four: list[dict[str, Any]], tp: Any) -> None:
    text = same(four, f"tp={tp!r}", "PlanError")
    assert f"tp={tp!r}" in text
    assert "\n  try      " in text
    for found in four:
        assert found[f"tp={tp!r}"]["value"]


@pytest.mark.dist
def test_wrapped_split_and_other_things_are_no_models(four: list[dict[str, Any]]) -> None:
    text = same(four, "wrapped", "PlanError")
    assert "DistributedDataParallel" in text and "then wrap the result" in text
    text = same(four, "already", "PlanError")
    assert "already" in text and f"tp={RANKS}" in text
    assert "list" in same(four, "no model", "PlanError")


@pytest.mark.dist
def test_a_model_without_dummy_inputs_needs_example_inputs(four: list[dict[str, Any]]) -> None:
    text = same(four, "no inputs", "PlanError")
    assert text.startswith("Residual needs example_inputs\n")
    assert "example_inputs=(x,)" in text


@pytest.mark.dist
def test_a_capture_that_fails_names_module_and_line(four: list[dict[str, Any]]) -> None:
    text = same(four, "not captured", "CaptureError")
    assert "cannot capture Sequential" in text
    assert "module 1, " in text
    assert f"test_errors.py:{ASKING_LINE} in forward" in text


@pytest.mark.dist
def test_a_rank_that_fails_alone_stops_all(four: list[dict[str, Any]]) -> None:
    text = same(four, "one not captured", "GroupError")
    assert "rank 2 gave another value than ranks 0, 1 and 3" in text
    assert "torch.export cannot capture Sequential" in text
    assert four[2]["one not captured"]["from"] == "CaptureError"
    text = same(four, "one calls wrongly", "GroupError")
    assert "rank 1 gave another value than ranks 0, 2 and 3" in text
    assert four[1]["one calls wrongly"]["from"] == "PlanError"
    for found in four:
        assert found["one calls wrongly"]["seconds"] < SOON / 2, "nobody waits for the limit"


@pytest.mark.dist
def test_ranks_that_disagree_are_told_who(four: list[dict[str, Any]]) -> None:
    for name in ("model", "size"):
        text = same(four, name, "GroupError")
        assert text.startswith("the ranks disagree about the plan\n")
        assert "rank 3 gave another value than ranks 0, 1 and 2" in text
    text = same(four, "tp", "GroupError")
    assert "rank 0: tp=2" in text and "ranks 1, 2 and 3: tp=4" in text
    text = same(four, "version", "GroupError")
    assert "torch 2.0.0" in text and f"torch {torch.__version__}" in text


@pytest.mark.dist
def test_a_rank_that_works_alone_is_missed(four: list[dict[str, Any]]) -> None:
    assert four[0]["alone"]["kind"] is None
    for found in four[1:]:
        assert found["alone"]["kind"] == "GroupError"
        assert found["alone"]["text"].startswith("rank 0 did not come to compare tp\n")


@pytest.mark.dist
def test_other_weights_are_found_by_name(four: list[dict[str, Any]]) -> None:
    text = same(four, "weights", "GroupError")
    assert text.startswith("the ranks have different weights\n")
    assert "block.0.bias" in text
    text = same(four, "no weights", "GroupError")
    assert "norm.weight" in text and ", none on ranks 0 to 3" in text


def test_ranks_need_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(autotp.GroupError, match="torchrun --nproc-per-node 2"):
        autotp.parallelize(mlp(), tp=2, example_inputs=(torch.zeros(2, 5, WIDTH),))
    assert not dist.is_initialized()
