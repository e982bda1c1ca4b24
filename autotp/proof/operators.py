"""Where a split dim of an operand is in the result: one small function for each family of
operators.

A function is called if an operand is split. It returns where the result is split (None if it is
whole), PARTIAL if the split dim was summed over, or a list of those; it raises Refused where the
ranks' results would not be parts of the whole one. An operator that is not in the table, and that
torch does not tag as pointwise, takes no split operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autotp.proof import elementwise, lookups, products, reductions, views
from autotp.proof.values import Call, Result


def _table(families: dict[Callable[[Call], Result], str]) -> dict[str, Callable[[Call], Result]]:
    named = {op: rule for rule, ops in families.items() for op in ops.split()}
    return {op if "." in op else f"aten.{op}": rule for op, rule in named.items()}


TABLE = _table(
    {
        products.addmm: "addmm baddbmm",
        products.attention: "scaled_dot_product_attention",
        products.convolution: "conv1d conv2d conv3d",
        elementwise.create: """empty full new_empty new_full new_ones new_zeros ones scalar_tensor
            zeros""",
        products.einsum: "einsum",
        lookups.embedding: "embedding",
        lookups.gather: "gather",
        products.grouped: "_grouped_mm transformers.grouped_mm_fallback",
        lookups.index: "index",
        lookups.index_copy: "index_copy index_copy_ index_add index_add_",
        lookups.index_put: "index_put index_put_",
        lookups.scatter: "scatter scatter_ scatter_add scatter_add_",
        lookups.index_select: "index_select",
        elementwise.isin: "isin",
        reductions.differences: "diff",
        reductions.histogram: "histc bincount",
        reductions.last: "layer_norm rms_norm",
        elementwise.like: """_to_copy alias alpha_dropout bernoulli celu contiguous detach
            detach_ dropout empty_like full_like lift_fresh_copy native_dropout ones_like rand_like
            randn_like to type_as zeros_like""",
        products.linear: "linear",
        reductions.loss: "cross_entropy_loss",
        products.matmul: "matmul mm bmm",
        reductions.mixed: """_log_softmax _softmax all amax amin any argmax argmin argsort cumprod
            cumsum flip linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median min
            norm prod roll softmax sort std topk var""",
        elementwise.pointwise: """polar __and__ __or__ __xor__ __iand__ __ior__ copy_
            floor_divide log_sigmoid masked_fill masked_fill_ where""",
        elementwise.pairs: "view_as_complex view_as_real",
        elementwise.prelu: "prelu",
        reductions.total: "sum",
        reductions.triangle: "tril triu",
        views.cat: "cat concat concatenate",
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
    if torch.Tag.pointwise in target.tags and TABLE.get(name) in (None, reductions.mixed):
        return elementwise.pointwise
    return TABLE.get(name)


def has_sizes(name: str) -> bool:
    """Whether an operator's literals may be sizes of its result."""
    rule = TABLE.get(name)
    return rule is elementwise.create or (rule is not None and rule.__module__ == views.__name__)
