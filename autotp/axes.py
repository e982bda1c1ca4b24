"""Named axes: what every dim of every tensor is made of, and which part of it a rank holds.

A dim is a tree over named axes: an `Axis`, a `Product` of dims (major to minor: what a view splits
and joins) or a `Sum` of dims (what `split` and `cat` cut and join). The output dim of GPT-2's fused
query, key and value projection reads `heads0*dim0 + heads0*dim0 + heads0*dim1`.

Sharding is a choice of axes and of their `Bounds`: rank r holds the units bounds[r] to bounds[r +
1]. Everything else is read off the tree: a dim's local size, and the `ranges` of positions of the
full dim that the rank's local dim holds, in order. Ranges are invertible, so loading, saving,
gathering and comparing gradients all use them (uneven shares and fused layouts are not special).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Axis:
    """One logical axis. `size` counts its units; None for a dynamic one (batch, sequence)."""

    name: str
    size: int | None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Product:
    """Dims nested in each other, major to minor."""

    parts: tuple[Dim, ...]

    def __str__(self) -> str:
        return "*".join(f"({p})" if isinstance(p, Sum) else str(p) for p in self.parts) or "1"


@dataclass(frozen=True)
class Sum:
    """Dims laid end to end."""

    parts: tuple[Dim, ...]

    def __str__(self) -> str:
        return " + ".join(str(p) for p in self.parts)


Dim: TypeAlias = Axis | Product | Sum
Bounds: TypeAlias = tuple[int, ...]
Shares: TypeAlias = Mapping[str, Bounds]
Ranges: TypeAlias = tuple[tuple[int, int], ...]


def balanced(units: int, ranks: int) -> Bounds:
    """Bounds of `units` over `ranks`: every rank gets units // ranks, the first ones one more."""
    share, more = divmod(units, ranks)
    return tuple(rank * share + min(rank, more) for rank in range(ranks + 1))


def slice_edges(size: Any, ranks: int) -> tuple[Any, ...]:
    """Bounds of a dim of any length, also a symbolic one, over `ranks`: runs as equal as can be."""
    return tuple(size * rank // ranks for rank in range(ranks + 1))


def size(dim: Dim) -> int | None:
    """How many positions the dim has; None where a dynamic axis is in it."""
    match dim:
        case Axis():
            return dim.size
        case Product(parts):
            sizes = [size(part) for part in parts]
            return None if None in sizes else prod(s for s in sizes if s is not None)
        case Sum(parts):
            sizes = [size(part) for part in parts]
            return None if None in sizes else sum(s for s in sizes if s is not None)


def leaves(dim: Dim) -> Iterator[Axis]:
    """Every axis in the dim, in order, repeated where it occurs again."""
    match dim:
        case Axis():
            yield dim
        case Product(parts) | Sum(parts):
            for part in parts:
                yield from leaves(part)


def is_sharded(dim: Dim, shares: Shares) -> bool:
    """Whether any chosen axis is in the dim."""
    if isinstance(dim, Axis):
        return dim.name in shares
    return any(is_sharded(part, shares) for part in dim.parts)


def is_mixed(dim: Dim, shares: Shares) -> bool:
    """Whether the dim lays sharded parts beside whole ones; no placement describes such a
    tensor."""
    match dim:
        case Axis():
            return False
        case Product(parts):
            return any(is_mixed(part, shares) for part in parts)
        case Sum(parts):
            flags = {is_sharded(part, shares) for part in parts if size(part) != 0}
            return len(flags) > 1 or any(is_mixed(part, shares) for part in parts)


def overlap(dim: Dim, shares: Shares) -> bool:
    """Whether one position of the dim would be split by two chosen axes (or one axis twice)."""
    return _depth(dim, shares) > 1


def _depth(dim: Dim, shares: Shares) -> int:
    match dim:
        case Axis():
            return int(dim.name in shares)
        case Product(parts):
            return sum(_depth(part, shares) for part in parts)
        case Sum(parts):
            return max((_depth(part, shares) for part in parts), default=0)


def local(dim: Dim, shares: Shares, rank: int) -> Dim:
    """The rank's own tree: the same, with each chosen axis at its local size."""
    match dim:
        case Axis(name, _) if name in shares:
            return Axis(name, shares[name][rank + 1] - shares[name][rank])
        case Axis():
            return dim
        case Product(parts):
            return Product(tuple(local(part, shares, rank) for part in parts))
        case Sum(parts):
            return Sum(tuple(local(part, shares, rank) for part in parts))


def local_size(dim: Dim, shares: Shares, rank: int) -> int | None:
    """How many positions of the dim the rank holds; None where a dynamic axis is in it."""
    return size(local(dim, shares, rank))


def ratio(dim: Dim, shares: Shares, rank: int) -> tuple[int, int] | None:
    """(local, full) of the static factors of a dim with a dynamic one: its local size is
    `size * local // full`. None where a dynamic axis lies inside a sharded sum."""
    full = here = 1
    for part in dim.parts if isinstance(dim, Product) else (dim,):
        whole, mine = size(part), local_size(part, shares, rank)
        if whole is None or mine is None:
            if is_sharded(part, shares):
                return None
            continue
        full, here = full * whole, here * mine
    return here, full


def ranges(dim: Dim, shares: Shares, rank: int) -> Ranges:
    """Which positions of the full dim the rank holds: (start, stop) pairs, ascending, merged."""
    return _merged(_ranges(dim, shares, rank))


def _ranges(dim: Dim, shares: Shares, rank: int) -> list[tuple[int, int]]:
    if not is_sharded(dim, shares):
        whole = size(dim)
        assert whole is not None, f"a dynamic dim has no static ranges: {dim}"
        return [(0, whole)]
    match dim:
        case Axis(name, _):
            return [(shares[name][rank], shares[name][rank + 1])]
        case Sum(parts):
            found, offset = [], 0
            for part in parts:
                found += [(a + offset, b + offset) for a, b in _ranges(part, shares, rank)]
                offset += size(part) or 0
            return found
        case Product(parts):
            major, rest = parts[0], Product(parts[1:])
            if not rest.parts:
                return _ranges(major, shares, rank)
            width, inner = size(rest), _ranges(rest, shares, rank)
            assert width is not None
            outer = _ranges(major, shares, rank)
            if inner == [(0, width)]:
                return [(a * width, b * width) for a, b in outer]
            units = [unit for a, b in outer for unit in range(a, b)]
            return [(unit * width + a, unit * width + b) for unit in units for a, b in inner]


def _merged(pieces: Sequence[tuple[int, int]]) -> Ranges:
    result: list[tuple[int, int]] = []
    for start, stop in pieces:
        if start == stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def substitute(dim: Dim, names: Mapping[str, str]) -> Dim:
    """The same tree with axes renamed."""
    match dim:
        case Axis():
            return Axis(names.get(dim.name, dim.name), dim.size)
        case Product(parts):
            return Product(tuple(substitute(part, names) for part in parts))
        case Sum(parts):
            return Sum(tuple(substitute(part, names) for part in parts))


def to_json(dim: Dim) -> Any:
    """Plain lists and strings."""
    match dim:
        case Axis():
            return [dim.name, dim.size]
        case Product(parts):
            return {"product": [to_json(part) for part in parts]}
        case Sum(parts):
            return {"sum": [to_json(part) for part in parts]}


def from_json(data: Any) -> Dim:
    """The inverse of `to_json`."""
    match data:
        case [str(name), int() | None as count]:
            return Axis(name, count)
        case {"product": list(parts)}:
            return Product(tuple(from_json(part) for part in parts))
        case {"sum": list(parts)}:
            return Sum(tuple(from_json(part) for part in parts))
    raise ValueError(f"not a dim: {data!r}")
