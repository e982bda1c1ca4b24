"""Where a split dim is in results of operators that treat every element alike."""

from __future__ import annotations

from autotp.proof.values import WHOLE, Call, Place, Refused, Result, aligned, layout_in


def pointwise(call: Call) -> Result:
    """Element by element."""
    return aligned(call.all(), len(call.out_sizes()))


def prelu(call: Call) -> Result:
    """A slope of its own for each channel would have to be split with the channels."""
    x, weight = call.value("self"), call.value("weight")
    assert x is not None and weight is not None
    if weight.kind == "S" or (weight.whole != (1,) and x.dim == 1):
        raise Refused("aten.prelu has a slope for each item of the second dim")
    return like(call)


def like(call: Call) -> Result:
    """As the first operand; others give a dtype or nothing."""
    x = call.all()[0]
    return Place(x.dim, layout_in(x)) if x.kind == "S" else None


def pairs(call: Call) -> Result:
    """view_as_complex, view_as_real: the dim of two numbers is whole, the others pass."""
    x = call.input()
    if x.dim >= len(call.out_sizes()):
        raise Refused(f"{call.name} makes one number of a split dim")
    return Place(x.dim, layout_in(x))


def create(call: Call) -> Result:
    """What is made from sizes is not placed by its operands."""
    raise Refused("the place of a new tensor is read off its sizes")


def isin(call: Call) -> Result:
    """The set is read whole."""
    x = call.value("elements")
    if x is None or x.kind != "S" or sum(value.kind == "S" for value in call.all()) > 1:
        raise Refused(WHOLE)
    return Place(x.dim, layout_in(x))
