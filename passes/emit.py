"""One flat graph becomes a graph for every module call, so that the result has the model's
hierarchy.

before  %linear_7 = linear(%f, h.1.mlp.up.weight)     calls: h.1, h.1.mlp, h.1.mlp.up
after   h.1.mlp.up:  linear = linear(f, self.weight)
        h.1.mlp:     up = self.up(f)

Names inside a block do not count layers, so identical blocks have identical code and share one
compiled function. A call whose operators do not follow each other is written out in its caller.
Nothing is decided here.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node, map_arg

from autotp.program import Program
from autotp.runtime import vocabulary
from autotp.runtime.collectives import (
    copy_all_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)
from autotp.runtime.folded import column_product, copy_each_to_region, row_product
from autotp.runtime.random import draw, next_seed
from autotp.runtime.sequence import (
    gather_from_sequence,
    gather_sequence_to_region,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
)

_WITH_GROUP = {
    column_product,
    copy_all_to_region,
    copy_each_to_region,
    copy_to_region,
    draw,
    gather_from_region,
    gather_from_sequence,
    gather_sequence_to_region,
    next_seed,
    reduce_from_region,
    reduce_scatter_to_sequence,
    row_product,
    scatter_to_region,
    scatter_to_sequence,
    vocabulary.cross_entropy,
    vocabulary.embedding,
}


@dataclass(frozen=True)
class Emitted:
    """Graphs by module path, in the order of calls; the root's own graph is the last of ""."""

    graphs: Mapping[str, tuple[Graph, ...]]


def emit(
    program: Program,
    *,
    first: Mapping[str, int] | None = None,
    same: Mapping[str, str] | None = None,
) -> Emitted:
    """Cut a program into module calls.

    `first` gives the number of graphs that each module has from earlier captures: a call passes the
    number of the graph that it wants. `same` gives the first path of a module that has several.
    """
    builder = _Builder(program, first or {}, same or {})
    nodes = [n for n in program.graph.nodes if n.op not in ("get_attr", "output")]
    builder.block("", nodes, 0)
    return Emitted({path: tuple(graphs) for path, graphs in builder.graphs.items()})


class _Builder:
    def __init__(self, program: Program, first: Mapping[str, int], same: Mapping[str, str]) -> None:
        self.graphs: dict[str, list[Graph]] = {}
        self._first, self._same = first, same
        self._program = program
        self._names: dict[str, list[str]] = {name: [name] for name in program.tensors}
        for alias, name in program.aliases.items():
            self._names[name].append(alias)
        self._output = next(iter(reversed(program.graph.nodes)))

    def block(
        self, path: str, nodes: Sequence[Node], depth: int
    ) -> tuple[int, list[Node], list[Node]]:
        """Make the graph of one module call; returns its number, inputs and outputs."""
        inside = set(nodes)
        if depth == 0:
            outputs: list[Node] = []
        else:
            outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        graph, env, inputs = Graph(), dict[Node, Node](), list[Node]()

        def value(node: Node) -> Node:
            if node not in env:
                rel = self._relative(node, path)
                if rel is not None:
                    env[node] = graph.create_node("get_attr", rel, name=_plain(rel))
                else:
                    env[node] = graph.create_node("placeholder", "x", name="x")
                    env[node].target = env[node].name  # the graph makes names unique
                    inputs.append(node)
            return env[node]

        if depth == 0:
            for node in nodes:
                if node.op == "placeholder":
                    env[node] = graph.placeholder(node.name)
        bodies = [node for node in nodes if node.op != "placeholder"]
        segments = _segments(bodies, depth, path)
        needed = [self._outside(part, key, depth, path) for key, part in segments]
        for (key, part), child in zip(segments, needed, strict=True):
            if child is None:
                for node in part:
                    env[node] = self._copy(graph, node, value)
                continue
            number, given, made = child
            target = _below(_path(key or ""), path)
            assert target is not None
            operands = tuple(value(node) for node in given)
            call = graph.create_node("call_module", target, operands, {"_graph": number})
            if len(made) == 1:
                env[made[0]] = call
            else:
                for i, node in enumerate(made):
                    env[node] = graph.create_node(
                        "call_function", operator.getitem, (call, i), name=_plain(node.name)
                    )
        if depth == 0:
            graph.output(map_arg(self._output.args[0], value))
        else:
            found = tuple(env[node] for node in outputs)
            graph.output(found[0] if len(found) == 1 else found)
        _placeholders_first(graph)
        home = self._same.get(path, path)
        graphs = self.graphs.setdefault(home, [])
        graphs.append(graph)
        return self._first.get(home, 0) + len(graphs) - 1, inputs, outputs

    def _outside(self, part: list[Node], key: str | None, depth: int, path: str) -> Any:
        if key is None or _below(_path(key), path) is None:
            return None
        return self.block(_path(key), part, depth + 1)

    def _relative(self, node: Node, path: str) -> str | None:
        if node.op != "get_attr":
            return None
        for name in self._names[str(node.target)]:
            rel = _below(name, path)
            if rel is not None:
                return rel
        return None

    def _copy(self, graph: Graph, node: Node, value: Any) -> Node:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), value)
        if node.target in _WITH_GROUP:
            group = next(
                (n for n in graph.nodes if n.op == "get_attr" and n.target == "_tp_group"), None
            )
            if group is None:
                group = graph.create_node("get_attr", "_tp_group", name="group")
            kwargs = {**kwargs, "group": group}
        made = graph.create_node(node.op, node.target, args, kwargs, name=_plain(node.name))
        made.meta = dict(node.meta)
        return made


def _segments(nodes: Sequence[Node], depth: int, path: str) -> list[tuple[str | None, list[Node]]]:
    """Runs of nodes in the same call one level down; None for the module's own operators."""
    runs: list[tuple[str | None, list[Node]]] = []
    for node in nodes:
        calls = node.meta.get("calls") or ()
        key = calls[depth][0] if len(calls) > depth else None
        if runs and runs[-1][0] == key:
            runs[-1][1].append(node)
        else:
            runs.append((key, [node]))
    counts = Counter(key for key, _ in runs)
    return [(key if counts[key] == 1 else None, part) for key, part in runs]


def _path(key: str) -> str:
    return key.split("@")[0]


def _below(name: str, path: str) -> str | None:
    """A name relative to a module path; None if it is not below it."""
    if not path:
        return name
    return name[len(path) + 1 :] if name.startswith(path + ".") else None


def _plain(name: str) -> str:
    """A name without the numbers that count layers and calls."""
    return re.sub(r"(_\d+)+$", "", name.replace(".", "_")) or "value"


def _placeholders_first(graph: Graph) -> None:
    """Placeholders were made where they were first needed; a function has them at its head."""
    body = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node in list(graph.nodes):
        if node.op == "placeholder" and body is not None:
            body.prepend(node)
