"""Blocks that were not traced, written out in the new graph like those that they follow.

before  enter(%x), %linear(h.0.w), leave      %stamped("h.2")
after   %linear(h.0.w)                        %linear_2(h.2.w)

The other half of `autotp.blocks`, used by `passes.capture` while it copies an exported graph.
Operands and results of traced blocks are nodes of their own until the end, so that what a block
reads or gives away otherwise is seen, and refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autotp.blocks import NotAlike, Stamps, within
from autotp.program import is_new, mutates

ENTER = torch.ops.tp_capture.enter.default
LEAVE = torch.ops.tp_capture.leave.default
STAMPED = torch.ops.tp_capture.stamped.default
MARKS = {ENTER, LEAVE, STAMPED}
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
_SIZES = {torch.ops.aten.sym_size.int, torch.sym_max, torch.sym_min, *_ARITHMETIC}


@dataclass
class _Block:
    """A traced block in the new graph: its operands, operators and results, in order."""

    leaves: list[Node] = field(default_factory=list)
    body: list[Node] = field(default_factory=list)
    results: list[Node] = field(default_factory=list)


class Stamping:
    """Takes the marks of traced blocks in the order of the graph, and writes out the others."""

    def __init__(
        self, graph: Graph, skeleton: nn.Module, aliases: Mapping[str, str], stamps: Stamps
    ) -> None:
        self._graph = graph
        self._skeleton = skeleton
        self._aliases = aliases
        self._stamps = stamps
        self._blocks: dict[str, _Block] = {}
        self._written: dict[str, list[Node]] = {}

    def mark(self, node: Node, value: Node, path: str, origin: dict[str, Any]) -> Node:
        """A node for an operand or a result of a traced block, until the end."""
        block = self._blocks.setdefault(path, _Block())
        if node.target is LEAVE and not block.results:
            last = block.leaves[-1].next
            while last.op != "root":
                block.body.append(last)
                last = last.next
        made = self._graph.call_function(node.target, (value, path))  # type: ignore[arg-type]
        made.meta = {"val": node.meta["val"], **origin}
        (block.leaves if node.target is ENTER else block.results).append(made)
        return made

    def written(
        self,
        values: Sequence[Node],
        path: str,
        origin: dict[str, Any],
        tensor: Callable[[str, Any, dict[str, Any]], Node],
    ) -> list[Node]:
        """The results of a block that was not traced. `origin` is where it is called; `tensor`
        makes or finds the node of a parameter, buffer or constant."""
        if path in self._written:
            return self._written[path]
        follows = self._stamps.follows[path]
        first, names = self._blocks[follows], self._renamed(follows, path)
        new = dict(zip(first.leaves, values, strict=True))

        def operand(node: Node) -> Node:
            if node.op != "get_attr":
                return new.get(node, node)
            name = str(node.target)
            at = self._moved(node, follows, path, origin)
            return tensor(names.get(name, name), node.meta["val"], at)

        for node in first.body:
            if node.op == "get_attr":
                operand(node)  # stands where the first's does, not where it is used
            elif not _is_shared(node):
                new[node] = self._graph.node_copy(node, operand)
                new[node].meta = {
                    "val": node.meta.get("val"),
                    **self._moved(node, follows, path, origin),
                }
        self._written[path] = [operand(result.all_input_nodes[0]) for result in first.results]
        return self._written[path]

    def require_apart(self, node: Node) -> None:
        """What is inside of a block that was not traced is not called by others either."""
        for name, _ in node.meta["calls"]:
            parent = name.rpartition(".")[0]
            while parent:
                if parent in self._stamps.follows:
                    raise NotAlike(f"{name} is called apart from {parent}")
                parent = parent.rpartition(".")[0]

    def end(self, device: Node | None) -> None:
        """Refuse what cannot be proved to be the same, and take the marks away."""
        if self._stamps.refused:
            raise NotAlike(f"the results of {self._stamps.refused[0]} are of another form")
        _require_unwritten(self._graph)
        for path in set(self._stamps.follows.values()):
            _require_closed(path, self._blocks[path], device)
        for path, first in self._stamps.compared.items():
            if first in self._stamps.follows.values():
                self._compare(first, path)
        for block in self._blocks.values():
            for mark in (*block.leaves, *block.results):
                mark.replace_all_uses_with(mark.all_input_nodes[0])
                self._graph.erase_node(mark)

    def _moved(
        self, node: Node, first: str, path: str, origin: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Where a node of the first block would come from in another."""
        own, called = (n.meta["stack_trace"] for n in (node, self._blocks[first].leaves[-1]))
        if own and called and origin["stack_trace"] and own.startswith(called):
            own = origin["stack_trace"] + own[len(called) :]
        return {"calls": _moved_calls(node, first, path), "stack_trace": own}

    def _renamed(self, first: str, path: str) -> dict[str, str]:
        """The tensors of the first block, by name, and those of another."""
        old = self._skeleton.get_submodule(first)
        found: dict[str, str] = {}
        for named in (old.named_parameters, old.named_buffers):
            for name, _ in named(remove_duplicate=False):
                before, after = (f"{block}.{name}" for block in (first, path))
                before = self._aliases.get(before, before)
                after = self._aliases.get(after, after)
                if found.setdefault(before, after) != after:
                    raise NotAlike(f"{before} is tied otherwise in {path}")
        return found

    def _compare(self, first: str, path: str) -> None:
        """A traced block must be what would be written for it."""
        old, new = (self._blocks.get(name, _Block()) for name in (first, path))
        names = self._renamed(first, path)
        same: dict[Node, Any] = dict(zip(old.leaves, new.leaves, strict=False))

        def renamed(node: Node) -> Any:
            name = str(node.target)
            return names.get(name, name) if node.op == "get_attr" else same.get(node, node)

        def named(node: Node) -> Any:
            return str(node.target) if node.op == "get_attr" else node

        operators = [
            [*block.leaves, *(n for n in block.body if not _is_shared(n)), *block.results]
            for block in (old, new)
        ]
        if len({*map(len, operators)}) > 1:
            raise NotAlike(f"{first} and {path} have not as many operators")
        for left, right in zip(*operators, strict=True):
            expected = _facts(left, renamed, _moved_calls(left, first, path))
            if expected != _facts(right, named, right.meta["calls"]):
                raise NotAlike(f"{left} of {first} and {right} of {path} differ")
            same[left] = right


def _facts(node: Node, change: Callable[[Node], Any], calls: Any) -> tuple[Any, ...]:
    """What must be the same of two operators; of marks the operand, if it comes from inside."""
    given = () if node.target is ENTER else node.args[:1] if node.target is LEAVE else node.args
    args, kwargs = (torch.fx.map_arg(value, change) for value in (given, node.kwargs))
    return node.target, args, kwargs, str(node.meta.get("val")), calls


def _require_unwritten(graph: Graph) -> None:
    """No block writes to an operand: its caller, outside of the marks, would not see it."""
    for node in graph.nodes:
        source: Any = node.args[0] if mutates(node) and node.args else None
        while isinstance(source, Node) and source.target is not LEAVE and not is_new(source):
            if source.target is ENTER:
                raise NotAlike(f"{node} may write to an operand of {source.args[1]}")
            source = source.args[0] if source.args else None


def _require_closed(path: str, block: _Block, device: Node | None) -> None:
    """A block that others follow touches operands, results and tensors of the model alone."""
    inside = {*block.leaves, *block.body}
    for node in block.body:
        for source in node.all_input_nodes:
            if not (source in inside or source is device or _is_shared(source)):
                raise NotAlike(f"{source} is read by {path} and none of its operands")
    for node in (*block.leaves, *(n for n in block.body if not _is_shared(n))):
        for user in node.users:
            if not (user in inside or user in block.results or _is_shared(user)):
                raise NotAlike(f"{node} of {path} is read by {user} and none of its results")


def _moved_calls(node: Node, first: str, path: str) -> tuple[Any, ...]:
    """The module calls of a node of the first block, as they would be in another."""
    calls = node.meta["calls"]
    return tuple((path + n[len(first) :] if within(n, first) else n, kind) for n, kind in calls)


def _is_shared(node: Node) -> bool:
    """Whether blocks have a node in common: a tensor of the model, or a number made of sizes."""
    number = not isinstance(node.meta.get("val"), (torch.Tensor, tuple))
    return node.op == "get_attr" or (node.target in _SIZES and number)
