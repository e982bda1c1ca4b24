"""Every axis that matrix products make and contract is a GEMM pair, with the reason if it is barred.

before  heads0: columns of qkv.weight, batch of an attention, contracted with out.weight
after   GemmPair(kind="attention", columns=("qkv.weight",), rows=("out.weight",))

A pair is a fact about an axis, not a pattern of nodes: some products with a parameter produce the
axis (column-parallel), others contract it (row-parallel; Shoeybi et al. 2019, section 3). What lies
between does not matter, as long as no operator barred the axis.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch.fx import Node

from autotp.axes import leaves
from autotp.program import Program
from autotp.rules import Use
from autotp.unify import Bar
from passes.infer import Inferred


@dataclass(frozen=True)
class GemmPair:
    """One axis with the parameters that produce it and those that contract it."""

    axis: str
    units: int
    kind: str  # attention, mlp, or value (the head size of values alone)
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    bar: Bar | None


def match(program: Program, inferred: Inferred) -> tuple[GemmPair, ...]:
    """All axes that are column-parallel somewhere and row-parallel somewhere, in graph order."""
    gemms = {u.node: _parameter(program, u.operand) for u in inferred.uses if u.kind == "gemm"}
    columns: dict[str, dict[str, None]] = defaultdict(dict)
    rows: dict[str, dict[str, None]] = defaultdict(dict)
    roles: dict[str, set[str]] = defaultdict(set)
    units: dict[str, int] = {}
    for use, dim in zip(inferred.uses, inferred.use_dims, strict=True):
        weight = gemms.get(use.node) if use.kind in ("gemm", "contract") else None
        for axis in leaves(dim):
            if axis.size is not None:
                units.setdefault(axis.name, axis.size)
                roles[axis.name].add(_role(program, use, weight))
                if use.kind == "gemm" and weight:
                    columns[axis.name][weight] = None
                elif use.kind == "contract" and weight:
                    rows[axis.name][weight] = None
    return tuple(
        GemmPair(
            axis,
            units[axis],
            _kind(roles[axis]),
            tuple(columns[axis]),
            tuple(rows[axis]),
            inferred.bars.get(axis),
        )
        for axis in units
        if columns[axis] and rows[axis]
    )


def _role(program: Program, use: Use, weight: str | None) -> str:
    if use.kind == "gemm":
        return "column" if weight else "value"
    if use.kind == "attend":
        return "batch" if _parameter(program, use.operand) else "attend"
    return use.kind


def _kind(roles: set[str]) -> str:
    if "attend" in roles:
        return "attention"
    return "value" if "value" in roles else "mlp"


def _parameter(program: Program, node: Node | None) -> str | None:
    """The parameter that an operand is a view of, if it is."""
    while node is not None and node.op == "call_function":
        sources = [n for n in node.all_input_nodes if "val" in n.meta]
        node = sources[0] if len(sources) == 1 else None
    if node is None or node.op != "get_attr":
        return None
    name = str(node.target)
    return name if program.tensors[name].kind == "parameter" else None
