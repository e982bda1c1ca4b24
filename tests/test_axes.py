"""Dims as trees: which positions a rank holds, and what can be read off them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.axes import (
    Axis,
    Bounds,
    Dim,
    Product,
    Shares,
    Sum,
    balanced,
    from_json,
    is_mixed,
    is_sharded,
    leaves,
    local,
    local_size,
    overlap,
    ranges,
    ratio,
    size,
    substitute,
    to_json,
)
from autotp.runtime.weights import shard, unshard

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
A, B, C, D = Axis("a", 5), Axis("b", 2), Axis("c", 3), Axis("d", None)


@st.composite
def dims(draw: st.DrawFn, chosen: bool = True, depth: int = 2) -> Dim:
    """A tree in which the axis `a`, of 4 units, splits each position at most once and every part of
    each sum (or, if not `chosen`, does not occur)."""
    kind = draw(st.sampled_from(["product", "sum", "axis"] if depth else ["axis"]))
    if kind == "axis":
        return (
            Axis("a", 4) if chosen else Axis(f"w{draw(st.integers(1, 3))}", draw(st.integers(1, 3)))
        )
    count = draw(st.integers(1, 3))
    if kind == "sum":
        return Sum(tuple(draw(dims(chosen, depth - 1)) for _ in range(count)))
    at = draw(st.integers(0, count - 1)) if chosen else count
    return Product(tuple(draw(dims(i == at, depth - 1)) for i in range(count)))


small = dims().filter(lambda dim: (size(dim) or 0) <= 400)
cuts = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(lambda c: (0, *sorted(c), 4))


def held(dim: Dim, shares: Shares, rank: int) -> list[int]:
    return [i for start, stop in ranges(dim, shares, rank) for i in range(start, stop)]


def coordinates(dim: Dim, position: int) -> int:
    """The unit of axis `a` that a position of a dim belongs to, by division."""
    match dim:
        case Axis():
            return position
        case Sum(parts):
            for part in parts:
                width = size(part) or 0
                if position < width:
                    return coordinates(part, position)
                position -= width
        case Product(parts):
            for i, part in enumerate(parts):
                after = math.prod(size(p) or 0 for p in parts[i + 1 :])
                if any(axis.name == "a" for axis in leaves(part)):
                    return coordinates(part, position // after % (size(part) or 1))
    raise AssertionError(dim)


@given(small, cuts)
@quick
def test_ranks_hold_the_positions_of_their_units(dim: Dim, bounds: Bounds) -> None:
    shares = {"a": bounds}
    for rank in range(len(bounds) - 1):
        wanted = range(bounds[rank], bounds[rank + 1])
        positions = [i for i in range(size(dim) or 0) if coordinates(dim, i) in wanted]
        assert held(dim, shares, rank) == positions


@given(small, cuts)
@quick
def test_every_position_is_held_by_one_rank(dim: Dim, bounds: Bounds) -> None:
    every = [i for rank in range(len(bounds) - 1) for i in held(dim, {"a": bounds}, rank)]
    assert sorted(every) == list(range(size(dim) or 0))


@given(small, cuts)
@quick
def test_the_local_size_is_the_length_of_the_ranges(dim: Dim, bounds: Bounds) -> None:
    for rank in range(len(bounds) - 1):
        found = ranges(dim, {"a": bounds}, rank)
        assert local_size(dim, {"a": bounds}, rank) == sum(b - a for a, b in found)
        assert size(local(dim, {"a": bounds}, rank)) == local_size(dim, {"a": bounds}, rank)


@given(small, cuts)
@quick
def test_ranges_ascend_and_never_touch(dim: Dim, bounds: Bounds) -> None:
    for rank in range(len(bounds) - 1):
        ends = [end for pair in ranges(dim, {"a": bounds}, rank) for end in pair]
        assert ends == sorted(set(ends))


@given(dims(False), cuts)
@quick
def test_a_dim_without_the_axis_is_held_whole(dim: Dim, bounds: Bounds) -> None:
    assert ranges(dim, {"a": bounds}, 0) == ((0, size(dim)),)
    assert not is_sharded(dim, {"a": bounds})


@given(small, small.filter(lambda d: (size(d) or 0) < 60), dims(False), cuts, st.booleans())
@quick
def test_unshard_is_the_inverse_of_shard(
    one: Dim, other: Dim, whole: Dim, bounds: Bounds, second: bool
) -> None:
    tree = (whole, one) if second else (one, whole)
    shape = [size(dim) or 0 for dim in tree]
    value = torch.arange(math.prod(shape)).reshape(shape)
    places = [[ranges(dim, {"a": bounds}, rank) for dim in tree] for rank in range(len(bounds) - 1)]
    parts = [shard(value, place) for place in places]
    for rank, part in enumerate(parts):
        assert list(part.shape) == [local_size(dim, {"a": bounds}, rank) for dim in tree]
        assert part.untyped_storage().nbytes() == part.numel() * part.itemsize
    assert torch.equal(unshard(parts, places), value)


@given(st.integers(0, 60), st.integers(1, 9))
@quick
def test_balanced_shares_differ_by_one_at_most_and_do_not_grow(units: int, ranks: int) -> None:
    bounds = balanced(units, ranks)
    widths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert (bounds[0], bounds[-1], len(widths)) == (0, units, ranks)
    assert widths == sorted(widths, reverse=True)
    assert max(widths) - min(widths) <= 1


@given(st.one_of(dims(), dims(False)))
@quick
def test_json_round_trips(dim: Dim) -> None:
    assert from_json(json.loads(json.dumps(to_json(dim)))) == dim


@pytest.mark.parametrize("data", [None, "a", ["a"], {"product": "a"}, {"other": []}, ["a", "5"]])
def test_what_is_no_dim_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="not a dim"):
        from_json(data)


def test_a_dynamic_axis_round_trips_and_has_no_size() -> None:
    dim = Product((D, A))
    assert from_json(to_json(dim)) == dim
    assert size(dim) is None and local_size(dim, {"a": (0, 3, 5)}, 0) is None


def test_the_ratio_of_a_dynamic_dim_is_local_over_whole() -> None:
    assert ratio(Product((D, A, B)), {"a": (0, 3, 5)}, 0) == (6, 10)
    assert ratio(Product((D, B)), {"a": (0, 3, 5)}, 0) == (2, 2)
    assert ratio(Product((Sum((D, B)), A)), {"a": (0, 3, 5)}, 1) == (2, 5)
    assert ratio(Sum((Product((D, A)), A)), {"a": (0, 3, 5)}, 1) is None


def test_dims_print_as_sums_of_products() -> None:
    assert str(Sum((Product((A, B)), Product((A, C))))) == "a*b + a*c"
    assert str(Product((A, Sum((B, C))))) == "a*(b + c)"
    assert str(Product(())) == "1"


@pytest.mark.parametrize(
    ("dim", "mixed"),
    [
        (A, False),
        (B, False),
        (Sum((A, A)), False),
        (Sum((A, B)), True),  # a part that is whole beside one that is split
        (Sum((A, Axis("none", 0))), False),  # a part without items
        (Sum((B, C)), False),
        (Product((B, Sum((A, A)))), False),
        (Product((B, Sum((A, Product(()))))), True),
        (Sum((Product((A, B)), Product((C, A)))), False),
        (Sum((Product((A, B)), Sum((A, B)))), True),
    ],
)
def test_a_dim_is_mixed_if_some_parts_of_a_sum_are_whole(dim: Dim, mixed: bool) -> None:
    assert is_mixed(dim, {"a": (0, 3, 5)}) == mixed


@pytest.mark.parametrize(
    ("dim", "shares", "twice"),
    [
        (Product((A, B)), {"a": ()}, False),
        (Product((A, B)), {"a": (), "b": ()}, True),
        (Product((A, A)), {"a": ()}, True),
        (Sum((A, B)), {"a": (), "b": ()}, False),
        (Sum((Product((A, B)), C)), {"a": (), "b": ()}, True),
        (Product((Sum((A, B)), C)), {"a": (), "c": ()}, True),
    ],
)
def test_axes_overlap_where_they_split_one_position(dim: Dim, shares: Shares, twice: bool) -> None:
    assert overlap(dim, shares) == twice


def test_substitute_renames_every_leaf() -> None:
    dim = Sum((Product((A, B)), A))
    assert str(substitute(dim, {"a": "heads"})) == "heads*b + heads"
    assert substitute(dim, {}) == dim


def test_two_axes_that_split_one_dim_cross() -> None:
    """Not chosen together by a plan, but their ranges are still right."""
    shares = {"a": (0, 3, 5), "b": (0, 1, 2)}
    assert held(Product((A, B)), shares, 0) == [0, 2, 4]
    assert held(Product((A, B)), shares, 1) == [7, 9]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fused_weight_takes_a_piece_of_each_part(rank: int) -> None:
    fused = Sum((Product((A, B)), Product((A, B)), Product((A, C))))
    expected = [((0, 6), (10, 16), (20, 29)), ((6, 10), (16, 20), (29, 35))]
    assert ranges(fused, {"a": (0, 3, 5)}, rank) == expected[rank]
    inner = Product((A, Sum((B, B, C))))
    assert ranges(inner, {"a": (0, 3, 5)}, rank) == [((0, 21),), ((21, 35),)][rank]
