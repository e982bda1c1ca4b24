"""Layout: which positions of a split dim each rank holds, in a form in which equal means equal.

A dim of `before * units * after` items is nested in this order. Of every run of `units` a rank
holds the same ranges, and of each unit all `after` items. The form is canonical: `units` is as
small as can be, so two layouts are equal exactly if every rank holds the same positions, and a
view may cut a dim inside `before` or `after` but never inside `units`. Axes' names and trees play
no part.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from autotp import sizes
from autotp.axes import Ranges, slice_edges
from autotp.sizes import ONE, Size


@dataclass(frozen=True)
class Layout:
    """One split dim. `held[rank]` are ranges of units; `before` and `after` may be dynamic."""

    before: Size
    units: int
    held: tuple[Ranges, ...]
    after: Size

    def __str__(self) -> str:
        ranks = " | ".join(",".join(f"{a}:{b}" for a, b in held) or "-" for held in self.held)
        around = [sizes.text(size) for size in (self.before, self.after)]
        return f"{around[0]} x [{ranks}] x {around[1]}"

    @property
    def size(self) -> Size:
        """How many items the whole dim has."""
        return sizes.multiply(sizes.multiply(self.before, (self.units, ())), self.after)

    def local(self, whole: int, rank: int) -> int:
        """How many of `whole` items the rank holds."""
        return whole * sum(stop - start for start, stop in self.held[rank]) // self.units

    def repeated(self, copies: Size) -> Layout | None:
        """The dim laid end to end several times; None if no layout says so."""
        return _around(self, sizes.multiply(copies, self.before), self.after)

    def stretched(self, copies: Size) -> Layout | None:
        """Each item becomes a run of copies; None if no layout says so."""
        return _around(self, self.before, sizes.multiply(self.after, copies))

    def thinned(self, step: int) -> Layout | None:
        """One item of every `step`; None if units would be cut."""
        after = sizes.divide(self.after, (step, ()))
        return None if after is None else replace(self, after=after)

    def ranges(self) -> tuple[Ranges, ...] | None:
        """The positions of the whole dim that each rank holds; None for a dynamic dim."""
        if self.before[1] or self.after[1]:
            return None
        starts = range(0, self.before[0] * self.units, self.units)
        return tuple(
            merged(
                [
                    ((i + a) * self.after[0], (i + b) * self.after[0])
                    for i in starts
                    for a, b in held
                ]
            )
            for held in self.held
        )

    def cut(self, start: int, stop: int) -> Layout | None:
        """The dim of the items from `start` to `stop` alone; None for a dynamic dim."""
        found = self.ranges()
        if found is None:
            return None
        return layout_of(tuple(window(held, start, stop) for held in found), stop - start)


class Slices(Layout):
    """A dim of any length in runs as equal as can be (`autotp.axes.slice_edges`): one
    unit, of which nothing is cut or copied."""

    def __str__(self) -> str:
        return f"{sizes.text(self.after)} in {len(self.held)} slices"

    def local(self, whole: int, rank: int) -> int:
        """How many of `whole` items the rank holds."""
        start, stop = slice_edges(whole, len(self.held))[rank : rank + 2]
        return int(stop - start)

    def repeated(self, copies: Size) -> None:
        """None: the parts would not be runs."""

    def stretched(self, copies: Size) -> None:
        """None: the parts would not be as equal as can be."""

    def thinned(self, step: int) -> None:
        """None: the parts would not be as equal as can be."""

    def ranges(self) -> None:
        """None: the dim may have any length."""


def slices_of(size: Size, ranks: int) -> Slices:
    """A dim of `size` items in slices."""
    return Slices(ONE, 1, ((),) * ranks, size)


@functools.lru_cache(maxsize=4096)
def layout_of(held: tuple[Ranges, ...], size: int) -> Layout:
    """The layout of a dim from the ranges that each rank holds.

    Raises ValueError unless they hold every position exactly once, each rank's in ascending order.
    """
    _check_partition(held, size)
    held = tuple(merged(ranges) for ranges in held)
    after = gcd(size, *(edge for ranges in held for piece in ranges for edge in piece)) or 1
    held = tuple(tuple((a // after, b // after) for a, b in ranges) for ranges in held)
    units = size // after
    for copies in range(max(len(ranges) for ranges in held), 1, -1):
        if units % copies:
            continue
        width = units // copies
        first = tuple(window(ranges, 0, width) for ranges in held)
        if all(
            tuple(window(ranges, i * width, (i + 1) * width) for ranges in held) == first
            for i in range(1, copies)
        ):
            return Layout((copies, ()), width, first, (after, ()))
    return Layout(ONE, units, held, (after, ()))


def _check_partition(held: tuple[Ranges, ...], size: int) -> None:
    for rank, ranges in enumerate(held):
        if any(b > c for (_, b), (c, _) in zip(ranges, ranges[1:], strict=False)):
            raise ValueError(f"rank {rank} holds {ranges}, which do not ascend")
    end = 0
    for start, stop in sorted(piece for ranges in held for piece in ranges if piece[0] != piece[1]):
        if start != end or stop < start:
            by = "no rank" if start > end else "two ranks"
            raise ValueError(f"position {min(start, end)} is held by {by}")
        end = stop
    if end != size:
        raise ValueError(f"ranks hold {end} positions of {size}")


def joined(parts: Sequence[Layout]) -> Layout | None:
    """The layout of dims laid end to end; None for dynamic ones."""
    ranks: list[list[tuple[int, int]]] = [[] for _ in parts[0].held]
    offset = 0
    for part in parts:
        found = part.ranges()
        if found is None:
            return None
        for mine, held in zip(ranks, found, strict=True):
            mine += [(a + offset, b + offset) for a, b in held]
        offset += part.size[0]
    return layout_of(tuple(merged(mine) for mine in ranks), offset)


def regroup(
    layout: Layout, dim: int, before: Sequence[Size], after: Sequence[Size]
) -> tuple[int, Layout] | None:
    """Where a split dim is after a view from one whole shape to another; None if it cuts units."""
    first, last = sizes.common_ends(before, after)
    if dim < first:
        return dim, layout
    if dim >= len(before) - last:
        return dim + len(after) - len(before), layout
    if layout.units == 1:
        return None  # one rank holds all: any dim could be the one of which others hold nothing
    left = sizes.multiply(_product(before[:dim]), layout.before)
    right = sizes.multiply(layout.after, _product(before[dim + 1 :]))
    for at, wanted in enumerate(after):
        outer = sizes.divide(left, _product(after[:at]))
        inner = sizes.divide(right, _product(after[at + 1 :]))
        if outer is not None and inner is not None:
            made = replace(layout, before=outer, after=inner)
            if made.size == wanted:
                return at, made
    return None


def _around(layout: Layout, before: Size, after: Size) -> Layout:
    """The same units; a single one, of which one rank holds all, has nothing before it."""
    if layout.units == 1:
        before, after = ONE, sizes.multiply(before, after)
    return replace(layout, before=before, after=after)


def window(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The part of ranges between two positions, counted from the first."""
    pieces = [(max(a, start) - start, min(b, stop) - start) for a, b in ranges]
    return merged([(a, b) for a, b in pieces if a < b])


def merged(pieces: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges with neighbours joined and empty ones left out."""
    result: list[tuple[int, int]] = []
    for start, stop in pieces:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        elif start != stop:
            result.append((start, stop))
    return tuple(result)


def _product(shape: Sequence[Size]) -> Size:
    total = ONE
    for size in shape:
        total = sizes.multiply(total, size)
    return total
