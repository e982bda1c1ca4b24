"""Where a split dim is after operators that reduce, normalize or order some dims."""

from __future__ import annotations

from autotp.proof.values import (
    PARTIAL,
    UNLIKE,
    WHOLE,
    Call,
    Place,
    Refused,
    Result,
    layout_in,
    position,
)


def _dims(call: Call, rank: int) -> list[int]:
    given = call.given.get("dim", call.given.get("dims"))
    if given is None or given == []:
        return list(range(rank))
    return [position(d, rank) for d in ([given] if isinstance(given, int) else given)]


def mixed(call: Call) -> Result:
    """softmax, max, sort, ...: mix the items of some dims, which must be whole."""
    x = call.input()
    rank = len(x.whole)
    dims = _dims(call, rank)
    if x.dim in dims:
        raise Refused(f"{call.name} mixes the items of a split dim")
    outs = call.out if isinstance(call.out, (list, tuple)) else [call.out]
    gone = 0 if len(outs[0].shape) == rank else sum(dim < x.dim for dim in dims)
    place = Place(x.dim - gone, layout_in(x))
    return [place for _ in outs] if isinstance(call.out, (list, tuple)) else place


def total(call: Call) -> Result:
    """sum: over a split dim it leaves a partial sum."""
    x = call.input()
    return PARTIAL if x.dim in _dims(call, len(x.whole)) else mixed(call)


def differences(call: Call) -> Result:
    """diff: the dim along which it subtracts is whole, all operands are split alike."""
    x, operands = call.all()[0], call.all()
    if position(call.given["dim"], len(x.whole)) == x.dim:
        raise Refused(f"{call.name} subtracts neighbours along a split dim")
    if any((o.kind, o.dim, o.layout) != (x.kind, x.dim, x.layout) for o in operands):
        raise Refused(UNLIKE)
    return Place(x.dim, layout_in(x))


def histogram(call: Call) -> Result:
    """histc, bincount: every item is counted."""
    raise Refused(f"{call.name} counts all items, and some are on other ranks")


def last(call: Call) -> Result:
    """layer_norm, rms_norm: the last dims must be whole."""
    x = call.input()
    if x.dim >= len(x.whole) - len(call.given["normalized_shape"]):
        raise Refused(f"{call.name} normalizes over a split dim")
    return Place(x.dim, layout_in(x))


def triangle(call: Call) -> Result:
    """triu, tril: the last two dims must be whole."""
    x = call.input()
    if x.dim >= len(x.whole) - 2:
        raise Refused(f"{call.name} compares positions of a split dim")
    return Place(x.dim, layout_in(x))


def loss(call: Call) -> Result:
    """A loss of each token, with tokens split; split classes need autotp.runtime.vocabulary."""
    logits, target, weight = (call.value(name) for name in ("self", "target", "weight"))
    assert logits is not None and target is not None
    classes = min(len(logits.whole) - 1, 1)
    if logits.kind != "S" or logits.dim == classes or (weight and weight.kind == "S"):
        raise Refused(f"{call.name} mixes the items of a split dim")
    if call.given["reduction"] != 0:
        raise Refused(f"{call.name} averages over a split dim")
    dim = logits.dim - (logits.dim > classes)
    if target.split_at(dim if len(target.whole) < len(logits.whole) else logits.dim) is None:
        raise Refused(WHOLE)
    if target.layout != logits.layout:
        raise Refused(UNLIKE)
    return Place(dim, layout_in(logits))
