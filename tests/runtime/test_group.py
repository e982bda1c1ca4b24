"""A group's collectives, its agreed numbers, and which ranks tp, mesh and group stand for."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autotp.errors import AutoTPError, GroupError, PlanError
from autotp.runtime.group import Group, resolve_group
from autotp.runtime.random import next_seed, ticket
from tests.spawn import run

# ---- one process


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that no launcher started."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tp", [None, 1])
def test_a_process_alone_is_a_group_of_one(tp: int | None) -> None:
    group = resolve_group(tp, None, None)
    x = torch.ones(2, 3).t()
    assert (group.rank, group.size, group.process_group) == (0, 1, None)
    assert group.all_reduce(x) is x
    assert group.all_gather(x, [(3, 2)])[0] is x
    assert (group.broadcast_object("a"), group.all_gather_object("a")) == ("a", ["a"])
    group.barrier()
    group.agree("the plan", "a")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_more_ranks_than_processes_says_how_to_start() -> None:
    with pytest.raises(GroupError) as error:
        resolve_group(2, None, None)
    assert str(error.value) == (
        "tp=2 needs 2 processes, and this is one alone\n"
        "  values   torch.distributed is not initialized, RANK and WORLD_SIZE are not set\n"
        "  because  each rank is a process of its own\n"
        "  try      torchrun --nproc-per-node 2 your_script.py"
    )


@pytest.mark.parametrize("tp", [0, -1, True, 2.0, "2"])
def test_tp_is_a_positive_integer(tp: Any) -> None:
    with pytest.raises(PlanError, match="cannot use tp=") as error:
        resolve_group(tp, None, None)
    assert isinstance(error.value, ValueError)


def test_a_copy_is_the_same_group_and_a_pickle_is_refused() -> None:
    group = Group()
    assert copy.deepcopy({"group": group})["group"] is group
    assert copy.copy(group) is group
    with pytest.raises(GroupError, match="a tensor-parallel group cannot be pickled"):
        pickle.dumps(group)


def test_ranks_of_one_process_do_not_reach_the_world() -> None:
    group = Group.in_process(2)[1]
    assert (group.rank, group.size) == (1, 2)
    with pytest.raises(AssertionError, match="lockstep"):
        group.all_reduce(torch.ones(1))


# ---- real ranks


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The error that a call raises: its kind and its text."""
    try:
        function(*args, **kwargs)
    except AutoTPError as error:
        return type(error).__name__, str(error)
    return "", ""


def four_ranks(rank: int, world: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    torch.manual_seed(100 + rank // 2)  # the same in both ranks of a pair
    pair = resolve_group(2, None, None)
    seen["in step"] = torch.rand(1).item()
    seen["seeds"] = [next_seed(pair) for _ in range(3)]
    again = resolve_group(2, None, None)
    seen["again"] = again.process_group is pair.process_group
    seen["pair"] = (pair.rank, pair.size, dist.get_process_group_ranks(pair.process_group))
    seen["sum"] = pair.all_reduce(torch.tensor(10.0**rank)).item()
    seen["object"] = pair.broadcast_object(f"of {rank}", src=1)
    seen["objects"] = pair.all_gather_object(rank)
    torch.manual_seed(200 + rank)
    all_four = resolve_group(None, None, None)
    seen["first"] = [all_four.first_of(rank + 7), next_seed(all_four)]
    collectives(all_four, seen)
    one = resolve_group(1, None, None)
    seen["one"] = (one.rank, one.size, one.process_group)

    seen["tp=3"] = refusal(resolve_group, 3, None, None)
    seen["tp=8"] = refusal(resolve_group, 8, None, None)
    seen["tp differs"] = refusal(resolve_group, 2 if rank == 3 else 4, None, None)
    given(rank, seen)
    agreement(rank, pair, all_four, seen)
    # Whatever was refused above, both groups work.
    seen["after"] = [g.all_reduce(torch.tensor(1.0)).item() for g in (pair, all_four)]
    for group in (pair, all_four):
        group.agree("the plan", "same")
        group.barrier()
    return seen


def collectives(group: Group, seen: dict[str, Any]) -> None:
    rank, size = group.rank, group.size
    grid = torch.arange(6.0).view(2, 3) * (rank + 1)
    kept = grid.clone()
    results = [
        group.all_reduce(grid),
        group.all_reduce(grid.t() if rank == 0 else grid.t().contiguous()).t(),
        group.all_reduce(grid[:, :1].expand(2, 3)),
        group.all_reduce(-grid, "max"),
        group.all_reduce(torch.full((2,), rank + 1, dtype=torch.bfloat16)),
        group.all_reduce(torch.ones(0)),
    ]
    seen["reduced"] = results
    seen["untouched"] = torch.equal(grid, kept)
    seen["contiguous"] = all(result.is_contiguous() for result in (results[0], *results[2:]))
    gathers = {
        "rows": [torch.full((r, 2), float(r)) for r in range(size)],
        "columns": [torch.full((r + 1, 3), float(r)).t() for r in range(size)],
        "integers": [torch.arange(10 * r)[:: r + 1] for r in range(size)],
        "booleans": [torch.tensor([True, False] * (2 - r % 2)) for r in range(size)],
        "nothing": [torch.ones(0, r) for r in range(size)],
        "numbers": [torch.tensor(r * 1.5) for r in range(size)],
    }
    seen["gathered"] = {
        name: (group.all_gather(parts[rank], [p.shape for p in parts]), parts)
        for name, parts in gathers.items()
    }
    leaf = torch.ones(2, requires_grad=True)
    seen["detached"] = not group.all_reduce(leaf).requires_grad


def given(rank: int, seen: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,))
    across = mesh["dp"]
    first = dist.new_group([0, 1])
    found = {
        "mesh": resolve_group(None, mesh, None),
        "mesh, tp=2": resolve_group(2, mesh, None),
        "slice": resolve_group(None, across, None),
        "line": resolve_group(4, line, None),
        "group": resolve_group(None, None, mesh.get_group("tp")),
    }
    seen["given"] = {
        name: (group.rank, dist.get_process_group_ranks(group.process_group))
        for name, group in found.items()
    }
    seen["not named"] = refusal(resolve_group, None, unnamed, None)
    seen["both"] = refusal(resolve_group, None, mesh, mesh.get_group("tp"))
    seen["tp against mesh"] = refusal(resolve_group, 4, mesh, None)
    seen["tp against group"] = refusal(resolve_group, 1, None, mesh.get_group("tp"))
    seen["outside"] = refusal(resolve_group, None, None, first) if rank > 1 else None


def agreement(rank: int, pair: Group, all_four: Group, seen: dict[str, Any]) -> None:
    begun = time.monotonic()
    seen["agree"] = refusal(all_four.agree, "the plan", "same")
    seen["differ"] = refusal(all_four.agree, "the plan", "b\nc" if rank == 2 else "a")
    seen["long"] = refusal(pair.agree, "the model", "x" * 500 + str(rank % 2))
    seen["split"] = refusal(pair.agree, "the model", str(rank // 2))  # pairs need not agree
    seen["seconds"] = time.monotonic() - begun
    all_four.barrier()
    begun = time.monotonic()
    if rank == 1:
        time.sleep(2)
    seen["late"] = refusal(all_four.agree, "the plan", "same", timeout=1)
    seen["late seconds"] = time.monotonic() - begun


def started_by_a_launcher(rank: int, world: int) -> dict[str, Any]:
    before = dist.is_initialized()
    alone = resolve_group(1, None, None)
    still = dist.is_initialized()
    group = resolve_group(None, None, None)
    seen: dict[str, Any] = {"started": (before, still, dist.is_initialized())}
    seen["ranks"] = (group.rank, group.size)
    seen["alone"] = (alone.rank, alone.size)
    seen["sum"] = group.all_reduce(torch.tensor(rank + 1)).item()
    seen["tp=4"] = refusal(resolve_group, 4, None, None)
    return seen


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run(four_ranks, 4)


@pytest.mark.dist
def test_tp_below_the_world_makes_groups_of_consecutive_ranks(four: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(four):
        first = rank // 2 * 2
        assert seen["pair"] == (rank % 2, 2, [first, first + 1])
        assert seen["sum"] == 10.0**first + 10.0 ** (first + 1)
        assert seen["object"] == f"of {first + 1}"  # rank 1 of the group
        assert seen["objects"] == [first, first + 1]
        assert seen["again"]
        assert seen["one"] == (0, 1, None)


@pytest.mark.dist
def test_seeds_are_those_of_rank_0_and_generators_stay_in_step(four: list[dict[str, Any]]) -> None:
    assert four[0]["seeds"] == four[1]["seeds"] != four[2]["seeds"] == four[3]["seeds"]
    assert four[0]["in step"] == four[1]["in step"]
    torch.manual_seed(200)  # what rank 0 had set
    first = [7, ticket()]
    assert all(seen["first"] == first for seen in four)


@pytest.mark.dist
def test_reductions_take_any_strides_and_touch_nothing(four: list[dict[str, Any]]) -> None:
    grid = torch.arange(6.0).view(2, 3)
    for seen in four:
        plain, transposed, expanded, highest, half, nothing = seen["reduced"]
        assert torch.equal(plain, 10 * grid)
        assert torch.equal(transposed, 10 * grid)
        assert torch.equal(expanded, 10 * grid[:, :1].expand(2, 3))
        assert torch.equal(highest, -grid)
        assert torch.equal(half, torch.full((2,), 10, dtype=torch.bfloat16))
        assert nothing.shape == (0,)
        assert seen["untouched"] and seen["contiguous"] and seen["detached"]


@pytest.mark.dist
def test_uneven_gathers_lose_nothing(four: list[dict[str, Any]]) -> None:
    for seen in four:
        for name, (found, expected) in seen["gathered"].items():
            for part, wanted in zip(found, expected, strict=True):
                assert part.dtype == wanted.dtype and torch.equal(part, wanted), name


@pytest.mark.dist
def test_refusals_are_the_same_on_every_rank(four: list[dict[str, Any]]) -> None:
    for seen in four:
        assert seen["tp=3"] == (
            "PlanError",
            "cannot place tp groups of 3 on 4 ranks\n"
            "  values   world size 4, tp=3\n"
            "  because  4 is not a multiple of 3: 1 would have no group\n"
            "  try      tp=1, 2 or 4, or start 3 or 6 processes",
        )
        assert seen["tp=8"][1].endswith("try      tp=1, 2 or 4, or start 8 processes")
        assert seen["tp differs"][0] == "GroupError"
        assert "ranks 0, 1 and 2: tp=4\n           rank 3: tp=2\n" in seen["tp differs"][1]
        assert seen["after"] == [2.0, 4.0]


@pytest.mark.dist
def test_a_mesh_or_group_says_which_ranks(four: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(four):
        row = (rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1])
        column = (rank // 2, [rank % 2, rank % 2 + 2])
        assert seen["given"] == {
            "mesh": row,
            "mesh, tp=2": row,
            "slice": column,
            "line": (rank, [0, 1, 2, 3]),
            "group": row,
        }
        for name, kind, text in [
            ("not named", "PlanError", "no dim of the mesh is called tp, and it has 2"),
            ("both", "PlanError", "both mesh and group are given"),
            ("tp against mesh", "PlanError", "tp=4, but the mesh has 2 ranks"),
            ("tp against group", "PlanError", "tp=1, but the group has 2 ranks"),
            ("outside", "GroupError", "this process is not in the group that it was given"),
        ]:
            if seen[name] is not None:
                assert seen[name][0] == kind
                assert seen[name][1].startswith(text)


@pytest.mark.dist
def test_ranks_that_disagree_all_raise_the_same_error(four: list[dict[str, Any]]) -> None:
    for seen in four:
        assert seen["agree"] == seen["split"] == ("", "")
        kind, text = seen["differ"]
        assert kind == "GroupError"
        assert text == four[0]["differ"][1]
        lines = text.splitlines()
        assert lines[0] == "the ranks disagree about the plan"
        assert lines[1] == "  values   ranks 0, 1 and 3: a"
        assert lines[2].startswith("           rank 2: b c (")
        assert lines[3] == "  because  rank 2 gave another value than ranks 0, 1 and 3"
        assert seen["seconds"] < 10
    for rank, seen in enumerate(four):
        kind, text = seen["long"]  # only the hashes show it; ranks are the world's
        assert kind == "GroupError"
        assert f"rank {rank // 2 * 2 + 1} gave another value than rank {rank // 2 * 2}\n" in text


@pytest.mark.dist
def test_a_rank_that_does_not_come_is_named_within_the_limit(four: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(four):
        assert seen["late"] == (
            "GroupError",
            "rank 1 did not come to compare the plan\n"
            "  values   waited 1 s in the group of ranks 0, 1, 2 and 3\n"
            "  because  a rank has failed, hangs or takes another path than its peers\n"
            "  try      look at the output of rank 1 first",
        )
        assert seen["late seconds"] < (6 if rank == 1 else 5)


@pytest.mark.dist
def test_a_launchers_environment_starts_the_ranks() -> None:
    for rank, seen in enumerate(run(started_by_a_launcher, 2, start=False)):
        assert seen["started"] == (False, False, True)
        assert seen["ranks"] == (rank, 2)
        assert seen["alone"] == (0, 1)
        assert seen["sum"] == 3
        assert seen["tp=4"][0] == "PlanError"
