"""Where a split dim goes in operators that move, cut and join dims without touching elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from autotp import sizes
from autotp.proof import layout as lay
from autotp.proof.layout import Layout
from autotp.proof.values import Call, Place, Refused, Result, Value, bind, position
from autotp.sizes import ONE

CUTS = "a dim is cut or joined where the ranks' parts do not allow it"


def _known(layout: Layout | None) -> Layout:
    if layout is None:
        raise Refused(CUTS)
    return layout


def _at(x: Value) -> Layout:
    return _known(x.layout)


def regroup(call: Call) -> Result:
    """view, reshape, squeeze, ..."""
    x = call.input()
    found = lay.regroup(_at(x), x.dim, x.sizes, call.out_sizes())
    if found is None:
        raise Refused(CUTS)
    return Place(*found)


def permute(call: Call) -> Result:
    """permute, transpose, t, T, mT."""
    x, given = call.input(), call.given
    rank = len(x.whole)
    order = list(range(rank))
    pair = [given[name] for name in ("dim0", "dim1", "axis0", "axis1") if name in given]
    if "dims" in given:
        order = [position(dim, rank) for dim in given["dims"]]
    else:
        if not pair:
            reverse = call.name in ("aten.t", "aten.numpy_T")
            pair = [0, rank - 1] if reverse and rank == 2 else [-2, -1]
            if reverse and rank != 2:
                order.reverse()
                return Place(order.index(x.dim), _at(x))
        a, b = (position(dim, rank) for dim in pair)
        order[a], order[b] = order[b], order[a]
    return Place(order.index(x.dim), _at(x))


def expand(call: Call) -> Result:
    """expand: a split dim keeps its size."""
    x, out = call.all()[0], call.out_sizes()
    if x.kind != "S":
        raise Refused("a whole value is expanded to the shape of a split one")
    at = x.dim + len(out) - len(x.whole)
    if out[at] != x.sizes[x.dim]:
        raise Refused(CUTS)
    return Place(at, _at(x))


def repeat(call: Call) -> Result:
    """repeat: copies of the whole dim end to end."""
    x, out = call.input(), call.out_sizes()
    at = x.dim + len(out) - len(x.whole)
    copies = sizes.divide(out[at], x.sizes[x.dim])
    if copies is None:
        raise Refused(CUTS)
    return Place(at, _known(_at(x).repeated(copies)))


def repeat_interleave(call: Call) -> Result:
    """repeat_interleave by a number."""
    x, dim = call.input(), call.given.get("dim")
    if dim is None:
        raise Refused(CUTS)
    copies = sizes.divide(call.out_sizes()[x.dim], x.sizes[x.dim])
    if position(dim, len(x.whole)) != x.dim:
        return Place(x.dim, _at(x))
    if copies is None or not isinstance(call.given["repeats"], int):
        raise Refused(CUTS)
    return Place(x.dim, _known(_at(x).stretched(copies)))


def split(call: Call) -> Result:
    """split, chunk, ...: windows of the whole dim."""
    x = call.input()
    if position(call.given["dim"], len(x.whole)) != x.dim:
        return [Place(x.dim, _at(x)) for _ in call.out]
    places: list[Place] = []
    start = 0
    for part in call.out:
        width, symbols = sizes.size_of(part.shape[x.dim])
        if symbols:
            raise Refused(CUTS)
        places.append(Place(x.dim, _known(_at(x).cut(start, start + width))))
        start += width
    return list(places)


def slice_(call: Call) -> Result:
    """slice, narrow. Their borders are the rank's; where they lie in the whole says the captured
    program."""
    x, given = call.input(), call.given
    if position(given["dim"], len(x.whole)) != x.dim:
        return Place(x.dim, _same_borders(call, x))
    step = given.get("step", 1)
    if step != 1:
        thin = sizes.divide(x.sizes[x.dim], (step, ()))
        if not 0 <= (given["start"] or 0) < step or call.out_sizes()[x.dim] != thin:
            raise Refused(CUTS)
        return Place(x.dim, _known(_at(x).thinned(step)))
    if x.sizes[x.dim] == call.out_sizes()[x.dim]:
        return Place(x.dim, _at(x))
    return Place(x.dim, _sliced(call, x))


def _same_borders(call: Call, x: Value) -> Layout:
    """A dim that is whole is sliced as the captured program does it."""
    spec = call.spec and bind(call.spec.target, call.spec.args, call.spec.kwargs)
    for name, edge in call.given.items():
        if not isinstance(edge, Node) and name != "dim" and (not spec or spec.get(name) != edge):
            raise Refused("a slice of a whole dim takes other items than the captured one")
    return _at(x)


def _sliced(call: Call, x: Value) -> Layout:
    whole, symbols = x.sizes[x.dim]
    spec, held = call.spec, _at(x).ranges()
    whole_out = None if spec is None else sizes.shape_of(spec.meta["val"])
    if spec is None or held is None or symbols or whole_out != call.out_sizes():
        raise Refused("a slice of a split dim stands for no slice of the captured program")
    borders = _borders(bind(spec.target, spec.args, spec.kwargs), whole)
    mine = [sum(max(0, min(b, edge) - a) for a, b in held[call.rank]) for edge in borders]
    if list(_borders(call.given, sum(b - a for a, b in held[call.rank]))) != mine:
        raise Refused(f"a slice must take {mine[0]} to {mine[1]} of what this rank holds")
    return _known(_at(x).cut(*borders))


def _borders(given: Mapping[str, Any], size: int) -> tuple[int, int]:
    """From where to where slice or narrow takes of a dim of a size."""
    if any(isinstance(given.get(name), Node) for name in ("start", "end", "length")):
        raise Refused("a split dim is sliced at a place that depends on the call")
    start = position(given["start"] or 0, size)
    stop = start + given["length"] if "length" in given else given["end"]
    stop = size if stop is None else position(stop, size)
    return max(0, min(start, size)), max(0, min(stop, size))


def drop(call: Call) -> Result:
    """select and unbind: one item of a dim that is whole."""
    x = call.input()
    at = position(call.given["dim"], len(x.whole))
    if at == x.dim:
        raise Refused(f"{call.name} takes single items of a split dim")
    place = Place(x.dim - (at < x.dim), _at(x))
    return [place for _ in call.out] if isinstance(call.out, (list, tuple)) else place


def cat(call: Call) -> Result:
    """cat: along the split dim every operand is split, and parts follow each other on each rank."""
    rank = len(call.out_sizes())
    operands = [x for x in call.all() if len(x.whole) == rank]
    at = position(call.given["dim"], rank)
    dims = {x.dim for x in operands if x.kind == "S"}
    if len(dims) != 1 or any(x.kind != "S" for x in operands):
        raise Refused("split and whole values are joined")
    layouts = [_at(x) for x in operands]
    if dims == {at}:
        return Place(at, _known(lay.joined(layouts)))
    return Place(dims.pop(), _same(layouts))


def stack(call: Call) -> Result:
    """stack: operands that are split alike, along a new dim."""
    operands = call.all()
    at = position(call.given["dim"], len(call.out_sizes()))
    if len({x.dim for x in operands}) != 1 or any(x.kind != "S" for x in operands):
        raise Refused("split and whole values are joined")
    dim = operands[0].dim
    return Place(dim + (at <= dim), _same([_at(x) for x in operands]))


def _same(layouts: list[Layout]) -> Layout:
    if any(layout != layouts[0] for layout in layouts):
        raise Refused("operands are split in different ways")
    return layouts[0]


def pad(call: Call) -> Result:
    """pad: a split dim is not padded."""
    x, given = call.input(), call.given["pad"]
    pair = len(x.whole) - 1 - x.dim
    if any(given[2 * pair : 2 * pair + 2]):
        raise Refused("aten.pad adds items to a split dim")
    return Place(x.dim, _at(x))


def is_uniform(call: Call, dim: int, layout: Layout) -> bool:
    """Whether a whole operand gives every unit of a new split dim the same items."""
    x = call.all()[0]
    before = (ONE,) * (len(call.out_sizes()) - len(x.whole)) + x.sizes
    if call.name in ("aten.repeat", "aten.tile"):
        return sizes.divide(layout.after, before[dim]) is not None
    if call.name == "aten.repeat_interleave":
        return sizes.divide(layout.before, before[dim]) is not None
    return before[dim] == ONE
