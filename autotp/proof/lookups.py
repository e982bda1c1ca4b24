"""Where a split dim is after look-ups by position."""

from __future__ import annotations

import torch

from autotp.proof.values import (
    UNLIKE,
    Call,
    Place,
    Refused,
    Result,
    Value,
    aligned,
    layout_in,
    position,
)


def embedding(call: Call) -> Result:
    """Rows of a table that is whole along its rows."""
    weight, indices = call.value("weight"), call.value("indices")
    assert weight is not None and indices is not None
    if weight.kind == "S" and indices.kind == "S":
        raise Refused(UNLIKE)
    if indices.kind == "S":
        return Place(indices.dim, layout_in(indices))
    if weight.dim == 0:
        raise Refused("rows of a split table are looked up without regard to which rank holds them")
    return Place(len(indices.whole), layout_in(weight))


def index(call: Call) -> Result:
    """`x[i, :, j]`: indexed dims must be whole, the others pass."""
    x = call.value("self")
    assert x is not None
    return _indexed(call, x)


def index_put(call: Call) -> Result:
    """`x[i, :, j] = values`: what is indexed and the values are split alike, or the ranks' values
    are the same."""
    x, values = call.value("self"), call.value("values")
    assert x is not None and values is not None
    if x.kind != "S":
        raise Refused(UNLIKE)
    place = _indexed(call, x)
    indices = [value for value in map(call.of, call.given["indices"]) if value is not None]
    named = sum(item is not None for item in call.given["indices"])
    rank = len(x.whole) - named + max(len(value.whole) for value in indices)
    at = place.dim - (rank - len(values.whole))
    if values.kind == "S":
        if (at, layout_in(values)) != (values.dim, place.layout):
            raise Refused(UNLIKE)
    elif at >= 0 and values.whole[at] != 1:
        raise Refused(UNLIKE)
    return Place(x.dim, layout_in(x))


def index_copy(call: Call) -> Result:
    """Items of one dim are written by position: that dim is whole, the others are split alike."""
    x, source, chosen = call.value("self"), call.value("source"), call.value("index")
    assert x is not None and source is not None and chosen is not None
    if chosen.kind == "S" or position(call.given["dim"], len(x.whole)) == x.dim:
        raise Refused(f"{call.name} writes to items of a split dim")
    if (x.kind, x.dim, x.layout) != (source.kind, source.dim, source.layout):
        raise Refused(UNLIKE)
    return Place(x.dim, layout_in(x))


def scatter(call: Call) -> Result:
    """Items are written along one dim, which is whole; all operands are split alike, and none is
    smaller along the split dim."""
    x, operands = call.value("self"), call.all()
    assert x is not None
    if position(call.given["dim"], len(x.whole)) == x.dim:
        raise Refused(f"{call.name} writes to items of a split dim")
    if any((o.kind, o.dim, o.layout) != (x.kind, x.dim, x.layout) for o in operands):
        raise Refused(UNLIKE)
    return Place(x.dim, layout_in(x))


def _indexed(call: Call, x: Value) -> Place:
    given = call.given["indices"]
    places = [i for i, item in enumerate(given) if item is not None]
    indices = [value for value in map(call.of, given) if value is not None]
    if any(value.dtype in (torch.bool, torch.uint8) for value in indices):
        raise Refused(f"{call.name} by a mask takes other items on each rank")
    picked = max(len(value.whole) for value in indices)
    together = places == list(range(places[0], places[-1] + 1))
    first = places[0] if together else 0
    inner = any(value.kind == "S" for value in indices)
    if (x.kind == "S") == inner:
        raise Refused(UNLIKE)
    if inner:
        place = aligned(indices, picked)
        return Place(first + place.dim, place.layout)
    if x.dim in places:
        raise Refused(f"{call.name} looks up items of a split dim")
    kept = [i for i in range(len(x.whole)) if i not in places].index(x.dim)
    return Place(kept if kept < first else kept + picked, layout_in(x))


def gather(call: Call) -> Result:
    """gather: the dim along which it looks up must be whole, both operands are split alike."""
    x, chosen = call.value("self"), call.value("index")
    assert x is not None and chosen is not None
    if (x.kind, x.dim, x.layout) != (chosen.kind, chosen.dim, chosen.layout):
        raise Refused(UNLIKE)
    if position(call.given["dim"], len(x.whole)) == x.dim:
        raise Refused(f"{call.name} looks up items of a split dim")
    return Place(x.dim, layout_in(x))


def index_select(call: Call) -> Result:
    """Items of one dim, which must be whole; which items may be split."""
    x, chosen = call.value("self"), call.value("index")
    assert x is not None and chosen is not None
    at = position(call.given["dim"], len(x.whole))
    if (x.kind == "S") == (chosen.kind == "S"):
        raise Refused(UNLIKE)
    if chosen.kind == "S":
        return Place(at, layout_in(chosen))
    if x.dim == at:
        raise Refused(f"{call.name} looks up items of a split dim")
    return Place(x.dim, layout_in(x))
