"""The module tree of a graph, with neighbours that are alike in one run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotp import axes as ax
from autotp.graphs.arguments import Operand
from autotp.graphs.select import is_below
from autotp.graphs.values import Value, View


@dataclass(frozen=True)
class Module:
    """A module that computes something, or has such below it. `run` is the first path of the run
    of alike neighbours that it is in; empty where it is alone."""

    path: str
    kind: str
    run: str


def modules(view: View) -> list[Module]:
    """Every module of the graph, parents first, in the order in which they compute."""
    kinds: dict[str, str] = {"": ""}
    inside: dict[str, list[Value]] = {}
    for value in view.values:
        if value.role == "size":
            continue
        for path in _with_parents(value.module):
            kinds.setdefault(path, "")
            inside.setdefault(path, []).append(value)
        if value.kind:
            kinds[value.module] = value.kind
    runs = _runs(kinds, inside)
    return [Module(path, kind, runs.get(path, "")) for path, kind in kinds.items()]


def _with_parents(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    yield from (".".join(parts[:n]) for n in range(len(parts) + 1))


def _runs(kinds: Mapping[str, str], inside: Mapping[str, Sequence[Value]]) -> dict[str, str]:
    """For each member of a run of two and more alike numbered neighbours the run's first path."""
    found: dict[str, list[str]] = {}
    last: dict[str, tuple[str, Any]] = {}  # of each parent: the run, and what its members are
    for path in kinds:
        parent, _, name = path.rpartition(".")
        if not name.isdigit():
            continue
        looks = _looks(path, inside[path])
        if parent in last and last[parent][1] == looks:
            found[last[parent][0]].append(path)
        else:
            last[parent] = (path, looks)
            found[path] = [path]
    return {path: first for first, run in found.items() if len(run) > 1 for path in run}


def _looks(module: str, values: Sequence[Value]) -> Any:
    """All facts about a module's values without the names that differ between layers."""
    numbers: dict[str, int] = {}
    axes: dict[str, str] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    def axis(text: str) -> str:
        return re.sub(r"[a-z]+\d+", lambda m: axes.setdefault(m.group(), f"x{len(axes)}"), text)

    return [
        (
            number(value.name),
            value.role,
            _relative(value.operator, module),
            [number(p.name) if isinstance(p, Operand) else p for p in value.arguments],
            _relative(value.module, module),
            value.kind,
            value.source,
            value.shape,
            [axis(str(dim)) for dim in value.dims],
            (value.placement, value.pair, value.part, value.dtype),
        )
        for value in values
    ]


def _relative(path: str, module: str) -> str:
    return path[len(module) :] if is_below(path, module) else path


def tree(dim: ax.Dim, shares: Mapping[str, Any]) -> Any:
    """A dim for the page: numbers, names of axes, `["*", ...]` and `["+", ...]`."""
    match dim:
        case ax.Axis(name, count):
            return name if name in shares or count is None else count
        case ax.Product(parts):
            return ["*", *(tree(part, shares) for part in parts)]
        case ax.Sum(parts):
            return ["+", *(tree(part, shares) for part in parts)]
