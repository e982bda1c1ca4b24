"""A causal mask that is written out becomes the causal flag, or goes if it hides nothing.

before  %le : le(%keys, %queries)       arange(s) along keys, arange(s) along queries
        %mask : expand(%le, [b, -1, s, s])
        %y : scaled_dot_product_attention(%q, %k, %v, %mask)
after   %y : scaled_dot_product_attention(%q, %k, %v, None, 0.0, True)

The flag lets kernels skip half of the work, and a decoded token needs no mask at all: its one query
sees every key. Only masks made of positions alone are read: `k <= q + offset` with sizes that are
equal for every batch and length. Padding, windows and anything else stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autotp import sizes
from autotp.program import Program
from autotp.rules.context import argument
from autotp.runtime.regions import SIDE_EFFECTS

aten = torch.ops.aten
_EXACT = (torch.int64, torch.int32)
_SAME = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.expand.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
}


@dataclass(frozen=True)
class Positions:
    """A tensor of integers that count along one dim (from the right) and begin at `start`."""

    dim: int
    start: Any


@dataclass(frozen=True)
class Causal:
    """A tensor that says of each pair of query and key whether key <= query + offset."""

    offset: Any


def unmask(program: Program) -> Program:
    """The program without the masks that a flag says, or that say nothing."""
    graph, new, count = Graph(), dict[Node, Node](), 0
    known: dict[Node, Positions | Causal] = {}
    written = _written(program.graph)
    for node in program.graph.nodes:
        made = graph.node_copy(node, lambda n: new[n])
        made.meta = dict(node.meta)
        new[node] = made
        found = _read(node, known) if node.op == "call_function" else None
        if found is not None and node not in written:
            known[node] = found
        if node.target is aten.scaled_dot_product_attention.default:
            count += _flag(node, made, known)
    if not count:
        return program
    graph.eliminate_dead_code(lambda n: n.is_impure() or n.target in SIDE_EFFECTS)
    note = f"{count} causal masks became a flag or went"
    return replace(program, graph=graph, provenance=(*program.provenance, note))


def _written(graph: Graph) -> set[Node]:
    """Values that an operator writes to, or to a view of them."""
    found: set[Node] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        source = node.args[0] if schema is not None and schema.is_mutable and node.args else None
        while isinstance(source, Node) and source not in found:
            found.add(source)
            source = source.args[0] if source.args else None
    return found


def _read(node: Node, known: dict[Node, Positions | Causal]) -> Positions | Causal | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    first = node.args[0] if node.args else None
    source = known.get(first) if isinstance(first, Node) else None
    match node.target:
        case aten.arange.default if not value.is_floating_point():
            return Positions(-1, 0)
        case aten.arange.start if not value.is_floating_point():
            begin = _number(node.args[0])
            return None if begin is None else Positions(-1, begin)
        case aten.add.Tensor | aten.sub.Tensor if isinstance(source, Positions):
            step = _number(node.args[1])
            if step is None or node.kwargs or value.is_floating_point():
                return None
            step = step if node.target is aten.add.Tensor else -step
            return replace(source, start=source.start + step)
        case aten.unsqueeze.default if isinstance(source, Positions):
            at = node.args[1]
            assert isinstance(at, int)
            from_right = at - value.dim() if at >= 0 else at
            return replace(source, dim=source.dim - (from_right >= source.dim))
        case aten.le.Tensor | aten.ge.Tensor:
            return _compare(node, known)
        case target if target in _SAME and source is not None:
            causal = isinstance(source, Causal)
            exact = value.dtype is torch.bool if causal else value.dtype in _EXACT
            return source if exact else None
    return None


def _compare(node: Node, known: dict[Node, Positions | Causal]) -> Causal | None:
    left, right = (known.get(arg) if isinstance(arg, Node) else None for arg in node.args[:2])
    if node.target is aten.ge.Tensor:
        left, right = right, left
    if not isinstance(left, Positions) or not isinstance(right, Positions):
        return None
    if (left.dim, right.dim) != (-1, -2):
        return None
    return Causal(right.start - left.start)


def _number(value: Any) -> Any:
    """An integer, or the symbolic one that a node stands for."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    return value if whole else None


def _flag(node: Node, made: Node, known: dict[Node, Positions | Causal]) -> bool:
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
