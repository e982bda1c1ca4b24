"""A shard is used element by element as it is; whole numbers are reduced; the rest is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotp.errors import ShardError
from autotp.runtime import foreach
from autotp.runtime.group import Group
from autotp.runtime.sharded import Shard, ShardedParameter, ShardedTensor, local, sharded


def parameter(alone: bool = True) -> ShardedParameter:
    """Rows 0 to 3 of a [6, 4] weight; `alone` in a group of one, whose sums are its own."""
    group = Group() if alone else Group.in_process(2)[0]
    part = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    made = sharded(part, True, Shard("up.weight", (6, 4), group))
    made.grad = part.square()
    return made


def test_a_gradient_lies_as_its_parameter_and_is_read_each_time() -> None:
    p = parameter()
    assert type(p.grad) is ShardedTensor and p.grad.shard is p.shard
    assert isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad
    p.grad.mul_(2)
    assert torch.equal(local(p.grad), 2 * local(p).square())
    p.grad = None
    assert p.grad is None


EACH: list[Callable[[Any], Any]] = [
    lambda p: p * 2,
    lambda p: 2 - p,
    lambda p: p**2,
    lambda p: p.detach(),
    lambda p: p.data,
    lambda p: p.double(),
    lambda p: torch.zeros_like(p),
    lambda p: p.view(3, 4),
    lambda p: p.view_as(p),
    lambda p: p.clone().add_(1),
    lambda p: torch.where(p > 0, p, 0 * p),
    lambda p: p.to(torch.float64).clamp(min=0),
    lambda p: torch._foreach_mul([p, p], 2)[1],
    lambda p: p.grad.isfinite(),
]


@pytest.mark.parametrize("number", range(len(EACH)))
def test_what_is_done_element_by_element_gives_a_shard(number: int) -> None:
    p = parameter(alone=False)
    plain = nn.Parameter(local(p).detach().clone())
    plain.grad = local(p.grad).clone()
    found, wanted = EACH[number](p), EACH[number](plain)
    assert type(found) is ShardedTensor and found.shard is p.shard
    assert torch.equal(local(found), wanted) and found.dtype == wanted.dtype


REFUSED: list[Callable[[Any], Any]] = [
    lambda p: p[0],
    lambda p: p.view(-1),
    lambda p: p.T,
    lambda p: p @ p.new_ones(4),
    lambda p: p.sum(0),
    lambda p: p.norm(dim=1),
    lambda p: torch.linalg.norm(p, 2),
    lambda p: torch.linalg.norm(p, "nuc"),
    lambda p: torch.cat([p, p]),
    lambda p: p.softmax(0),
    lambda p: p.cumsum(1),
    lambda p: p.flatten(),
    lambda p: p.sort(),
    lambda p: p + torch.ones(2, 3, 4),
    lambda p: nn.init.normal_(p),
    lambda p: list(p),
    lambda p: nn.utils.parameters_to_vector([p]),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_mixes_elements_is_refused_by_name(number: int) -> None:
    p = parameter(alone=False)
    before = local(p).detach().clone()
    with pytest.raises(ShardError, match=r"up.weight: \[3, 4\] of \[6, 4\] on rank 0 of 2"):
        REFUSED[number](p)
    assert torch.equal(local(p), before)


@pytest.mark.parametrize("of", [torch.sum, torch.max, torch.amin, torch.norm, torch.any])
def test_whole_numbers_are_not_reduced_over_ranks_of_one_process(of: Any) -> None:
    with pytest.raises(ShardError, match="run in lockstep"):
        of(parameter(alone=False))


def test_whole_numbers_of_a_group_of_one_are_its_own() -> None:
    p = parameter()
    x = local(p).detach()
    for of in (torch.sum, torch.max, torch.min, torch.amax, torch.amin, torch.norm):
        assert torch.allclose(of(p), of(x))
    assert torch.allclose(p.mean(), x.sum() / 24)  # of all [6, 4]
    for order in (1, 2, 0.5, 3, float("inf"), 0):
        assert torch.allclose(p.norm(order), x.norm(order))
        assert torch.allclose(torch.linalg.vector_norm(p, order), x.norm(order))
    assert bool((p == p).all()) and not bool((p != p).any())
    assert not isinstance(p.norm(), ShardedTensor)


def test_a_penalty_on_parameters_has_its_gradient() -> None:
    p = parameter()
    p.grad = None
    (0.5 * (p**2).sum() + p.norm()).backward()
    x = local(p).detach()
    assert p.grad is not None
    assert torch.allclose(local(p.grad), x + x / x.norm())


def test_what_a_shard_is_a_view_of_is_no_shard_and_has_an_end() -> None:
    part = parameter()
    view = part.detach().view(part.shape)
    base = view._base
    assert type(view) is ShardedTensor and type(base) is torch.Tensor
    assert base._base is None


def test_a_copy_is_a_shard_and_a_file_holds_a_tensor() -> None:
    p = parameter()
    twin = copy.deepcopy([p, p, p.grad])
    assert type(twin[0]) is ShardedParameter and twin[0] is twin[1] is not p
    assert twin[0].shard.group is p.shard.group and type(twin[2]) is ShardedTensor
    assert torch.equal(local(twin[0]), local(p))
    file = io.BytesIO()
    torch.save({"p": p, "grad": p.grad}, file)
    file.seek(0)
    read = torch.load(file)
    assert type(read["p"]) is Tensor and type(read["grad"]) is Tensor
    assert torch.equal(read["p"], local(p))


def test_a_shard_prints_and_tells_its_facts() -> None:
    p = parameter()
    assert "1.5" in repr(p) and p.shape == (3, 4) and p.numel() == 12 and p.stride() == (4, 1)
    assert p.dtype is torch.float32 and p.device.type == "cpu" and hash(p) == id(p)
    assert torch.equal(p, p) and len(p) == 3


def test_operators_as_compiled_graphs_call_them_compute_with_the_part() -> None:
    p = parameter(alone=False).detach()
    x, out = torch.randn(2, 3), torch.empty(2, 4)
    wanted = x @ local(p)
    found = torch.ops.aten.mm.default(x, p)
    assert type(found) is Tensor and torch.equal(found, wanted)
    torch.mm(x, p, out=out)
    assert torch.equal(out, wanted)
    with pytest.raises(ShardError, match="mm of a shard"):
        torch.mm(x, p)


def test_one_rank_that_overflows_is_seen_by_the_scaler() -> None:
    p = parameter()
    p.grad = torch.full((3, 4), float("inf"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(torch.ones(()))
    before = local(p).detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(local(p), before) and scaler.get_scale() == 2.0


def test_torchs_lists_of_fast_types_are_where_they_were() -> None:
    import torch.optim.optimizer as optim
    import torch.utils._foreach_utils as utils

    for home in (optim, utils):  # else optimizers work tensor by tensor: see runtime/foreach.py
        assert ShardedParameter in getattr(home, foreach.NAME)
    assert utils._has_foreach_support([parameter(), parameter().grad], torch.device("cpu"))
