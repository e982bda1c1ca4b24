"""f, g, gather and scatter: values, gradients and gradients of gradients, as in the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from autotp.runtime.collectives import (
    Ranges,
    copy_all_to_region,
    copy_to_region,
    gather_from_region,
    place,
    reduce_from_region,
    scatter_to_region,
    take,
)
from autotp.runtime.group import Group
from tests.spawn import run

# What each of three ranks holds of a dim. Fused: three blocks, and a share of each of them.
LAYOUTS: dict[str, tuple[Ranges, ...]] = {
    "even": (((0, 2),), ((2, 4),), ((4, 6),)),
    "uneven": (((0, 3),), ((3, 4),), ((4, 5),)),
    "fused": (((0, 2), (4, 6), (8, 10)), ((2, 3), (6, 7), (10, 11)), ((3, 4), (7, 8), (11, 12))),
    "some hold nothing": (((0, 1),), (), ((1, 1),)),
    "not in the order of ranks": (((4, 6), (0, 1)), ((1, 2),), ((2, 4),)),
}


def size(layout: tuple[Ranges, ...]) -> int:
    return sum(stop - start for held in layout for start, stop in held)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- one process


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_place_is_the_inverse_of_take(layout: tuple[Ranges, ...], dim: int) -> None:
    shape = [4, 3, 5]
    shape[dim] = size(layout)
    x = values(*shape)
    parts = [take(x, dim, held) for held in layout]
    for part, held in zip(parts, layout, strict=True):
        positions = [i for start, stop in held for i in range(start, stop)]
        assert torch.equal(part, x.index_select(dim, torch.tensor(positions, dtype=torch.int)))
    assert torch.equal(place(parts, dim, layout), x)


def test_one_piece_is_taken_as_a_view() -> None:
    x = values(4, 6)
    assert take(x, 1, ((2, 4),)).data_ptr() == x[:, 2:].data_ptr()


@pytest.mark.parametrize(
    ("lengths", "layout", "text"),
    [
        ((2, 2), (((0, 2),), ((3, 5),)), "position 2 is held by no rank or by two"),
        ((2, 2), (((0, 2),), ((1, 3),)), "position 1 is held by no rank or by two"),
        ((2, 3), (((0, 2),), ((2, 4),)), "a part of 3 positions"),
        ((2,), (((0, 2),), ((2, 4),)), "1 parts, and ranges of 2 ranks"),
    ],
)
def test_place_refuses_what_is_no_partition(lengths: Any, layout: Any, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        place([torch.ones(n) for n in lengths], 0, layout)


def test_take_and_place_are_differentiable_twice() -> None:
    layout = LAYOUTS["fused"]
    x = values(2, 12).requires_grad_()
    for held in layout:
        assert gradcheck(lambda x, held=held: take(x, 1, held).sin(), x)
    parts = [take(x.detach(), 1, held).clone().requires_grad_() for held in layout]
    assert gradgradcheck(lambda *parts: place([p.sin() for p in parts], 1, layout), parts)


def test_a_single_rank_changes_nothing() -> None:
    x, alone, whole = values(2, 4), Group(), (((0, 4),),)
    assert copy_to_region(x, alone) is x
    assert copy_all_to_region([x], alone)[0] is x
    assert reduce_from_region(x, alone) is x
    assert gather_from_region(x, 1, whole, alone) is x
    assert scatter_to_region(x, 1, whole, alone) is x


# ---- real ranks


class Counting(Group):
    """A group that counts its collectives."""

    issued = 0

    def all_reduce(self, x: Tensor, op: str = "sum", own: bool = False) -> Tensor:
        self.issued += 1
        return super().all_reduce(x, op, own)

    def all_gather(self, x: Tensor, shapes: Any) -> list[Tensor]:
        self.issued += 1
        return super().all_gather(x, shapes)

    def count(self) -> int:
        found, self.issued = self.issued, 0
        return found


def world() -> Counting:
    return Counting(torch.distributed.group.WORLD)


def two_ranks(rank: int, _: int) -> dict[Any, Any]:
    group = world()
    seen: dict[Any, Any] = {}

    x = values(3, 4).requires_grad_()
    y = copy_to_region(x, group)
    seen["f shares memory"] = y.data_ptr() == x.data_ptr()
    seen["f forward issues"] = group.count()
    incoming = values(3, 4, seed=10 + rank)
    kept = incoming.clone()
    y.backward(incoming)
    seen["f backward issues"] = group.count()
    seen["f"] = x.grad
    seen["f leaves the incoming gradient"] = torch.equal(incoming, kept)

    x = values(3, 4, seed=20 + rank).requires_grad_()
    kept = x.detach().clone()
    y = reduce_from_region(x, group)
    seen["g forward issues"] = group.count()
    seen["g leaves its input"] = torch.equal(x, kept)
    y.backward(incoming)
    seen["g backward issues"] = group.count()
    seen["g"], seen["g backward"] = y.detach(), x.grad is not None and torch.equal(x.grad, incoming)

    # Gradients that are no plain memory: one number for all, transposed, every other column.
    for name, use in {
        "expanded": lambda y: (rank + 1) * y.sum(),
        "transposed": lambda y: (y.t() * values(4, 3, seed=30 + rank)).sum(),
        "strided": lambda y: torch.stack([y, y], -1)[..., rank].mul(values(3, 4)).sum(),
    }.items():
        x = values(3, 4).requires_grad_()
        use(copy_to_region(x, group)).backward()
        seen[f"f, {name}"] = x.grad
        x = values(3, 4).requires_grad_()
        use(reduce_from_region(x, group)).backward()
        seen[f"g, {name}"] = x.grad
    seen["g of an expanded value"] = reduce_from_region(torch.tensor(1.0).expand(3), group)

    xs = [values(3, 4).requires_grad_(), values(2).requires_grad_(), values(5)]
    group.count()
    ys = copy_all_to_region(xs, group)
    losses = [(y * (rank + 1)).pow(2).sum() for y in ys]
    first = torch.autograd.grad(sum(losses), xs[:2], create_graph=True)
    seen["f of all issues"] = group.count()
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), xs[:2])
    seen["f of all"] = [x.detach() for x in (*xs[:2], *first, *second)]

    tensors = mlp_tensors()
    half = slice(4 * rank, 4 * rank + 4)
    mine = {**tensors, "up": tensors["up"][:, half], "down": tensors["down"][half]}
    group.count()
    seen["mlp"] = gradients(
        mine, lambda x: copy_to_region(x, group), lambda x: reduce_from_region(x, group)
    )
    seen["half"] = half
    return seen


def three_ranks(rank: int, _: int) -> dict[Any, Any]:
    group = world()
    seen: dict[Any, Any] = {}
    for name, layout in LAYOUTS.items():
        for dim in (0, 1):
            shape = [3, 3]
            shape[dim] = size(layout)
            x = values(*shape).requires_grad_()
            part = scatter_to_region(x, dim, layout, group)
            whole = gather_from_region(part.pow(3), dim, layout, group)
            loss = (whole * values(*shape, seed=1)).sum()
            first = torch.autograd.grad(loss, x, create_graph=True)[0]
            second = torch.autograd.grad((first * values(*shape, seed=2)).sum(), x)[0]
            seen[name, dim] = tuple(found.detach() for found in (part, whole, first, second))
    seen["issued"] = group.count()

    # Each rank reads other outputs of the gather: a gather's gradient is not summed.
    layout = LAYOUTS["uneven"]
    x = torch.ones(len(range(*layout[rank][0])), requires_grad=True)
    gather_from_region(x, 0, layout, group).mul(values(5)).sum().backward()
    seen["gather's gradient"] = x.grad
    integers = torch.arange(5)
    part = scatter_to_region(integers, 0, layout, group)
    seen["integers"] = (part, gather_from_region(part, 0, layout, group))
    return seen


def mlp_tensors() -> dict[str, Tensor]:
    return {
        "x": values(3, 5, seed=1),
        "scale": values(5, seed=2),
        "up": values(5, 8, seed=3),
        "down": values(8, 5, seed=4),
        "bias": values(5, seed=5),
    }


def gradients(tensors: dict[str, Tensor], f: Any, g: Any) -> dict[str, Tensor]:
    """First and second order gradients of a column- and row-parallel pair behind a scale."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    hidden = torch.tanh(f(leaves["x"] * leaves["scale"]) @ leaves["up"])
    loss = (g(hidden @ leaves["down"]) + leaves["bias"]).pow(3).sum()
    first = torch.autograd.grad(loss, [*leaves.values()], create_graph=True)
    # Of replicated ones only: the square of a shard's gradient would be a partial sum.
    loss = first[0].pow(2).sum() + first[1].pow(2).sum() + first[4].pow(2).sum()
    second = torch.autograd.grad(loss, [*leaves.values()])
    found = dict(zip(leaves, first, strict=True))
    found.update({f"{k} again": v for k, v in zip(leaves, second, strict=True)})
    return {name: tensor.detach() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def two() -> list[dict[Any, Any]]:
    return run(two_ranks, 2)


@pytest.fixture(scope="module")
def three() -> list[dict[Any, Any]]:
    return run(three_ranks, 3)


@pytest.mark.dist
def test_f_is_the_identity_and_sums_gradients(two: list[dict[Any, Any]]) -> None:
    for seen in two:
        assert seen["f shares memory"]
        assert (seen["f forward issues"], seen["f backward issues"]) == (0, 1)
        assert torch.equal(seen["f"], values(3, 4, seed=10) + values(3, 4, seed=11))
        assert seen["f leaves the incoming gradient"]


@pytest.mark.dist
def test_f_of_several_values_sums_their_gradients_at_once(two: list[dict[Any, Any]]) -> None:
    for seen in two:
        assert seen["f of all issues"] == 1
        x, z, *found = seen["f of all"]
        for gradient, wanted in zip(found, (10 * x, 10 * z, 200 * x, 200 * z), strict=True):
            torch.testing.assert_close(gradient, wanted)


@pytest.mark.dist
def test_g_sums_values_and_its_backward_does_not_reduce(two: list[dict[Any, Any]]) -> None:
    for seen in two:
        assert (seen["g forward issues"], seen["g backward issues"]) == (1, 0)
        assert torch.equal(seen["g"], values(3, 4, seed=20) + values(3, 4, seed=21))
        assert seen["g leaves its input"]
        assert seen["g backward"]
        assert torch.equal(seen["g of an expanded value"], torch.full((3,), 2.0))


@pytest.mark.dist
def test_gradients_may_lie_in_memory_as_they_like(two: list[dict[Any, Any]]) -> None:
    transposed = [values(4, 3, seed=30 + rank).t() for rank in range(2)]
    for rank, seen in enumerate(two):
        assert torch.equal(seen["f, expanded"], torch.full((3, 4), 3.0).double())
        assert torch.equal(seen["g, expanded"], torch.full((3, 4), rank + 1.0).double())
        assert torch.equal(seen["f, transposed"], transposed[0] + transposed[1])
        assert torch.equal(seen["g, transposed"], transposed[rank])
        assert torch.equal(seen["f, strided"], 2 * values(3, 4))
        assert torch.equal(seen["g, strided"], values(3, 4))


@pytest.mark.dist
def test_a_gemm_pair_has_the_gradients_of_the_whole_one_twice(two: list[dict[Any, Any]]) -> None:
    whole = gradients(mlp_tensors(), lambda x: x, lambda x: x)
    for seen in two:
        for name, expected in whole.items():
            if name.startswith("up"):
                expected = expected[:, seen["half"]]
            if name.startswith("down"):
                expected = expected[seen["half"]]
            torch.testing.assert_close(seen["mlp"][name], expected, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.dist
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_scatter_and_gather_lose_no_row(three: list[dict[Any, Any]], name: str, dim: int) -> None:
    for rank, seen in enumerate(three):
        part, whole, first, second = seen[name, dim]
        shape = [3, 3]
        shape[dim] = size(LAYOUTS[name])
        x, c, d = (values(*shape, seed=seed) for seed in range(3))
        assert torch.equal(part, take(x, dim, LAYOUTS[name][rank]))
        assert torch.equal(whole, x**3)
        torch.testing.assert_close(first, 3 * x**2 * c, rtol=1e-12, atol=0)
        torch.testing.assert_close(second, 6 * x * c * d, rtol=1e-12, atol=0)


@pytest.mark.dist
def test_gather_gives_each_rank_its_own_gradient_once(three: list[dict[Any, Any]]) -> None:
    for rank, seen in enumerate(three):
        part, whole = seen["integers"]
        start, stop = LAYOUTS["uneven"][rank][0]
        assert torch.equal(seen["gather's gradient"], values(5)[start:stop].float())
        assert torch.equal(part, torch.arange(start, stop))
        assert torch.equal(whole, torch.arange(5))


@pytest.mark.dist
def test_only_gathers_communicate(three: list[dict[Any, Any]]) -> None:
    # One forward (gather), one backward (of scatter), one in the backward of that (of scatter).
    assert {seen["issued"] for seen in three} == {3 * 2 * len(LAYOUTS)}
