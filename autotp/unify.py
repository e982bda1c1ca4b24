"""Unification of dims: the table in which inference finds out which dims are the same.

While the graph is walked a dim is a tuple of axis numbers, major to minor (the empty tuple is a dim
of size 1). An axis is a leaf, or bound to a product of axes (a view split it), or to a sum of dims
(a
`split` or `cat` cut it). Unifying two dims refines both until their axes agree. Where they cannot
agree, all their axes are barred with the reason: unknown means replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from autotp import sizes
from autotp.axes import Axis, Dim, Product, Sum
from autotp.sizes import ONE, Size

Factors: TypeAlias = tuple[int, ...]
EMPTY: Size = (0, ())


@dataclass(frozen=True)
class Bar:
    """Why an axis may not be sharded: the reason and the node that gave it."""

    reason: str
    node: str


@dataclass
class AxisTable:
    """All axes of one program, by number."""

    node: str = ""  # the node that inference is at: bars carry its name
    _parent: list[int] = field(default_factory=list)
    _size: list[Size] = field(default_factory=list)
    _product: dict[int, Factors] = field(default_factory=dict)
    _sum: dict[int, tuple[Factors, ...]] = field(default_factory=dict)
    _bar: dict[int, Bar] = field(default_factory=dict)

    # ---- axes

    def new(self, size: Size) -> Factors:
        """A dim of a fresh axis; of none where the size is 1."""
        if size == ONE:
            return ()
        self._parent.append(len(self._parent))
        self._size.append(size)
        return (len(self._parent) - 1,)

    def find(self, axis: int) -> int:
        """The representative of the axes unified with this one."""
        while self._parent[axis] != axis:
            self._parent[axis] = self._parent[self._parent[axis]]
            axis = self._parent[axis]
        return axis

    def factors(self, dim: Iterable[int]) -> Factors:
        """The dim's representatives with products written out: leaves and sums only."""
        found: list[int] = []
        for axis in dim:
            root = self.find(axis)
            if root in self._product:
                found += self.factors(self._product[root])
            else:
                found.append(root)
        return tuple(found)

    def parts(self, axis: int) -> tuple[Factors, ...]:
        """The parts of a sum, with sums nested in it laid flat."""
        found: list[Factors] = []
        for part in self._sum[self.find(axis)]:
            inner = self.factors(part)
            if len(inner) == 1 and inner[0] in self._sum:
                found += self.parts(inner[0])
            else:
                found.append(inner)
        return tuple(found)

    def size(self, dim: Iterable[int]) -> Size:
        """The size of a dim."""
        total = ONE
        for axis in dim:
            total = sizes.multiply(total, self._size[axis])
        return total

    def bar(self, dim: Iterable[int], reason: str) -> None:
        """Forbid sharding every axis of the dim; the first reason is kept."""
        for axis in dim:
            self._bar.setdefault(self.find(axis), Bar(reason, self.node))

    # ---- unification

    def unify(self, one: Factors, other: Factors) -> None:
        """Make two dims the same, refining both; bar what cannot be aligned."""
        a, b = list(self.factors(one)), list(self.factors(other))
        while a and b:
            x, y = a.pop(), b.pop()
            if x == y or self._size[x] == self._size[y] == EMPTY:
                continue
            if self._size[x] == self._size[y]:
                self._join(x, y)
            elif inner := self._split(x, self._size[y]):
                a += self.factors(inner)
                b.append(y)
            elif inner := self._split(y, self._size[x]):
                b += self.factors(inner)
                a.append(x)
            else:
                a.append(x)
                b.append(y)
                break
        if a or b:
            self.bar((*a, *b), "its items cannot be aligned with another dim")

    def _join(self, x: int, y: int) -> None:
        if x in self._sum and y in self._sum:
            cuts = self._common_cuts(x, y)
            ours = cuts and self.cut((x,), cuts)
            theirs = cuts and self.cut((y,), cuts)
            if not ours or not theirs:
                self.bar((x, y), "it is cut at different places")
                return
            for mine, its in zip(ours, theirs, strict=True):
                self.unify(mine, its)
            x, y = self.find(x), self.find(y)
            if x in self._product or y in self._product or x == y:
                return  # refined on the way; the parts are unified already
        if x in self._sum:
            x, y = y, x
        self._parent[x] = y
        if x in self._bar:
            self._bar.setdefault(y, self._bar.pop(x))
        self._sum.pop(x, None)

    def _common_cuts(self, x: int, y: int) -> list[Size] | None:
        """Part sizes of the common refinement of two sums; None for unlike dynamic ones."""
        mine = [self.size(part) for part in self.parts(x)]
        its = [self.size(part) for part in self.parts(y)]
        if mine == its:
            return mine
        if any(symbols for _, symbols in (*mine, *its)):
            return None
        ends = {0}
        for widths in (mine, its):
            total = 0
            for width, _ in widths:
                total += width
                ends.add(total)
        marks = sorted(ends)
        return [(b - a, ()) for a, b in zip(marks, marks[1:], strict=False)]

    # ---- refinement

    def _split(self, axis: int, minor: Size) -> Factors | None:
        """Refine an axis to (outer, inner) with inner of the given size; None if impossible."""
        outer_size = sizes.divide(self._size[axis], minor)
        if outer_size is None or minor == ONE or outer_size == ONE:
            return None
        if axis not in self._sum:
            self._product[axis] = self.new(outer_size) + self.new(minor)
            return self._product[axis]
        outers, inner = [], None
        for part in self.parts(axis):
            pair = self.split_minor(part, minor)
            if pair is None:
                return None
            outers.append(pair[0])
            if inner is not None:
                self.unify(inner, pair[1])
            inner = pair[1]
        assert inner is not None
        outer = self.new(outer_size)
        self._sum[outer[0]] = tuple(outers)
        axis = self.find(axis)
        self._sum.pop(axis, None)
        self._product[axis] = outer + self.factors(inner)
        return self._product[axis]

    def split_minor(self, dim: Factors, minor: Size) -> tuple[Factors, Factors] | None:
        """A dim as (outer, inner) with inner of the given size; None if impossible."""
        rest, wanted = list(self.factors(dim)), minor
        inner: list[int] = []
        while wanted != ONE:
            if not rest:
                return None
            axis = rest.pop()
            left = sizes.divide(wanted, self._size[axis])
            if left is not None:
                inner.insert(0, axis)
                wanted = left
                continue
            pair = self._split(axis, wanted)
            if pair is None:
                return None
            rest += self.factors(pair)
        return tuple(rest), tuple(inner)

    def cut(self, dim: Factors, widths: Sequence[Size]) -> list[Factors] | None:
        """A dim cut into consecutive parts of these sizes; None if it cannot be expressed."""
        if len(widths) < 2:
            return [dim][: len(widths)]
        if EMPTY in widths:  # a part without items is no part: the rest may be the whole dim
            kept = self.cut(dim, [width for width in widths if width != EMPTY])
            if kept is None:
                return None
            others = iter(kept)
            return [self.new(EMPTY) if w == EMPTY else next(others) for w in widths]
        all_factors = self.factors(dim)
        if not all_factors:
            return None
        major, rest = all_factors[0], all_factors[1:]
        if rest:
            units = [sizes.divide(width, self.size(rest)) for width in widths]
            if None in units:
                return None
            heads = self.cut((major,), [unit for unit in units if unit is not None])
            return heads and [head + rest for head in heads]
        if major not in self._sum:
            made = [self.new(width) for width in widths]
            self._sum[major] = tuple(made)
            return made
        return self._cut_sum(major, widths)

    def _cut_sum(self, axis: int, widths: Sequence[Size]) -> list[Factors] | None:
        """Distribute the parts of a sum over the wanted widths, cutting parts where needed."""
        if any(symbols for _, symbols in widths):
            parts = list(self.parts(axis))
            same = [self.size(part) for part in parts] == list(widths)
            return parts if same else None
        queue, result = list(self.parts(axis)), []
        for width, _ in widths:
            pieces: list[Factors] = []
            missing = width
            while missing > 0:
                if not queue:
                    return None
                part = queue.pop(0)
                count, symbols = self.size(part)
                if symbols:
                    return None
                if count > missing:
                    two = self.cut(part, [(missing, ()), (count - missing, ())])
                    if two is None:
                        return None
                    part, count = two[0], missing
                    queue.insert(0, two[1])
                pieces.append(part)
                missing -= count
            result.append(self.concat(pieces))
        return result

    def concat(self, dims: Sequence[Factors], size: Size | None = None) -> Factors:
        """The dim of several laid end to end (`cat`); `size` is given where it is dynamic."""
        dims = [dim for dim in dims if self.size(dim) != EMPTY] or dims[:1]
        if len(dims) == 1:
            return dims[0]
        made = self.new(size or (sum(self.size(dim)[0] for dim in dims), ()))
        if made:
            self._sum[made[0]] = tuple(dims)
        return made

    def regroup(self, dims: Sequence[Factors], shape: Sequence[Size]) -> list[Factors] | None:
        """What `view` does: the same items in another shape; None if axes cannot be aligned."""
        queue = [axis for dim in dims for axis in self.factors(dim)]
        result = []
        for wanted in shape:
            taken: list[int] = []
            while wanted != ONE:
                if not queue:
                    return None
                axis = queue.pop(0)
                left = sizes.divide(wanted, self._size[axis])
                if left is not None:
                    taken.append(axis)
                    wanted = left
                    continue
                minor = sizes.divide(self._size[axis], wanted)
                pair = self._split(axis, minor) if minor else None
                if pair is None:
                    return None
                queue = [*self.factors(pair), *queue]
            result.append(tuple(taken))
        return None if queue else result

    # ---- results

    def leaves(self) -> list[int]:
        """Every leaf axis, in the order in which they were made."""
        return [
            axis
            for axis in range(len(self._parent))
            if self._parent[axis] == axis and axis not in self._product and axis not in self._sum
        ]

    def bars(self) -> dict[int, Bar]:
        """Bars of leaf axes; a bar on a product or sum holds for all that it is made of."""
        found: dict[int, Bar] = {}
        for axis, bar in self._bar.items():
            self._push(self.find(axis), bar, found)
        return found

    def _push(self, axis: int, bar: Bar, found: dict[int, Bar]) -> None:
        if axis in self._product or axis in self._sum:
            inner = self._sum[axis] if axis in self._sum else (self._product[axis],)
            for part in inner:
                for child in part:
                    self._push(self.find(child), bar, found)
        else:
            found.setdefault(axis, bar)

    def tree(self, dim: Factors, names: dict[int, str]) -> Dim:
        """The immutable tree of a dim, with leaf axes named."""
        parts: list[Dim] = []
        for axis in self.factors(dim):
            if axis in self._sum:
                inner = tuple(self.tree(part, names) for part in self.parts(axis))
                parts.append(Sum(inner))
            else:
                count, symbols = self._size[axis]
                parts.append(Axis(names.get(axis, f"a{axis}"), None if symbols else count))
        return parts[0] if len(parts) == 1 else Product(tuple(parts))
