"""Which all-reduces may put their sum where the summand was.

before  %down : linear(%x, %w)      read by g alone, and no backward needs it
        %g : reduce_from_region(%down)
after   %g : reduce_from_region(%down, in_place=True)

For f it is the gradient that is summed: in place where all readers are operators whose backward
makes gradients anew. Others may hand on the gradient that they were given, as an addition does,
and then it is a summand of something else as well. In place, a copy of an activation is saved for
each all-reduce, which is what Megatron-LM does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autotp.program import Program
from autotp.runtime import vocabulary
from autotp.runtime.collectives import copy_to_region, reduce_from_region

aten = torch.ops.aten
# Operators with results in new memory that their backward does not read.
_SUMMANDS = {
    aten.add.Tensor,
    aten.addmm.default,
    aten.bmm.default,
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    vocabulary.embedding,
}
# Operators and those of their operands whose gradients are in new memory.
_ANEW: dict[Any, tuple[int, ...]] = {
    aten.addmm.default: (1, 2),
    aten.bmm.default: (0, 1),
    aten.layer_norm.default: (0,),
    aten.linear.default: (0, 1),
    aten.matmul.default: (0, 1),
    aten.mm.default: (0, 1),
}
_VIEWS = {aten.reshape.default, aten.transpose.int, aten.view.default}


def reuse(program: Program) -> frozenset[Node]:
    """The f's and g's of one rank's program that may work in place."""
    return frozenset(
        node
        for node in program.graph.nodes
        if (node.target is reduce_from_region and _is_free(node))
        or (node.target is copy_to_region and all(_makes_gradient(u, node) for u in node.users))
    )


def _is_free(g: Node) -> bool:
    summand = g.args[0]
    assert isinstance(summand, Node)
    here = summand.meta.get("calls") == g.meta.get("calls")  # no hook sees the summand in between
    return here and len(summand.users) == 1 and summand.target in _SUMMANDS


def _makes_gradient(user: Node, of: Node) -> bool:
    """Whether an operator's gradient of an operand is surely in memory of its own."""
    if user.target in _VIEWS:
        return all(_makes_gradient(reader, user) for reader in user.users)
    anew = _ANEW.get(user.target, ())
    places = [at for at, operand in enumerate(user.args) if operand is of]
    return bool(places) and all(at in anew for at in places) and of not in user.kwargs.values()
