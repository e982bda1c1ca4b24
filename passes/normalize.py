"""A loss in two steps is one operator.

before  %log : log_softmax(%logits, -1)
        %loss : nll_loss(%log, %target)
after   %loss : cross_entropy_loss(%logits, %target)

`log_softmax` needs every class; a cross entropy can be computed on split classes (see
`autotp.runtime.vocabulary`). Done where the loss alone reads the log probabilities, so nothing else
changes. Numbers are the same: this is how torch defines cross entropy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from autotp.program import Program, copied
from autotp.rules.context import argument, position

aten = torch.ops.aten
_LOSSES = {aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default}
_LOGS = {aten.log_softmax.int, aten._log_softmax.default}


def normalize(program: Program) -> Program:
    """The program with its losses as single operators."""
    if not any(_is_split(node) for node in program.graph.nodes):
        return program
    graph = copied(program.graph)
    losses = [node for node in graph.nodes if _is_split(node)]
    for loss in losses:
        source = loss.args[0]
        assert isinstance(source, Node)
        loss.target = aten.cross_entropy_loss.default
        loss.args = (source.args[0], *loss.args[1:])
        loss.kwargs = {k: v for k, v in loss.kwargs.items() if v is not None}
        graph.erase_node(source)
    note = f"{len(losses)} losses of log_softmax and nll_loss became cross_entropy_loss"
    return replace(program, graph=graph, provenance=(*program.provenance, note))


def _is_split(loss: Node) -> bool:
    """Whether a node is a loss of log_softmax over the classes, which nothing else reads."""
    node = loss.args[0] if loss.target in _LOSSES else None
    if not isinstance(node, Node) or node.target not in _LOGS or len(node.users) != 1:
        return False
    rank = node.meta["val"].dim()
    source = node.args[0]
    assert isinstance(source, Node)
    same = source.meta["val"].dtype == node.meta["val"].dtype
    classes = 0 if rank == 1 else 1
    return same and position(argument(node, 1, "dim"), rank) == classes
