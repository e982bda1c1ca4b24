"""A causal mask that is written out becomes the causal flag, or goes if it hides nothing.

before  %le : le(%keys, %queries)       arange(s) along keys, arange(s) along queries
        %mask : expand(%le, [b, -1, s, s])
        %y : scaled_dot_product_attention(%q, %k, %v, %mask)
after   %y : scaled_dot_product_attention(%q, %k, %v, None, 0.0, True)

The flag lets kernels skip half of the work, and a decoded token needs no mask at all: its one query
sees every key. Only masks made by counting are read (`autotp.counting`): `k <= q + offset` with
sizes that are equal for every batch and length, also where a model first finds out from its own
positions that a batch holds no packed sequences. Padding, windows and anything else stay.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.counting import Causal, Counted, counted
from autotp.program import Program, copied, written
from autotp.rules.context import argument
from autotp.runtime.regions import SIDE_EFFECTS

aten = torch.ops.aten


def unmask(program: Program) -> Program:
    """The program without the masks that a flag says, or that say nothing."""
    flags = _flags(program.graph)
    if not flags:
        return program
    graph = copied(program.graph)
    for old, node in zip(program.graph.nodes, graph.nodes, strict=True):
        if old in flags:
            names = ("attn_mask", "dropout_p", "is_causal")
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in names}
            node.args = (*node.args[:3], None, argument(old, 4, "dropout_p", 0.0), flags[old])
    graph.eliminate_dead_code(lambda n: n.is_impure() or n.target in SIDE_EFFECTS)
    note = f"{len(flags)} causal masks became a flag or went"
    return replace(program, graph=graph, provenance=(*program.provenance, note))


def _flags(graph: Graph) -> dict[Node, bool]:
    """The attentions whose mask a flag says, with the flag."""
    found: dict[Node, bool] = {}
    known: dict[Node, Counted] = {}
    changed = written(graph)
    for node in graph.nodes:
        value = counted(node, known) if node.op == "call_function" else None
        if value is not None and node not in changed:
            known[node] = value
        if node.target is aten.scaled_dot_product_attention.default:
            flag = _flag(node, known)
            if flag is not None:
                found[node] = flag
    return found


def _flag(node: Node, known: dict[Node, Counted]) -> bool | None:
    """Whether an attention's mask is causal or hides nothing; None: neither, or not known."""
    mask = argument(node, 3, "attn_mask")
    found = known.get(mask) if isinstance(mask, Node) else None
    if not isinstance(found, Causal) or argument(node, 5, "is_causal", False):
        return None
    queries, keys = (node.args[i].meta["val"].shape[-2] for i in (0, 1))  # type: ignore[union-attr]
    spare = sizes.constant(found.offset - keys + 1)
    if spare is not None and spare >= 0:
        return False  # the first query sees the last key
    if sizes.constant(found.offset) == 0 and sizes.constant(queries - keys) == 0:
        return True
    return None
