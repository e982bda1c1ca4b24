"""Every axis that matrix products make and contract is a GEMM pair, with the reason if it is
barred.

before  heads0: columns of qkv.weight, batch of an attention, contracted with out.weight
after   GemmPair(kind="attention", columns=("qkv.weight",), rows=("out.weight",))

A pair is a fact about an axis, not a pattern of nodes: some products with a parameter produce the
axis (column-parallel), others contract it (row-parallel; Shoeybi et al. 2019, section 3). What lies
between does not matter, as long as no operator barred the axis. The vocabulary is the third pair:
the head produces it, and the embedding table is looked up along it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from autotp.axes import leaves
from autotp.program import Program
from autotp.rules import Use, name
from autotp.unify import Bar
from passes.infer import Inferred


@dataclass(frozen=True)
class GemmPair:
    """One axis with the parameters that produce it and those that contract it."""

    axis: str
    units: int
    kind: str  # attention, mlp, vocabulary, input, or value (the head size of values alone)
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    bar: Bar | None


def match(program: Program, inferred: Inferred) -> tuple[GemmPair, ...]:
    """All axes that are column-parallel somewhere and row-parallel somewhere, in graph order."""
    gemms = {u.node: program.parameter(u.operand) for u in inferred.uses if u.kind == "gemm"}
    columns: dict[str, dict[str, None]] = defaultdict(dict)
    rows: dict[str, dict[str, None]] = defaultdict(dict)
    roles: dict[str, set[str]] = defaultdict(set)
    tables: dict[str, dict[str, None]] = defaultdict(dict)
    parts: set[str] = set()  # axes along which a whole input is taken in parts
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
                elif use.kind == "part":
                    parts.add(axis.name)
                elif use.kind == "lookup" and (table := program.parameter(use.operand)):
                    tables[axis.name][table] = None
    norms = _norms(inferred)
    vocabulary = _vocabulary(units, columns, rows, tables)
    pairs = []
    for axis_name, count in units.items():
        kind = "vocabulary" if axis_name in vocabulary else _kind(roles[axis_name])
        if axis_name in parts and not columns[axis_name]:
            kind = "input"
        readers = tables[axis_name] if axis_name in vocabulary else rows[axis_name]
        made = columns[axis_name] or kind == "input"
        if axis_name in vocabulary or (made and rows[axis_name]):
            bar = inferred.bars.get(axis_name)
            if kind != "attention":  # heads are worth an all-reduce for a norm across them
                bar = bar or norms.get(axis_name)
            pairs.append(
                GemmPair(axis_name, count, kind, tuple(columns[axis_name]), tuple(readers), bar)
            )
    return tuple(pairs)


def _norms(inferred: Inferred) -> dict[str, Bar]:
    """Axes that some norm takes the mean over."""
    return {
        axis.name: Bar(f"{name(use.node)} reduces over it", use.node.name)
        for use, dim in zip(inferred.uses, inferred.use_dims, strict=True)
        if use.kind == "norm"
        for axis in leaves(dim)
    }


def _vocabulary(
    units: Mapping[str, int],
    columns: Mapping[str, Mapping[str, None]],
    rows: Mapping[str, Mapping[str, None]],
    tables: Mapping[str, Mapping[str, None]],
) -> set[str]:
    """Axes that a table is looked up along and an output head produces: one axis where the two are
    tied, else two of the same size. A table that no head matches (positions) is not among them."""
    looked_up = {axis for axis in units if tables[axis] and not rows[axis]}
    produced = {axis for axis in units if columns[axis] and not rows[axis]}
    sizes = {units[axis] for axis in looked_up} & {units[axis] for axis in produced}
    tied = {axis for axis in looked_up & produced}
    done = {units[axis] for axis in tied}
    return tied | {a for a in looked_up | produced if units[a] in sizes - done}


def _role(program: Program, use: Use, weight: str | None) -> str:
    if use.kind == "gemm":
        return "column" if weight else "value"
    if use.kind == "attend":
        return "batch" if program.parameter(use.operand) else "attend"
    return use.kind


def _kind(roles: set[str]) -> str:
    if "attend" in roles:
        return "attention"
    return "value" if "value" in roles else "mlp"
