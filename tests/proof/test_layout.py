"""Layouts against brute force: a list of who holds each position, reshaped by numpy-like views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotp.proof.layout import Layout, joined, layout_of, regroup

Owners = list[int]  # the rank that holds each position
few = settings(max_examples=150, deadline=None, derandomize=True, database=None)
owners = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def layout(who: Owners, ranks: int = 3) -> Layout:
    """The layout that these owners have."""
    held = tuple(
        tuple((i, i + 1) for i, owner in enumerate(who) if owner == rank) for rank in range(ranks)
    )
    return layout_of(held, len(who))


def owned(made: Layout) -> Owners:
    """The owners that a layout says."""
    found = made.ranges()
    assert found is not None
    who = [-1] * made.size[0]
    for rank, held in enumerate(found):
        for start, stop in held:
            who[start:stop] = [rank] * (stop - start)
    return who


def sized(shape: tuple[int, ...]) -> list[tuple[int, tuple[str, ...]]]:
    return [(size, ()) for size in shape]


@given(owners)
@few
def test_a_layout_says_who_holds_what(who: Owners) -> None:
    assert owned(layout(who)) == who
    assert [layout(who).local(len(who), rank) for rank in range(3)] == [
        who.count(rank) for rank in range(3)
    ]


@given(owners, st.integers(1, 4), st.integers(1, 4))
@few
def test_layouts_are_equal_if_and_only_if_ranks_hold_the_same(
    who: Owners, copies: int, run: int
) -> None:
    repeated = layout(who).repeated((copies, ())).stretched((run, ()))
    assert repeated == layout([owner for owner in who * copies for _ in range(run)])
    other = [*who[:-1], (who[-1] + 1) % 3]  # as long, but the last item is another rank's
    assert layout(other) != layout(who)


@given(owners, owners, st.integers(0, 12), st.integers(0, 12))
@few
def test_cutting_and_joining_are_those_of_lists(
    a: Owners, b: Owners, start: int, stop: int
) -> None:
    both = joined([layout(a), layout(b)])
    assert both == layout(a + b)
    start, stop = sorted((min(start, len(a)), min(stop, len(a))))
    if start < stop:
        assert layout(a).cut(start, stop) == layout(a[start:stop])


def split_dim(who: Tensor) -> tuple[int, Owners] | None:
    """The dim along which alone owners differ."""
    for dim in range(who.dim()):
        line = who.movedim(dim, 0).flatten(1) if who.dim() > 1 else who[:, None]
        if bool((line == line[:, :1]).all()):
            return dim, [int(owner) for owner in line[:, 0]]
    return None


shapes = st.sampled_from([(2, 6, 2), (4, 6), (24,), (2, 3, 4), (2, 2, 6), (12, 2), (3, 8), (1, 24)])


@given(shapes, shapes, st.integers(0, 2), st.lists(st.integers(0, 2), min_size=24, max_size=24))
@few
def test_a_view_moves_a_split_dim_as_it_moves_the_items(
    before: tuple[int, ...], after: tuple[int, ...], dim: int, drawn: Owners
) -> None:
    """Where several dims would do, any of them; where none would, None."""
    dim %= len(before)
    who = drawn[: before[dim]]
    if len(set(who)) < 2:
        return
    shape = [1] * len(before)
    shape[dim] = -1
    items = torch.tensor(who).view(shape).expand(before).reshape(after)
    found = regroup(layout(who), dim, sized(before), sized(after))
    wanted = split_dim(items)
    if found is None:
        assert wanted is None, f"{wanted} is a way"
    else:
        assert wanted is not None and owned(found[1]) == wanted[1] and found[0] == wanted[0]


def test_a_dynamic_dim_in_front_is_carried_along() -> None:
    heads = layout([0, 0, 1, 2])
    batch, seq = (1, ("b",)), (1, ("s",))
    found = regroup(heads, 1, [batch, (4, ()), seq], [(4, ("b",)), seq])
    assert found == (0, heads.repeated(batch))
    assert regroup(found[1], 0, [(4, ("b",)), seq], [batch, (4, ()), seq]) == (1, heads)
    assert regroup(heads, 1, [batch, (4, ()), seq], [batch, (2, ()), (2, ()), seq]) is None


@pytest.mark.parametrize(
    ("held", "size", "why"),
    [
        ((((0, 2),), ((3, 4),)), 4, "position 2 is held by no rank"),
        ((((0, 2),), ((1, 4),)), 4, "position 1 is held by two ranks"),
        ((((0, 2),), ((2, 3),)), 4, "ranks hold 3 positions of 4"),
        ((((2, 4), (0, 2)), ()), 4, "do not ascend"),
    ],
)
def test_what_is_not_a_partition_is_no_layout(held: Any, size: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        layout_of(held, size)
