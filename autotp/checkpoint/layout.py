"""Which boxes of a whole tensor a rank's part consists of.

A part is described by ranges of each dim (see axes.py). A file holds whole tensors, so that it can
be read by any number of ranks: a part is read and written as boxes, one for each combination of
ranges. A fused query, key and value matrix has three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from autotp.axes import Ranges


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor, and where the rank's part holds it."""

    start: tuple[int, ...]  # in the whole tensor
    at: tuple[int, ...]  # in the part
    sizes: tuple[int, ...]

    @property
    def whole(self) -> tuple[slice, ...]:
        """Indexes of the whole tensor."""
        return _slices(self.start, self.sizes)

    @property
    def part(self) -> tuple[slice, ...]:
        """Indexes of the part."""
        return _slices(self.at, self.sizes)


def boxes(ranges: Sequence[Ranges]) -> Iterator[Box]:
    """The boxes of a part; none if it is empty, one without dims for a scalar."""
    dims = []
    for held in ranges:
        pieces, offset = [], 0
        for start, stop in held:
            pieces.append((start, offset, stop - start))
            offset += stop - start
        dims.append(pieces)
    for pieces_ in product(*dims):
        starts, at, sizes = zip(*pieces_, strict=True) if pieces_ else ((), (), ())
        yield Box(tuple(starts), tuple(at), tuple(sizes))


def part_shape(ranges: Sequence[Ranges]) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(sum(stop - start for start, stop in held) for held in ranges)


def put(whole: Tensor, part: Tensor, ranges: Sequence[Ranges]) -> None:
    """Copy a rank's part to its places in the whole tensor."""
    for box in boxes(ranges):
        whole[box.whole].copy_(part[box.part])


def _slices(starts: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
