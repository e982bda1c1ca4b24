"""Unification: dims that are the same get the same axes; what cannot be aligned is barred."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotp.axes import Dim, Shares, balanced, is_mixed, leaves, overlap, ranges
from autotp.sizes import Size
from autotp.unify import AxisTable, Factors

many = settings(max_examples=150, deadline=None, derandomize=True, database=None)
ALIGNED = "its items cannot be aligned with another dim"


def static(*counts: int) -> list[Size]:
    return [(count, ()) for count in counts]


def new(table: AxisTable, *counts: int) -> list[Factors]:
    return [table.new(count) for count in static(*counts)]


def tree(table: AxisTable, *dims: Factors) -> str:
    """The dims as text, by number of axis, free ones alone if barred ones are marked `!`."""
    bars = table.bars()
    names = {axis: f"a{axis}{'!' if axis in bars else ''}" for axis in table.leaves()}
    return ", ".join(str(table.tree(dim, names)) for dim in dims)


def trees(table: AxisTable, dims: Sequence[Factors]) -> list[Dim]:
    return [table.tree(dim, {}) for dim in dims]


def free(table: AxisTable, dims: Sequence[Factors]) -> dict[str, int]:
    """Names and sizes of the unbarred axes of these dims."""
    bars = {f"a{axis}" for axis in table.bars()}
    found = {axis for dim in trees(table, dims) for axis in leaves(dim)}
    return {axis.name: axis.size or 0 for axis in found if axis.name not in bars}


def mask(dims: Sequence[Dim], shares: Shares, rank: int) -> Tensor:
    """Which items of a tensor of these dims a rank holds, in order."""
    result = torch.ones(1, dtype=torch.bool)
    for dim in dims:
        held = torch.zeros(math.prod(_sizes(dim)), dtype=torch.bool)
        for start, stop in ranges(dim, shares, rank):
            held[start:stop] = True
        result = (result[:, None] & held).flatten()
    return result


def _sizes(dim: Dim) -> list[int]:
    whole = ranges(dim, {}, 0)
    return [whole[0][1] if whole else 0]


def units(table: AxisTable, dims: Sequence[Factors]) -> set[frozenset[frozenset[int]]]:
    """Each free axis as a partition of the items: whatever it is called and split into."""
    found = set()
    for name, size in free(table, dims).items():
        shares = {name: tuple(range(size + 1))}
        masks = (mask(trees(table, dims), shares, unit) for unit in range(size))
        found.add(frozenset(frozenset(m.nonzero().flatten().tolist()) for m in masks))
    return found


def assert_same_items(table: AxisTable, one: Sequence[Factors], other: Sequence[Factors]) -> int:
    """A share of a free axis is the same items of both; returns how many axes were looked at."""
    here, there = trees(table, one), trees(table, other)
    seen = 0
    for name, size in free(table, [*one, *other]).items():
        if size < 2:
            continue
        shares = {name: balanced(size, 2)}
        if any(overlap(dim, shares) or is_mixed(dim, shares) for dim in (*here, *there)):
            continue
        if not any(name in [axis.name for axis in leaves(dim)] for dim in here):
            continue
        for rank in range(2):
            assert torch.equal(mask(here, shares, rank), mask(there, shares, rank)), name
        seen += 1
    return seen


# ---- views


@st.composite
def shapes(draw: st.DrawFn, count: int) -> list[list[int]]:
    """Several shapes of equally many items."""
    total = draw(st.sampled_from([1, 4, 6, 12, 24, 30, 36, 60]))
    found = []
    for _ in range(count):
        rest, shape = total, []
        while len(shape) < 3 and rest > 1:
            divisors = [d for d in range(1, rest + 1) if rest % d == 0]
            shape.append(draw(st.sampled_from(divisors)))
            rest //= shape[-1]
        found.append([*shape, rest])
    return found


@given(shapes(5))
@many
def test_views_agree_with_index_arithmetic(views: list[list[int]]) -> None:
    table = AxisTable()
    stages: list[Sequence[Factors]] = [new(table, *views[0])]
    for shape in views[1:]:
        found = table.regroup(stages[-1], static(*shape))
        if found is not None:
            assert [table.size(dim) for dim in found] == static(*shape)
            stages.append(found)
    for stage in stages[1:]:
        assert_same_items(table, stages[0], stage)


@given(shapes(2))
@many
def test_a_view_exists_where_borders_are_multiples_of_each_other(views: list[list[int]]) -> None:
    one, other = views
    table = AxisTable()
    found = table.regroup(new(table, *one), static(*other))
    borders = sorted(
        {*itertools.accumulate(reversed(one), int.__mul__)}
        | {*itertools.accumulate(reversed(other), int.__mul__)}
    )
    aligned = all(b % a == 0 for a, b in itertools.pairwise(borders))
    assert (found is not None) == aligned


@given(shapes(2))
@many
def test_a_view_and_back_changes_nothing(views: list[list[int]]) -> None:
    table = AxisTable()
    before = new(table, *views[0])
    there = table.regroup(before, static(*views[1]))
    assume(there is not None and table.regroup(there, static(*views[0])) is not None)
    assert there is not None
    back = table.regroup(there, static(*views[0]))
    assert back is not None
    assert [table.factors(dim) for dim in back] == [table.factors(dim) for dim in before]


@given(shapes(5), st.permutations(range(4)))
@many
def test_the_order_of_views_does_not_matter(views: list[list[int]], order: list[int]) -> None:
    found = []
    for chosen in (range(4), order):
        table = AxisTable()
        value = new(table, *views[4])
        for i in chosen:
            if table.regroup(value, static(*views[i])) is None:
                for dim in value:
                    table.bar(dim, "mixed")
        found.append(units(table, value))
    assert found[0] == found[1]


# ---- unify


@st.composite
def structures(draw: st.DrawFn, table: AxisTable, size: int, depth: int = 2) -> Factors:
    """A dim of some size: an axis, a product, cut in two, or two laid end to end."""
    kind = draw(st.sampled_from(["axis", "product", "cut", "concat"])) if depth else "axis"
    if kind == "product" and size:
        outer = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        parts = (outer, size // outer)
        return sum((draw(structures(table, n, depth - 1)) for n in parts), ())
    if kind in ("axis", "product") or size < 2:
        return table.new((size, ()))
    mark = draw(st.integers(0, size))
    if kind == "cut":
        made = table.new((size, ()))
        table.cut(made, static(mark, size - mark))
        return made
    return table.concat([draw(structures(table, n, depth - 1)) for n in (mark, size - mark)])


@given(st.data(), st.sampled_from([2, 4, 6, 8, 12]))
@many
def test_dims_that_are_unified_hold_the_same_items(data: st.DataObject, size: int) -> None:
    table = AxisTable()
    dims = [data.draw(structures(table, size)) for _ in range(3)]
    table.unify(dims[0], dims[1])
    table.unify(dims[1], dims[2])
    for one, other in itertools.combinations(dims, 2):
        assert_same_items(table, [one], [other])


@given(st.data(), st.sampled_from([2, 4, 6, 8, 12]))
@many
def test_unify_is_idempotent(data: st.DataObject, size: int) -> None:
    table = AxisTable()
    one, other = (data.draw(structures(table, size)) for _ in range(2))
    table.unify(one, other)
    before = tree(table, one, other)
    table.unify(one, other)
    table.unify(other, one)
    assert tree(table, one, other) == before


@given(shapes(3), st.permutations([(0, 1), (1, 2), (2, 0)]), st.booleans())
@many
def test_the_order_of_equations_does_not_matter(
    views: list[list[int]], order: list[tuple[int, int]], swap: bool
) -> None:
    found = []
    for pairs in ([(0, 1), (1, 2), (2, 0)], order):
        table = AxisTable()
        dims = [sum(new(table, *shape), ()) for shape in views]
        for a, b in pairs:
            table.unify(*((dims[b], dims[a]) if swap else (dims[a], dims[b])))
        assume(not table.bars())
        found.append([units(table, [dim]) for dim in dims])
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] == found[0][2]


def test_a_product_refines_an_axis() -> None:
    table = AxisTable()
    whole, heads, size = new(table, 12, 3, 4)
    table.unify(whole, heads + size)
    assert tree(table, whole) == "a1*a2"


def test_two_products_have_a_common_refinement() -> None:
    table = AxisTable()
    a, b, c, d = new(table, 6, 2, 3, 4)
    table.unify(a + b, c + d)
    assert sorted(table.size([axis])[0] for axis in table.leaves()) == [2, 2, 3]
    assert tree(table, a + b) == tree(table, c + d)
    assert not table.bars()


def test_an_axis_takes_the_parts_of_a_sum() -> None:
    table = AxisTable()
    one, other = new(table, 6, 6)
    parts = table.cut(one, static(2, 4))
    assert parts is not None
    table.unify(other, one)
    assert tree(table, other) == tree(table, one) == "a2 + a3"


def test_sums_that_are_cut_elsewhere_are_cut_at_all_their_borders() -> None:
    table = AxisTable()
    one, other = new(table, 6, 6)
    table.cut(one, static(2, 4))
    table.cut(other, static(4, 2))
    table.unify(one, other)
    dim = table.tree(one, {})
    assert [axis.size for axis in leaves(dim)] == [2, 2, 2]
    assert tree(table, one) == tree(table, other)
    assert not table.bars()


def test_sums_of_products_are_unified_part_by_part() -> None:
    table = AxisTable()
    heads, size, whole = new(table, 3, 2, 12)
    fused = table.concat([heads + size, heads + size])
    table.unify(whole, fused)
    assert tree(table, whole) == "a0*a1 + a0*a1"


def test_a_minor_axis_is_taken_out_of_every_part_of_a_sum() -> None:
    table = AxisTable()
    a, b = new(table, 4, 6)
    pair = table.split_minor(table.concat([a, b]), (2, ()))
    assert pair is not None
    assert [axis.size for axis in leaves(table.tree(pair[0], {}))] == [2, 3]
    assert str(table.tree(a, {})).split("*")[1] == str(table.tree(b, {})).split("*")[1]


# ---- bars


def test_a_bar_holds_for_what_an_axis_is_split_into() -> None:
    table = AxisTable()
    (whole,) = new(table, 12)
    table.bar(whole, "mixed")
    parts = table.regroup([whole], static(3, 4))
    assert parts is not None
    assert tree(table, *parts) == "a1!, a2!"
    table.cut(parts[0], static(1, 2))
    assert "a3!" in tree(table, parts[0])


def test_a_bar_on_a_sum_bars_every_part_and_one_on_a_part_does_not_bar_the_others() -> None:
    table = AxisTable()
    a, b = new(table, 2, 3)
    table.concat([a, b])
    table.bar(a, "mixed")
    assert tree(table, a, b) == "a0!, a1"
    table = AxisTable()
    a, b = new(table, 2, 3)
    table.bar(table.concat([a, b]), "mixed")
    assert tree(table, a, b) == "a0!, a1!"


@pytest.mark.parametrize("barred_first", [True, False])
@pytest.mark.parametrize("swap", [True, False])
def test_a_bar_holds_for_the_axis_that_is_unified_with_it(barred_first: bool, swap: bool) -> None:
    table = AxisTable()
    a, b = new(table, 4, 4)
    if barred_first:
        table.bar(a, "mixed")
    table.unify(*((b, a) if swap else (a, b)))
    if not barred_first:
        table.bar(a, "mixed")
    assert "!" in tree(table, a) and tree(table, a) == tree(table, b)


def test_the_first_reason_is_kept() -> None:
    table = AxisTable(node="first")
    (a,) = new(table, 4)
    table.bar(a, "one")
    table.node = "second"
    table.bar(a, "other")
    (bar,) = table.bars().values()
    assert (bar.reason, bar.node) == ("one", "first")


@pytest.mark.parametrize(
    ("one", "other"), [((4,), (6,)), ((4, 3), (3, 4)), ((2, 5), (5, 3)), ((), (3,)), ((7,), (2, 2))]
)
def test_dims_that_cannot_be_aligned_are_barred(
    one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    table = AxisTable()
    a, b = (sum(new(table, *sizes), ()) for sizes in (one, other))
    table.unify(a, b)
    assert not free(table, [a, b])
    assert {bar.reason for bar in table.bars().values()} == {ALIGNED}


def test_what_is_aligned_at_the_minor_end_stays_free() -> None:
    table = AxisTable()
    major, minor, wide, same = new(table, 4, 3, 6, 3)
    table.unify(major + minor, wide + same)
    assert tree(table, major + minor) == "a0!*a3"
    assert tree(table, wide + same) == "a2!*a3"


def test_dynamic_sums_that_are_cut_elsewhere_are_barred() -> None:
    table = AxisTable()
    s, t = (1, ("s",)), (1, ("t",))
    one, other = table.new((2, ("s",))), table.new((2, ("s",)))
    table.cut(one, [s, s])
    table.cut(other, [t, (1, ("s",))])
    table.unify(one, other)
    assert {bar.reason for bar in table.bars().values()} == {"it is cut at different places"}


def test_dynamic_dims_are_split_by_their_symbols() -> None:
    table = AxisTable()
    rows = table.new((12, ("b",)))
    parts = table.regroup([rows], [(1, ("b",)), (3, ()), (4, ())])
    assert parts is not None
    assert tree(table, rows) == "a1*a3*a4"
    assert table.regroup([table.new((1, ("b",)))], [(2, ()), (1, ("s",))]) is None


@pytest.mark.parametrize("widths", [(2, 3), (5, 2), (1, 6)])
def test_a_cut_through_a_minor_axis_is_refused(widths: tuple[int, ...]) -> None:
    table = AxisTable()
    a, b = new(table, 3, 2)
    assert table.cut(a + b, static(*widths)) is None
    assert table.cut(a + b, static(2, 4)) is not None


def test_a_part_without_items_is_no_part() -> None:
    """A part as wide as the whole, beside an empty one, is the dim itself and not a part of it."""
    table = AxisTable()
    (whole,) = new(table, 6)
    parts = table.cut(whole, static(0, 6, 0))
    assert parts is not None and parts[1] == whole
    assert [table.size(part) for part in parts] == static(0, 6, 0)
    joined = table.concat([parts[0], whole, parts[2]])
    table.unify(joined, whole)
    table.unify(parts[0], parts[2])
    assert tree(table, joined, whole) == "a0, a0"
    assert table.cut(parts[0], static(0, 0)) is not None


def test_a_dim_of_size_one_has_no_axis() -> None:
    table = AxisTable()
    assert new(table, 1) == [()]
    assert tree(table, ()) == "1"
    assert table.regroup(new(table, 1, 6, 1), static(2, 1, 3)) is not None
