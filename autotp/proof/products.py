"""Where a split dim is after products: it passes, or is contracted and leaves a partial sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotp import sizes
from autotp.proof.values import (
    PARTIAL,
    UNLIKE,
    WHOLE,
    Call,
    Place,
    Refused,
    Result,
    Value,
    layout_in,
)

BIAS = "a bias is added to a partial sum, so it counts once for each rank"


def product(text: str, operands: Sequence[Value | None], rank: int, added: int = -1) -> Result:
    """A contraction in letters, `... m k, ... k n -> ... m n`; operand number `added` is a bias."""
    left, right = text.split("->")
    out = right.split()
    letters = [
        (x, _letters(spec.split(), len(x.whole)), i)
        for i, (spec, x) in enumerate(zip(left.split(","), operands, strict=False))
        if x is not None
    ]
    found = {names[x.dim] for x, names, _ in letters if x.kind == "S"}
    if len(found) != 1:
        raise Refused(UNLIKE)
    letter = found.pop()
    layouts = {x.layout for x, names, _ in letters if x.kind == "S"}
    for x, names, i in letters:
        whole = x.kind != "S" and letter in names
        if whole and not ((i == added or letter[0] == ".") and x.shape[names.index(letter)] == 1):
            raise Refused(WHOLE)
    if len(layouts) != 1:
        raise Refused(UNLIKE)
    result = _letters(out, rank)
    layout = layouts.pop()
    if letter in result and layout is not None:
        return Place(result.index(letter), layout)
    if any(i == added for _, _, i in letters):
        raise Refused(BIAS)
    return PARTIAL


def _letters(tokens: list[str], rank: int) -> list[str]:
    """A letter for each dim; leading dims are `.1`, `.2`, ... from the right."""
    named = [token for token in tokens if token != "..."]
    lead = rank - len(named)
    return [f".{i}" for i in range(lead, 0, -1)] + named[max(0, -lead) :]


def linear(call: Call) -> Result:
    """`x @ weight.T + bias`."""
    x, weight, bias = (call.value(name) for name in ("input", "weight", "bias"))
    return product("... k, n k, n -> ... n", (x, weight, bias), len(call.out_sizes()), 2)


def addmm(call: Call) -> Result:
    """`bias + x @ y`, and batched."""
    batched = "batch1" in call.given
    text = "b m k, b k n, b m n -> b m n" if batched else "m k, k n, m n -> m n"
    names = ("batch1", "batch2", "self") if batched else ("mat1", "mat2", "self")
    x, y, bias = (call.value(name) for name in names)
    return product(text, (x, y, bias), len(call.out_sizes()), 2)


def matmul(call: Call) -> Result:
    """`x @ y` of any rank."""
    x, y = call.all()
    one, other = min(len(x.whole), 2), min(len(y.whole), 2)
    text = {
        (1, 1): "k, k ->",
        (1, 2): "k, ... k n -> ... n",
        (2, 1): "... m k, k -> ... m",
        (2, 2): "... m k, ... k n -> ... m n",
    }[one, other]
    return product(text, (x, y), len(call.out_sizes()))


def einsum(call: Call) -> Result:
    """Any contraction that is written out; a letter twice in one operand takes a diagonal."""
    left, _, right = call.given["equation"].replace(" ", "").partition("->")
    specs, operands = left.split(","), call.all()
    if "." in left:
        raise Refused("einsum is known without an ellipsis alone")
    for spec, x in zip(specs, operands, strict=True):
        if x.kind == "S" and spec.count(spec[x.dim]) > 1:
            raise Refused("einsum takes a diagonal over a split dim")
    text = ", ".join(" ".join(spec) for spec in specs) + " -> " + " ".join(right)
    return product(text, operands, len(call.out_sizes()))


def grouped(call: Call) -> Result:
    """A product for each group of rows with the group's matrix; rows and groups are whole."""
    x, weights, *_ = call.all()
    if (len(x.whole), len(weights.whole)) != (2, 3) or x.split_at(0) or weights.split_at(0):
        raise Refused(f"{call.name} needs all rows and all groups")
    return product("m k, e k n -> m n", (x, weights), len(call.out_sizes()))


def attention(call: Call) -> Result:
    """softmax(q k^T + mask) v: keys and sizes of q and k are mixed, positions if it is causal."""
    q, k, v = (call.value(name) for name in ("query", "key", "value"))
    mask, rank = call.value("attn_mask"), len(call.out_sizes())
    assert q is not None and k is not None and v is not None
    if call.given.get("enable_gqa"):
        k, v = (_grouped(x, q) for x in (k, v))
    mixed = [(q, -1), (k, -1), (k, -2), (v, -2)] + ([(mask, -1)] if mask else [])
    mixed += [(q, -2)] if call.given["is_causal"] else []
    if any(x.split_at(len(x.whole) + at) for x, at in mixed):
        raise Refused(f"{call.name} mixes the items of a split dim")
    return product("... l e, ... s e, ... s v, ... l s -> ... l v", (q, k, v, mask), rank, 3)


def _grouped(x: Value, q: Value) -> Value:
    """Keys or values as if each query head had its own; split or whole groups share them."""
    group, heads = sizes.divide(q.sizes[-3], x.sizes[-3]), q.split_at(len(q.whole) - 3)
    if x.split_at(len(x.whole) - 3) and group:
        return replace(x, layout=layout_in(x).stretched(group))
    if x.kind != "S" and heads and sizes.divide(heads.before, x.sizes[-3]):
        return replace(x, shape=(*x.shape[:-3], 1, *x.shape[-2:]))  # split inside of each group
    return x


def convolution(call: Call) -> Result:
    """Channels may be split where each has a filter of its own, and the batch."""
    x, weight, bias = (call.value(name) for name in ("input", "weight", "bias"))
    assert x is not None and weight is not None
    if len(x.whole) != len(weight.whole):
        raise Refused(f"{call.name} is known for a batch alone")
    depthwise = weight.whole[1] == 1 and weight.whole[0] == x.whole[1]
    for value, names in ((x, (0, 1) if depthwise else (0,)), (weight, (0,))):
        if value.kind == "S" and value.dim not in names:
            raise Refused(f"{call.name} mixes the items of a split dim")
    if weight.kind == "S" and not depthwise and weight.whole[1] != x.whole[1]:
        raise Refused(f"{call.name} has channels in groups")
    space = " ".join("k" * (len(x.whole) - 2))
    text = f"b {'c' if depthwise else 'i'} {space}, c i {space}, c -> b c {space}"
    return product(text, (x, weight, bias), len(call.out_sizes()))
