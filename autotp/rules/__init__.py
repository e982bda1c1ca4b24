"""RULES: what each operator says about the dims of its operands and results.

One table, by operator name (all overloads share a rule). An operator that torch tags as pointwise
needs no entry. Any other operator without a rule bars every axis that it touches, so what is not
known stays replicated and shows in the plan. How to write a rule: docs/rules.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from autotp.rules import (
    border,
    convolution,
    creation,
    embedding,
    matmul,
    pointwise,
    reduction,
    view,
)
from autotp.rules.context import Context, Dims, Use, Value
from autotp.rules.notation import name

__all__ = ["ENTERED", "RULES", "Context", "Dims", "Rule", "Use", "Value", "name", "rule_for"]

Rule = Callable[[Context, Node], Value]


def _table(families: dict[Rule, str]) -> dict[str, Rule]:
    named = {op: rule for rule, ops in families.items() for op in ops.split()}
    return {op if "." in op else f"aten.{op}": rule for op, rule in named.items()}


RULES: dict[str, Rule] = _table(
    {
        convolution.convolution: "conv1d conv2d conv3d",
        creation.count: "arange linspace",
        creation.size: "sym_size",
        creation.create: """empty full new_empty new_full new_ones new_zeros ones zeros
            scalar_tensor""",
        embedding.embedding: "embedding",
        embedding.gather: "gather",
        embedding.index: "index",
        embedding.index_copy: "index_copy index_copy_ index_add index_add_",
        embedding.index_put: "index_put index_put_",
        embedding.scatter: "scatter scatter_ scatter_add scatter_add_",
        embedding.index_select: "index_select",
        matmul.addmm: "addmm",
        matmul.baddbmm: "baddbmm",
        matmul.einsum: "einsum",
        matmul.grouped: "_grouped_mm transformers.grouped_mm_fallback",
        matmul.linear: "linear",
        matmul.matmul: "matmul mm bmm",
        pointwise.isin: "isin",
        pointwise.like: """_to_copy alias alpha_dropout bernoulli celu contiguous detach detach_
            dropout empty_like full_like lift_fresh_copy native_dropout ones_like rand_like
            randn_like to type_as zeros_like""",
        pointwise.pointwise: """polar __and__ __or__ __xor__ __iand__ __ior__ copy_ floor_divide
            log_sigmoid masked_fill masked_fill_ where""",
        pointwise.prelu: "prelu",
        reduction.along: """cumprod cumsum flip log_softmax roll softmax _softmax _log_softmax
            logcumsumexp""",
        reduction.attention: "scaled_dot_product_attention",
        reduction.cross_entropy: "cross_entropy_loss",
        reduction.mean: "mean",
        reduction.differences: "diff",
        reduction.histogram: "histc bincount",
        reduction.last: "layer_norm rms_norm",
        reduction.reduce: """all amax amin any argmax argmin argsort linalg_vector_norm logsumexp
            max median min norm prod sort std topk var""",
        reduction.total: "sum",
        reduction.triangle: "tril triu",
        view.as_complex: "view_as_complex",
        view.as_real: "view_as_real",
        view.adjoint: "mT adjoint matrix_H",
        view.cat: "cat concat concatenate",
        view.expand: "expand expand_as broadcast_to",
        view.pad: "pad constant_pad_nd",
        view.permute: "permute transpose t numpy_T swapaxes swapdims",
        view.regroup: """_unsafe_view flatten reshape reshape_as squeeze unflatten unsqueeze view
            view_as""",
        view.repeat: "repeat tile",
        view.repeat_interleave: "repeat_interleave",
        view.select: "select",
        view.slice_: "slice narrow",
        view.split: "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split",
        view.stack: "stack",
        view.unbind: "unbind",
    }
)


# Rules of values that every rank has whole, and takes its own part of where they are split.
ENTERED = (creation.count, border.part)


def rule_for(node: Node) -> Rule | None:
    """The rule of a node's operator; None where there is none."""
    target = node.target
    if target is border.parted:
        return border.part
    if not isinstance(target, torch._ops.OpOverload):
        return None
    found = RULES.get(name(node))
    if torch.Tag.pointwise in target.tags and found is None:
        return pointwise.pointwise
    if found is reduction.reduce and torch.Tag.pointwise in target.tags:
        return pointwise.pointwise  # aten.max.other
    return found
