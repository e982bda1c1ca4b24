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
from autotp.program import Program, written
from autotp.rules.context import argument
from autotp.runtime.regions import SIDE_EFFECTS

aten = torch.ops.aten


def unmask(program: Program) -> Program:
    """The program without the masks that a flag says, or that say nothing."""
    graph, new, count = Graph(), dict[Node, Node](), 0
    known: dict[Node, Counted] = {}
    changed = written(program.graph)
    for node in program.graph.nodes:
        made = graph.node_copy(node, lambda n: new[n])
        made.meta = dict(node.meta)
        new[node] = made
        found = counted(node, known) if node.op == "call_function" else None
        if found is not None and node not in changed:
            known[node] = found
        if node.target is aten.scaled_dot_product_attention.default:
            count += _flag(node, made, known)
    if not count:
        return program
    graph.eliminate_dead_code(lambda n: n.is_impure() or n.target in SIDE_EFFECTS)
    note = f"{count} causal masks became a flag or went"
    return replace(program, graph=graph, provenance=(*program.provenance, note))


def _flag(node: Node, made: Node, known: dict[Node, Counted]) -> bool:
    """Change an attention whose mask a flag says; whether that was done."""
    mask, dropout = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", 0.0)
    causal = argument(node, 5, "is_causal", False)
    found = known.get(mask) if isinstance(mask, Node) else None
    if not isinstance(found, Causal) or causal:
        return False
    queries, keys = (node.args[i].meta["val"].shape[-2] for i in (0, 1))  # type: ignore[union-attr]
    spare = sizes.constant(found.offset - keys + 1)
    if spare is not None and spare >= 0:
        causal = False  # the first query sees the last key
    elif sizes.constant(found.offset) == 0 and sizes.constant(queries - keys) == 0:
        causal = True
    else:
        return False
    names = ("attn_mask", "dropout_p", "is_causal")
    made.kwargs = {k: v for k, v in made.kwargs.items() if k not in names}
    made.args = (*made.args[:3], None, dropout, causal)
    return True
