"""Plan: what is sharded over the ranks, how, and why the rest is not. Text, JSON and graphs of
it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotp import axes as ax
from autotp.axes import Bounds, Dim, Ranges
from autotp.errors import PlanError, message
from autotp.reading import check

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from autotp.program import Program

FORMAT = 1


@dataclass(frozen=True)
class ShardedAxis:
    """One logical axis that is split, and the GEMM pair that it makes."""

    name: str
    kind: str  # attention, mlp, vocabulary or input
    units: int
    bounds: Bounds
    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Units on each rank."""
        return tuple(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))


@dataclass(frozen=True)
class TensorShard:
    """How a parameter or buffer lies on the ranks: the tree of each of its dims."""

    name: str
    kind: str  # parameter, buffer or constant
    dtype: str
    dims: tuple[Dim, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        return tuple(ax.size(dim) or 0 for dim in self.dims)


@dataclass(frozen=True)
class Kept:
    """A parameter that stays whole on every rank, and why: the node that barred it, if any."""

    name: str
    reason: str
    node: str
    source: str


@dataclass(frozen=True)
class WholeAxis:
    """An axis that is not split, and why: the node that barred it, and the GEMM pair that it would
    have been, if any."""

    reason: str
    node: str
    kind: str = ""
    units: int = 0
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What inference found, by the axes' own names: the dims of every captured value (a list where
    a node returns several), and the axes that may not be split."""

    dims: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, WholeAxis] = field(default_factory=dict)


@dataclass(frozen=True)
class Collectives:
    """Collectives of one call: all-reduces of activations, gathers of values that leave the module
    and of held parameters, all-reduces of a loss on split logits (a few numbers a token), and, in
    the backward pass, gathers of gradients of inputs that are taken in parts and all-reduces of the
    gradients of the norms' parameters between f and parallel branches.

    With sequence parallelism: reduce-scatters instead of g; gathers of slices for regions, and for
    operators that need the whole; and those of the backward pass."""

    forward: int = 0
    backward: int = 0
    gathers: int = 0
    loss: int = 0
    parts: int = 0
    parameters: int = 0
    reduce_scatters: int = 0
    sequence_gathers: int = 0
    sequence_wholes: int = 0
    backward_reduce_scatters: int = 0
    backward_sequence_gathers: int = 0


@dataclass(frozen=True)
class Plan:
    """The decisions for one model and one number of ranks. The same on every rank.

    Made by `autotp.plan`; `to_json` and `from_json` are inverse. A plan that was read from JSON has
    no graph until `autotp.plan(model, plan=...)` gives it one.
    """

    model: str
    tp: int
    axes: tuple[ShardedAxis, ...]
    tensors: tuple[TensorShard, ...]
    kept: tuple[Kept, ...]
    collectives: Collectives = Collectives()
    names: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    stages: tuple[tuple[str, Program], ...] = field(default=(), compare=False, repr=False)
    held: tuple[str, ...] = ()  # tensors that lie split and are gathered for each call
    facts: Facts = field(default=Facts(), compare=False, repr=False)

    # ---- facts

    @cached_property
    def shares(self) -> dict[str, Bounds]:
        """Bounds of every sharded axis."""
        return {axis.name: axis.bounds for axis in self.axes}

    @cached_property
    def by_name(self) -> dict[str, TensorShard]:
        """Tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    def ranges(self, name: str, rank: int) -> tuple[Ranges, ...]:
        """For each dim of a tensor, the positions of the whole that the rank holds, in order."""
        return tuple(ax.ranges(dim, self.shares, rank) for dim in self.by_name[name].dims)

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """The shape of a tensor on a rank."""
        dims = self.by_name[name].dims
        return tuple(ax.local_size(dim, self.shares, rank) or 0 for dim in dims)

    def is_sharded(self, name: str) -> bool:
        """Whether the ranks hold different parts of a tensor."""
        return any(ax.is_sharded(dim, self.shares) for dim in self.by_name[name].dims)

    def parameters(self, rank: int) -> int:
        """Number of parameters on a rank."""
        return sum(
            torch.Size(self.local_shape(t.name, rank)).numel()
            for t in self.tensors
            if t.kind == "parameter"
        )

    def parameter_bytes(self, rank: int) -> int:
        """Bytes of the parameters on a rank."""
        return sum(
            torch.Size(self.local_shape(t.name, rank)).numel() * _itemsize(t.dtype)
            for t in self.tensors
            if t.kind == "parameter"
        )

    @property
    def fingerprint(self) -> str:
        """A hash of all that ranks must agree on."""
        data = self.data()
        del data["kept"]  # holds source lines, which may differ between machines
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    # ---- graphs

    def program(self) -> Program:
        """The whole graph with f and g; rank-specific sizes are not in it yet."""
        if not self.stages:
            raise PlanError(
                message(
                    "this plan has no graph",
                    values=f"plan of {self.model}, tp={self.tp}",
                    because="it was read from JSON, which holds decisions only",
                    try_="autotp.plan(model, plan=plan)",
                )
            )
        return self.stages[-1][1]

    def graph(self, rank: int) -> GraphModule:
        """The rank's graph, with f, g and local sizes; `print_readable()` shows placements."""
        from autotp.pipeline import rank_graph

        return rank_graph(self, rank)

    def regions(self) -> list[list[str]]:
        """The values between an f and its g: every connected set of sharded or partial values."""
        from autotp.network import regions

        return regions(self.program().graph)

    def explain(self, name: str) -> str:
        """Why a parameter or buffer is split as it is, or what barred it, in a few sentences.

        Raises PlanError with near names if there is no tensor of this name.
        """
        from autotp.explaining import explain

        return explain(self, name)

    def dump(self, directory: str | Path) -> None:
        """Write plan.txt, plan.json, the graph of each stage and rank, and the graph as GraphML."""
        from autotp.network import write_graphml
        from autotp.printing import program_text

        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / "plan.txt").write_text(f"{self}\n", encoding="utf-8")
        (path / "plan.json").write_text(self.to_json(), encoding="utf-8")
        for number, (stage, program) in enumerate(self.stages):
            text = program_text(program.graph)
            (path / f"{number}_{stage}.py").write_text(text, encoding="utf-8")
        for rank in range(self.tp):
            text = program_text(self.graph(rank).graph)
            (path / f"rank{rank}.py").write_text(text, encoding="utf-8")
        write_graphml(self.program().graph, path / "inserted.graphml")

    # ---- text

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.data(), indent=1)

    def data(self) -> dict[str, Any]:
        """The plan as plain lists and dicts, as JSON has them."""
        return {
            "format": FORMAT,
            "model": self.model,
            "tp": self.tp,
            "axes": [vars(axis) for axis in self.axes],
            "tensors": [
                {
                    "name": t.name,
                    "kind": t.kind,
                    "dtype": t.dtype,
                    "dims": [ax.to_json(d) for d in t.dims],
                }
                for t in self.tensors
            ],
            "kept": [vars(kept) for kept in self.kept],
            "collectives": vars(self.collectives),
        }

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; PlanError names what is wrong with the text."""
        try:
            data = json.loads(text)
            if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
                raise ValueError(f"format {data['format']}, this version reads {FORMAT}")
            check(data)
            plan = cls(
                data["model"],
                data["tp"],
                tuple(ShardedAxis(**_tuples(axis)) for axis in data["axes"]),
                tuple(
                    TensorShard(
                        t["name"], t["kind"], t["dtype"], tuple(ax.from_json(d) for d in t["dims"])
                    )
                    for t in data["tensors"]
                ),
                tuple(Kept(**kept) for kept in data["kept"]),
                Collectives(**data["collectives"]),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise PlanError(
                message(
                    "this is not a plan",
                    values=f"{len(text)} characters",
                    because=f"{type(error).__name__}: {error}",
                    try_="a file that plan.to_json() or plan.dump() wrote",
                )
            ) from error
        return plan

    def with_stages(self, stages: Sequence[tuple[str, Program]], counts: Collectives) -> Plan:
        """The plan with the programs that its passes made."""
        return replace(self, stages=tuple(stages), collectives=counts)


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found.itemsize


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}


def _text(plan: Plan) -> list[str]:
    heads = ("axis", "units", "on each rank", "kind", "column-parallel", "row-parallel")
    rows = [heads]
    for group in _alike(plan.axes):
        axis, count = group[0], len(group)
        name = axis.name if count == 1 else f"{axis.name}..{group[-1].name}"
        widths = _runs(axis.widths)
        columns = ", ".join(
            _common([a.columns[i] for a in group]) for i in range(len(axis.columns))
        )
        rows_ = ", ".join(_common([a.rows[i] for a in group]) for i in range(len(axis.rows)))
        rows.append((name, str(axis.units), widths, axis.kind, columns, rows_))
    counts = plan.collectives
    lines = [f"plan of {plan.model} for tp={plan.tp}"]
    if plan.axes:
        widths_ = [max(len(row[i]) for row in rows) for i in range(len(heads))]
        lines += [
            "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths_, strict=True)).rstrip()
            for row in rows
        ]
    else:
        lines.append("  nothing is split")
    gathers = f", {counts.gathers} to gather outputs" if counts.gathers else ""
    gathers = (f", {counts.loss} small ones of the loss" if counts.loss else "") + gathers
    lines.append(
        f"all-reduces per call: {counts.forward} forward (g), "
        f"{counts.backward} backward (f){gathers}"
        + (f"; {counts.parameters} small ones backward of norms" if counts.parameters else "")
        + (f"; {counts.parts} gathers backward of inputs in parts" if counts.parts else "")
    )
    if counts.reduce_scatters:
        gathered = counts.sequence_gathers + counts.sequence_wholes
        lines.append(
            f"sequence in slices: {counts.reduce_scatters} reduce-scatters and {gathered} "
            f"all-gathers forward, {counts.backward_reduce_scatters} and "
            f"{counts.backward_sequence_gathers} backward"
        )
    sizes = [plan.parameters(rank) for rank in range(plan.tp)]
    total = sum(torch.Size(t.shape).numel() for t in plan.tensors if t.kind == "parameter")
    lines.append(f"parameters per rank: {_runs([f'{s:,}' for s in sizes])} of {total:,}")
    if plan.kept:
        lines.append("whole on every rank:")
    for reason, names in _by_reason(plan.kept).items():
        lines.append(f"  {', '.join(names)}")
        lines.append(f"    {reason}")
    return lines


def _alike(axes: Sequence[ShardedAxis]) -> list[list[ShardedAxis]]:
    """Axes that differ in layer numbers only, in order."""
    groups: dict[Any, list[ShardedAxis]] = {}
    for axis in axes:
        pattern = [re.sub(r"\d+", "#", name) for name in (*axis.columns, "", *axis.rows)]
        groups.setdefault((axis.kind, axis.bounds, *pattern), []).append(axis)
    return list(groups.values())


def _common(names: Sequence[str], whole: bool = False) -> str:
    """`h.{0..11}.attn` for names that differ in numbers; `.weight` is left out unless `whole`."""
    names = [name if whole else name.removesuffix(".weight") for name in names]
    first, last = (re.split(r"(\d+)", name) for name in (names[0], names[-1]))
    if len(first) != len(last):
        return f"{names[0]} .. {names[-1]}"
    return "".join(a if a == b else f"{{{a}..{b}}}" for a, b in zip(first, last, strict=True))


def _runs(values: Sequence[Any]) -> str:
    """`2 2 1 1`, or `384 x8` where all are the same."""
    if len(values) > 2 and len(set(values)) == 1:
        return f"{values[0]} x{len(values)}"
    return " ".join(str(value) for value in values)


def _by_reason(kept: Sequence[Kept]) -> dict[str, list[str]]:
    """Parameters that stay whole, folded over layers, by the reason and source line."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for item in kept:
        key = (item.reason, item.source.split(":")[0])
        pattern = re.sub(r"\d+", "#", item.name)
        found.setdefault(key, {}).setdefault(pattern, []).append(item.name)
    result: dict[str, list[str]] = {}
    for (reason, _), patterns in found.items():
        example = next(k for k in kept if k.reason == reason)
        where = f" ({example.node}, {example.source})" if example.source else ""
        result[reason + where] = [_common(names, whole=True) for names in patterns.values()]
    return result
