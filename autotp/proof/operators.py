"""Where a split dim of an operand is in the result: one small function for each family of
operators.

A function is called if an operand is split. It returns where the result is split (None if it is
whole), PARTIAL if the split dim was summed over, or a list of those; it raises Refused where the
ranks' results would not be parts of the whole one. An operator that is not in the table, and that
torch does not tag as pointwise, takes no split operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotp import sizes
from autotp.proof import views
from autotp.proof.layout import Layout
from autotp.proof.values import PARTIAL, Call, Place, Refused, Result, Value, position

UNLIKE = "operands are split in different ways"
WHOLE = "an operand is whole where another one is split"
BIAS = "a bias is added to a partial sum, so it counts once for each rank"


def _layout(x: Value) -> Layout:
    assert x.layout is not None
    return x.layout


def _aligned(operands: Sequence[Value], rank: int) -> Place:
    """Operands that broadcast against each other."""
    places = {(x.dim - len(x.shape), x.layout) for x in operands if x.kind == "S"}
    if len(places) != 1:
        raise Refused(UNLIKE)
    at, layout = places.pop()
    assert layout is not None
    for x in operands:
        if x.kind != "S" and len(x.shape) >= -at and x.shape[at] != 1:
            raise Refused(WHOLE)
    return Place(rank + at, layout)


def pointwise(call: Call) -> Result:
    """Element by element."""
    return _aligned(call.all(), len(call.out_sizes()))


def prelu(call: Call) -> Result:
    """A slope of its own for each channel would have to be split with the channels."""
    weight = call.value("weight")
    if weight is None or weight.whole != (1,):
        raise Refused("aten.prelu has a slope for each item of a dim")
    return like(call)


def like(call: Call) -> Result:
    """As the first operand; others give a dtype or nothing."""
    x = call.all()[0]
    return Place(x.dim, _layout(x)) if x.kind == "S" else None


def pairs(call: Call) -> Result:
    """view_as_complex, view_as_real: the dim of two numbers is whole, the others pass."""
    x = call.input()
    if x.dim >= len(call.out_sizes()):
        raise Refused(f"{call.name} makes one number of a split dim")
    return Place(x.dim, _layout(x))


def create(call: Call) -> Result:
    """What is made from sizes is not placed by its operands."""
    raise Refused("the place of a new tensor is read off its sizes")


def isin(call: Call) -> Result:
    """The set is read whole."""
    x = call.value("elements")
    if x is None or x.kind != "S" or sum(value.kind == "S" for value in call.all()) > 1:
        raise Refused(WHOLE)
    return Place(x.dim, _layout(x))


# ---- reductions


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
    place = Place(x.dim - gone, _layout(x))
    return [place for _ in outs] if isinstance(call.out, (list, tuple)) else place


def total(call: Call) -> Result:
    """sum: over a split dim it leaves a partial sum."""
    x = call.input()
    return PARTIAL if x.dim in _dims(call, len(x.whole)) else mixed(call)


def last(call: Call) -> Result:
    """layer_norm, rms_norm: the last dims must be whole."""
    x = call.input()
    if x.dim >= len(x.whole) - len(call.given["normalized_shape"]):
        raise Refused(f"{call.name} normalizes over a split dim")
    return Place(x.dim, _layout(x))


def triangle(call: Call) -> Result:
    """triu, tril: the last two dims must be whole."""
    x = call.input()
    if x.dim >= len(x.whole) - 2:
        raise Refused(f"{call.name} compares positions of a split dim")
    return Place(x.dim, _layout(x))


# ---- products


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
    """Any contraction that is written out, without repeated letters in an operand."""
    left, _, right = call.given["equation"].replace(" ", "").partition("->")
    specs = left.split(",")
    if "." in left or any(len(set(spec)) != len(spec) for spec in specs):
        raise Refused("einsum is known for plain letters alone")
    text = ", ".join(" ".join(spec) for spec in specs) + " -> " + " ".join(right)
    return product(text, call.all(), len(call.out_sizes()))


def grouped(call: Call) -> Result:
    """A product for each group of rows with the group's matrix; rows and groups are whole."""
    x, weights, *_ = call.all()
    if (len(x.whole), len(weights.whole)) != (2, 3) or x.split_at(0) or weights.split_at(0):
        raise Refused(f"{call.name} needs all rows and all groups")
    return product("m k, e k n -> m n", (x, weights), len(call.out_sizes()))


def attention(call: Call) -> Result:
    """softmax(q k^T + mask) v: split along leading dims (heads) alone."""
    q, k, v = (call.value(name) for name in ("query", "key", "value"))
    mask, rank = call.value("attn_mask"), len(call.out_sizes())
    assert q is not None and k is not None and v is not None
    if call.given.get("enable_gqa"):
        group = sizes.divide(q.sizes[-3], k.sizes[-3])
        k, v = (_grouped(x, rank, group) for x in (k, v))
    operands = [x for x in (q, k, v, mask) if x is not None]
    if any(x.kind == "S" and x.dim >= len(x.whole) - 2 for x in operands):
        raise Refused(f"{call.name} mixes the items of a split dim")
    return _aligned(operands, rank)


def _grouped(x: Value, rank: int, group: sizes.Size | None) -> Value:
    if x.kind != "S" or x.dim != rank - 3 or group is None:
        return x
    return replace(x, layout=_layout(x).stretched(group))


# ---- look-ups


def embedding(call: Call) -> Result:
    """Rows of a table that is whole along its rows."""
    weight, indices = call.value("weight"), call.value("indices")
    assert weight is not None and indices is not None
    if weight.kind == "S" and indices.kind == "S":
        raise Refused(UNLIKE)
    if indices.kind == "S":
        return Place(indices.dim, _layout(indices))
    if weight.dim == 0:
        raise Refused("rows of a split table are looked up without regard to which rank holds them")
    return Place(len(indices.whole), _layout(weight))


def index(call: Call) -> Result:
    """`x[i, :, j]`: indexed dims must be whole, the others pass."""
    x, given = call.value("self"), call.given["indices"]
    assert x is not None
    places = [i for i, item in enumerate(given) if item is not None]
    indices = [value for value in map(call.of, given) if value is not None]
    picked = max(len(value.whole) for value in indices)
    together = places == list(range(places[0], places[-1] + 1))
    first = places[0] if together else 0
    inner = any(value.kind == "S" for value in indices)
    if (x.kind == "S") == inner:
        raise Refused(UNLIKE)
    if inner:
        place = _aligned(indices, picked)
        return Place(first + place.dim, place.layout)
    if x.dim in places:
        raise Refused(f"{call.name} looks up items of a split dim")
    kept = [i for i in range(len(x.whole)) if i not in places].index(x.dim)
    return Place(kept if kept < first else kept + picked, _layout(x))


def gather(call: Call) -> Result:
    """gather: the dim along which it looks up must be whole, both operands are split alike."""
    x, chosen = call.value("self"), call.value("index")
    assert x is not None and chosen is not None
    if (x.kind, x.dim, x.layout) != (chosen.kind, chosen.dim, chosen.layout):
        raise Refused(UNLIKE)
    if position(call.given["dim"], len(x.whole)) == x.dim:
        raise Refused(f"{call.name} looks up items of a split dim")
    return Place(x.dim, _layout(x))


def index_select(call: Call) -> Result:
    """Items of one dim, which must be whole."""
    x = call.input()
    if position(call.given["dim"], len(x.whole)) == x.dim:
        raise Refused(f"{call.name} looks up items of a split dim")
    return Place(x.dim, _layout(x))


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


def loss(call: Call) -> Result:
    """A loss of split logits needs autotp.runtime.vocabulary."""
    raise Refused(f"{call.name} mixes the items of a split dim")


def _table(families: dict[Callable[[Call], Result], str]) -> dict[str, Callable[[Call], Result]]:
    named = {op: rule for rule, ops in families.items() for op in ops.split()}
    return {op if "." in op else f"aten.{op}": rule for op, rule in named.items()}


TABLE = _table(
    {
        addmm: "addmm baddbmm",
        attention: "scaled_dot_product_attention",
        convolution: "conv1d conv2d conv3d",
        create: "empty full new_empty new_full new_ones new_zeros ones zeros scalar_tensor",
        einsum: "einsum",
        embedding: "embedding",
        gather: "gather",
        grouped: "_grouped_mm transformers.grouped_mm_fallback",
        index: "index",
        index_select: "index_select",
        isin: "isin",
        last: "layer_norm rms_norm",
        like: """_to_copy alias alpha_dropout bernoulli celu contiguous detach detach_ dropout
            empty_like full_like lift_fresh_copy native_dropout ones_like rand_like randn_like to
            type_as zeros_like""",
        linear: "linear",
        loss: "cross_entropy_loss",
        matmul: "matmul mm bmm",
        mixed: """_log_softmax _softmax all amax amin any argmax argmin argsort cumprod cumsum flip
            linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median min norm prod roll
            softmax sort std topk var""",
        pointwise: """polar __and__ __or__ __xor__ __iand__ __ior__ copy_ floor_divide masked_fill
            masked_fill_ where""",
        pairs: "view_as_complex view_as_real",
        prelu: "prelu",
        total: "sum",
        triangle: "tril triu",
        views.cat: "cat concat",
        views.drop: "select unbind",
        views.expand: "expand expand_as broadcast_to",
        views.pad: "pad constant_pad_nd",
        views.permute: "permute transpose t numpy_T swapaxes swapdims mT adjoint matrix_H",
        views.regroup: """_unsafe_view flatten reshape reshape_as squeeze unflatten unsqueeze view
            view_as""",
        views.repeat: "repeat tile",
        views.repeat_interleave: "repeat_interleave",
        views.slice_: "slice narrow",
        views.split: "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split",
        views.stack: "stack",
    }
)

# Operators that give uniform values along a dim that they make: any split of it is right.
UNIFORM = {views.expand, views.repeat, views.repeat_interleave}

# What may be done to a partial sum before g: the sum over ranks of the results is the result of the
# sum. Of `add` and `sub` every tensor operand must be partial.
LINEAR = {
    name
    for name, rule in TABLE.items()
    if rule.__module__ == views.__name__ and rule is not views.pad
} | {
    f"aten.{op}"
    for op in ["_to_copy", "add", "alias", "clone", "contiguous", "neg", "sub", "sum", "to"]
}
SCALED = {"aten.div", "aten.mul"}  # linear in a partial sum if the other operand is a number


def rule_of(name: str, target: Any) -> Callable[[Call], Result] | None:
    """The function of an operator; None if no split operand is allowed."""
    if torch.Tag.pointwise in target.tags and TABLE.get(name) in (None, mixed):
        return pointwise
    return TABLE.get(name)


def has_sizes(name: str) -> bool:
    """Whether an operator's literals may be sizes of its result."""
    rule = TABLE.get(name)
    return rule is create or (rule is not None and rule.__module__ == views.__name__)
