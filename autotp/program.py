"""Program: a captured model as data. The graph, what its values are, and how the model is
called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from autotp.runtime.collectives import reduce_from_region
from autotp.runtime.outputs import LocalOutput
from autotp.runtime.regions import SIDE_EFFECTS

aten = torch.ops.aten
# What operators do without saying it in their schemas: memory as it was found, errors, draws,
# statistics that are updated.
_EFFECTS = ("empty", "assert", "dropout", "batch_norm", "instance_norm")
_NEW = {  # beside the pointwise operators
    aten.addmm.default,
    aten.bmm.default,
    aten.layer_norm.default,
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
}

_SILENT = {aten._unsafe_view, aten.broadcast_tensors, aten.meshgrid, aten.type_as}
_VIEW_OR_COPY = {
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.ravel.default,
    aten.reshape.default,
    aten.reshape_as.default,
}


@dataclass(frozen=True)
class TensorSpec:
    """A parameter, buffer or constant: its shape, and for constants its value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str  # parameter, buffer or constant
    requires_grad: bool = False
    value: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Guards:
    """What a call must satisfy to be served by a capture.

    `sizes` has an entry for each leaf of (args, kwargs): for a tensor its dims (an int where the
    capture is for that size alone, else a symbol), for anything else None. `ranges` bounds symbols,
    `conditions` are further expressions over `sizes[leaf][dim]` and `L["args"]`, `L["kwargs"]`.
    """

    sizes: tuple[tuple[int | str, ...] | None, ...]
    ranges: Mapping[str, tuple[int, int]]
    conditions: tuple[str, ...]


@dataclass(frozen=True)
class Signature:
    """How the model is called: the pytrees of arguments and results, and which leaves are inputs.

    `inputs` names the placeholder of each leaf of (args, kwargs), in order.
    """

    in_spec: Any
    out_spec: Any
    inputs: tuple[str, ...]
    guards: Guards


@dataclass(frozen=True)
class Program:
    """A captured model.

    Placeholders are user inputs. Parameters, buffers and constants are `get_attr` nodes, one each,
    whose target is the name. `aliases` lists every further name of a tied tensor. `recomputed` are
    the modules that the model runs under activation checkpointing.
    """

    graph: Graph
    tensors: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    signature: Signature
    training: bool
    recomputed: frozenset[str] = frozenset()
    outputs: Mapping[int, LocalOutput] = field(default_factory=dict)  # results that stay split
    inputs: Mapping[str, LocalOutput] = field(default_factory=dict)  # inputs that come split
    provenance: tuple[str, ...] = ()

    def parameter(self, node: Node | None) -> str | None:
        """The parameter that a value is a view of, if it is."""
        while node is not None and node.op == "call_function":
            sources = [n for n in node.all_input_nodes if "val" in n.meta]
            node = sources[0] if len(sources) == 1 else None
        if node is None or node.op != "get_attr":
            return None
        name = str(node.target)
        return name if self.tensors[name].kind == "parameter" else None


def copied(graph: Graph) -> Graph:
    """A graph with nodes of its own, each with a copy of the original's facts."""
    made, new = Graph(), dict[Node, Node]()
    made.output(made.graph_copy(graph, new))
    for old, node in new.items():
        node.meta = dict(old.meta)
    return made


def common_calls(nodes: Sequence[Node]) -> tuple[Any, ...]:
    """The module calls that all these nodes are in."""
    stacks = [node.meta.get("calls") or () for node in nodes]
    shared = []
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return tuple(shared)


def is_pure(node: Node) -> bool:
    """Whether a node's result depends on its operands alone, and making it does nothing else."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not any(kind in str(target) for kind in _EFFECTS)
    )


def is_returned(node: Node) -> bool:
    """Whether the caller gets the value, and may write to it."""
    return any(user.op == "output" for user in node.users)


def mutates(node: Node) -> bool:
    """Whether an operator writes to one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def is_new(node: Node) -> bool:
    """Whether a result is surely in memory of its own, and no view of an operand."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    pointwise = torch.Tag.pointwise in node.target.tags
    aliases = any(value.alias_info for value in node.target._schema.returns)
    return node.target in _NEW or (pointwise and not aliases)


def regions(graph: Graph) -> dict[Node, int]:
    """For each node how many borders of grad and autocast regions lie before it."""
    found, count = {}, 0
    for node in graph.nodes:
        count += node.target in SIDE_EFFECTS
        found[node] = count
    return found


def overwrites(node: Node) -> bool:
    """Whether an operator only puts its result where an operand was that nothing else reads: it
    could as well make a new value."""
    operands = _overwritten(node)
    source = operands[0] if len(operands) == 1 else None
    if source is None or source is not node.args[0] or len(source.users) > 1:
        return False
    return is_new(source) or source.target is reduce_from_region  # a lone rank's is its operand


def written(graph: Graph) -> set[Node]:
    """Values that an operator writes to, and those that may lie in the same memory."""
    found: set[Node] = set()
    for node in graph.nodes:
        for source in _overwritten(node):
            lies: Any = source
            while isinstance(lies, Node) and lies not in found:
                found.add(lies)
                lies = lies.args[0] if lies.args and not is_new(lies) else None
    return found


def uncertain(graph: Graph) -> dict[Node, Node]:
    """Operators that return a copy or a view, as sizes and strides have it, where memory is written
    to further on that is then one or two: each with the operator that writes."""
    later: dict[Node, Node] = {}
    found = {}
    for node in reversed(graph.nodes):
        later.update((_root(source), node) for source in _overwritten(node))
        if _may_copy(node) and _root(node) in later:
            found[node] = later[_root(node)]
    return found


def _may_copy(node: Node) -> bool:
    if node.target in _VIEW_OR_COPY:
        return True
    packet = getattr(node.target, "overloadpacket", None)
    given = (*node.args, *node.kwargs.values())
    return packet is aten.to and any(isinstance(value, torch.memory_format) for value in given)


def _root(node: Node) -> Node:
    """A value in whose memory another may lie."""
    while node.args and isinstance(node.args[0], Node) and _may_alias(node):
        node = node.args[0]
    return node


def _may_alias(node: Node) -> bool:
    """Whether a result may lie in its operand's memory. Schemas say it, of nearly all operators."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    aliases = any(value.alias_info for value in node.target._schema.returns)
    return aliases or node.target.overloadpacket in _SILENT


def _overwritten(node: Node) -> list[Node]:
    """The operands that an operator writes to."""
    if not mutates(node):
        return []
    target: Any = node.target
    found: list[Node] = []
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            torch.fx.map_arg(given, found.append)
    return found


def affected(graph: Graph) -> set[Node]:
    """Values that an operator writes to, and all that are made of them: they may hold something
    else later."""
    found = written(graph)
    for node in graph.nodes:
        if not overwrites(node) and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
