"""Operators by the functions that torch's Python API has for them.

    torch.ops.aten.add.Tensor(x, y)  ->  torch.add(x, y)

Both are the same operator. The function reaches it through torch's generated bindings, which take
about half of the time of a call through `torch.ops`; a decoded token is hundreds of calls. Only
what code is generated from changes: graphs keep their operators.
"""

from __future__ import annotations

import keyword
import operator
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

_FUNCTIONS = """abs.default add.Tensor addmm.default arange.default arange.start
    arange.start_step baddbmm.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor
    bmm.default cat.default clone.default cos.default cumsum.default div.Tensor dropout.default
    embedding.default eq.Scalar eq.Tensor exp.default ge.Scalar ge.Tensor gt.Scalar gt.Tensor
    layer_norm.default le.Scalar le.Tensor logical_and.default logical_not.default lt.Scalar
    lt.Tensor masked_fill.Scalar matmul.default mean.dim mm.default mul.Tensor ne.Scalar ne.Tensor
    neg.default permute.default pow.Tensor_Scalar relu.default reshape.default rms_norm.default
    rsqrt.default sigmoid.default sin.default softmax.int split_with_sizes.default sqrt.default
    stack.default sub.Tensor sum.dim_IntList tanh.default transpose.int unsqueeze.default
    where.self"""
_NAMED: dict[str, Any] = {
    "gelu.default": F.gelu,
    "linear.default": F.linear,
    "scaled_dot_product_attention.default": F.scaled_dot_product_attention,
}
_METHODS = """contiguous.default expand.default size:sym_size.int to.dtype type_as.default
    view.default"""


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


FUNCTIONS: dict[Any, Any] = {
    **{_overload(name): getattr(torch, name.split(".")[0]) for name in _FUNCTIONS.split()},
    **{_overload(name): function for name, function in _NAMED.items()},
}
METHODS: dict[Any, str] = {
    _overload(name.split(":")[-1]): name.split(":")[0].split(".")[0] for name in _METHODS.split()
}


def native(graph: Graph) -> Graph:
    """The same graph for code generation."""
    made, new = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        copy = made.node_copy(node, lambda n: new[n])
        new[node] = copy
        if node.op in ("get_attr", "call_module"):
            copy.target = ".".join(map(_written, node.target.split(".")))
        if node.op != "call_function":
            continue
        if node.target in FUNCTIONS:
            copy.target = FUNCTIONS[node.target]
        elif node.target in METHODS:
            copy.op, copy.target = "call_method", METHODS[node.target]
        elif node.target is torch.ops.aten.slice.Tensor:
            _subscript(copy, node)
    return made


def _written(name: str) -> str:
    """An attribute's name as torch.fx can write it: it puts identifiers after a dot, keywords too,
    and all others between quotes as they are."""
    plain = name.isidentifier() and not keyword.iskeyword(name)
    if name.isascii() and (plain or name.isdigit()):  # Python reads other letters as similar ones
        return name
    return "".join(f"\\U{ord(character):08x}" for character in name)


def _subscript(copy: Node, node: Node) -> None:
    """`x[:, a:b]`; the dim must be counted from the left."""
    args: Any = copy.args
    given: list[Any] = [*args, *[0, None, None, 1][len(args) - 1 :]]
    source, dim, start, end, step = given
    if not isinstance(dim, int) or dim < 0 or copy.kwargs:
        return
    end = None if isinstance(end, int) and end == sys.maxsize else end
    index = (*[slice(None)] * dim, slice(start, end, step))
    copy.target, copy.args = operator.getitem, (source, index)
