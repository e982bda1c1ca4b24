"""Norms, dropout and residuals outside of regions work on a slice of the sequence on each rank.

before  %g : reduce_from_region(%down)                  I
        %y : add(%x, %g)                                I
        %norm : layer_norm(%y, [d], %weight)            I
        %f : copy_to_region(%norm)                      R
after   %s : reduce_scatter_to_sequence(%down, 1)       S(1: sequence)
        %y : add(%x, %s)                                S(1: sequence)
        %norm : layer_norm(%y, [d], f(%weight))         S(1: sequence)
        %all : gather_sequence_to_region(%norm, 1, n)   R

Sequence parallelism of Korthikanti et al. 2022, section 4.2.2. Every g becomes a reduce-scatter
along the dim before the features. From there slices go on through every operator of which the
checker's rules say that it gives slices of its whole result; whole operands are sliced for it, and
parameters go through f, since each rank sees the gradient of its slice alone. f of a slice becomes
an all-gather; any other reader gets the whole again by one. Calls that are given caches are for a
token or few, and stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from autotp import sizes
from autotp.gradients import needs_grad
from autotp.planning import Collectives
from autotp.program import Program, common_calls, copied
from autotp.proof import operators, shapes, views
from autotp.proof.layout import slices_of
from autotp.proof.values import Call, Place, Refused, Value, bind, name_of
from autotp.runtime.collectives import copy_to_region, reduce_from_region
from autotp.runtime.random import draw
from autotp.runtime.sequence import (
    gather_from_sequence,
    gather_sequence_to_region,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
)
from autotp.sizes import Size

aten = torch.ops.aten


def sequence(program: Program, counts: Collectives, *, ranks: int) -> tuple[Program, Collectives]:
    """The program with slices of the sequence between regions, and the collectives it issues."""
    if ranks == 1 or program.inputs:
        return program, counts
    sunk = _sunk(program)
    rewriter = _Slice(sunk, ranks)
    if not rewriter.sliced:
        return program, counts
    issued = rewriter.counts
    note = f"{issued['reduce-scatter']} g became reduce-scatters along the sequence"
    changed = replace(sunk, graph=rewriter.graph, provenance=(*program.provenance, note))
    return changed, replace(
        counts,
        forward=counts.forward - issued["reduce-scatter"],
        backward=counts.backward - issued["f gone"] + issued["f"],
        reduce_scatters=issued["reduce-scatter"],
        sequence_gathers=issued["gather"],
        sequence_wholes=issued["whole"],
        backward_reduce_scatters=issued["gather backward"],
        backward_sequence_gathers=issued["gather of gradients"],
    )


class _Slice:
    def __init__(self, program: Program, ranks: int) -> None:
        self.graph = Graph()
        self.counts: Counter[str] = Counter()
        self.sliced: dict[Node, int] = {}  # new nodes that are slices, and along which dim
        self._ranks = ranks
        self._may, self._does = needs_grad(program, any_parameter=True), needs_grad(program)
        self._new: dict[Node, Node] = {}
        self._made: dict[tuple[Any, Node], Node] = {}  # conversions, by kind and source
        self._lengths: dict[Size, Node | int] = {}
        for node in program.graph.nodes:
            self._new[node] = self._copy(node)

    def _copy(self, node: Node) -> Node:
        source: Any = node.args[0] if node.args else None
        if node.target is reduce_from_region and (dim := _sequence_dim(node)) is not None:
            self.counts["reduce-scatter"] += 1
            self.counts["gather of gradients"] += self._does[node]
            return self._slice(node, reduce_scatter_to_sequence, (self._new[source], dim), dim)
        if node.target is copy_to_region and self._new[source] in self.sliced:
            return self._to_region(node, source)
        if any(self._new[n] in self.sliced for n in node.all_input_nodes):
            made = self._on_slices(node)
            if made is not None:
                return made
        return self._on_wholes(node)

    # ---- readers of slices

    def _on_slices(self, node: Node) -> Node | None:
        """The operator on slices, if it gives slices of its result."""
        target: Any = node.target
        first = 0
        if node.op != "call_function" or node.meta.get("placement") != "I":
            return None
        if target is draw:
            if node.args[1] != "replicated":
                return None
            target, first = node.args[0], 4
        if not isinstance(target, torch._ops.OpOverload):
            return None
        if any(n.meta.get("placement") != "I" for n in _tensors(node)):
            return None
        source = node.all_input_nodes[0]
        if _keeps_shape(node, target, source) and self._new[source] in self.sliced:
            return self._new[source]
        whole = [n for n in _tensors(node) if self._new[n] not in self.sliced]
        lengths = {self._length_of(self._new[n]) for n in node.all_input_nodes} - {None}
        found = {n: _dim_of(n, lengths) for n in whole}
        also: dict[Node, int]
        for also in ({}, {n: at for n, at in found.items() if at is not None}):
            dim = self._dim_after(node, target, node.args[first:], lengths, also)
            if dim is not None:
                return self._apply(node, target, first, dim, also)
        return None

    def _dim_after(
        self, node: Node, target: Any, args: Any, lengths: set[Any], also: Mapping[Node, int]
    ) -> int | None:
        """Along which dim the result is sliced, if it is, with further operands in slices of their
        dims."""
        name = name_of(target)
        rule = operators.rule_of(name, target)
        if rule is None or len(lengths) != 1 or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        values: dict[Node, Any] = {}
        for n in _tensors(node):
            values[n] = self._value(n, self.sliced.get(self._new[n], also.get(n)))
        given = bind(target, args, node.kwargs)
        try:
            place = rule(Call(name, given, values, node.meta["val"], 0, node))
        except Refused:
            return None
        slices = slices_of(next(iter(lengths)), self._ranks)
        if not isinstance(place, Place) or place.layout != slices:
            return None
        return place.dim if _sizes_are_free(node, target, place.dim) else None

    def _value(self, node: Node, dim: int | None) -> Value:
        val = node.meta["val"]
        shape = tuple(map(shapes.example, val.shape))
        value = Value("I", tuple(val.shape), shape, val.dtype, self._may[node])
        if dim is None:
            return value
        layout = slices_of(sizes.size_of(val.shape[dim]), self._ranks)
        return replace(value, kind="S", dim=dim, layout=layout)

    def _apply(
        self, node: Node, target: Any, first: int, dim: int, also: Mapping[Node, int]
    ) -> Node:
        def operand(n: Node) -> Node:
            made = self._new[n]
            if made in self.sliced or not isinstance(n.meta.get("val"), torch.Tensor):
                return made
            if n in also:
                return self._scatter(n, also[n], node)
            return self._through_f(n) if self._may[n] else made

        args: Any
        args, kwargs = map_arg((node.args, dict(node.kwargs)), operand)
        if node.target is draw:
            args = (args[0], "sharded", *args[2:])
        at = _shape_argument(target)
        if at is not None:
            given = [*args[first + at]]
            given[dim] = -1
            args = (*args[: first + at], given, *args[first + at + 1 :])
        return self._slice(node, node.target, args, dim, kwargs)

    def _on_wholes(self, node: Node) -> Node:
        made = self.graph.node_copy(node, lambda n: self._whole(n, node))
        made.meta = dict(node.meta)
        return made

    # ---- conversions

    def _slice(self, node: Node, target: Any, args: Any, dim: int, kwargs: Any = None) -> Node:
        name = f"slice_{node.name}" if target is scatter_to_sequence else node.name
        made = self.graph.create_node("call_function", target, args, kwargs or {}, name)
        made.meta = {**node.meta, "placement": f"S({dim}: sequence)", "sliced": dim}
        self.sliced[made] = dim
        return made

    def _scatter(self, source: Node, dim: int, reader: Node) -> Node:
        if (key := (dim, source)) not in self._made:
            made = self._slice(source, scatter_to_sequence, (self._new[source], dim), dim)
            made.meta["calls"] = common_calls([source, reader])
            self._made[key] = made
            self.counts["gather of gradients"] += self._does[source]
        return self._made[key]

    def _through_f(self, source: Node) -> Node:
        if (key := ("f", source)) not in self._made:
            made = self.graph.call_function(copy_to_region, (self._new[source],))
            made.name = f"f_{source.name}"
            made.meta = {**source.meta, "placement": "R"}
            self._made[key] = made
            self.counts["f"] += self._does[source]
        return self._made[key]

    def _to_region(self, node: Node, source: Node) -> Node:
        value = self._new[source]
        dim = self.sliced[value]
        args = (value, dim, self._length(source.meta["val"].shape[dim]))
        made = self.graph.create_node(
            "call_function", gather_sequence_to_region, args, name=node.name
        )
        made.meta = dict(node.meta)
        self.counts["gather"] += 1
        self.counts["gather backward"] += self._does[source]
        self.counts["f gone"] += self._does[source]
        return made

    def _whole(self, source: Node, reader: Node) -> Node:
        value = self._new[source]
        if value not in self.sliced:
            return value
        if (key := ("whole", value)) not in self._made:
            dim = self.sliced[value]
            length = self._length(source.meta["val"].shape[dim])
            made = self.graph.call_function(gather_from_sequence, (value, dim, length))
            made.name = f"whole_{source.name}"
            made.meta = {**source.meta, "placement": "I", "calls": common_calls([source, reader])}
            self._made[key] = made
            self.counts["whole"] += 1
        return self._made[key]

    # ---- lengths

    def _length_of(self, made: Node) -> Size | None:
        """How many items the sliced dim has as a whole."""
        dim = self.sliced.get(made)
        return None if dim is None else sizes.size_of(made.meta["val"].shape[dim])

    def _length(self, size: Any) -> Node | int:
        """A size as the program has it: read off the first value that is whole."""
        if isinstance(size, int):
            return size
        key = sizes.size_of(size)
        if key not in self._lengths:
            source, dim = next(
                (made, dim)
                for made in self.graph.nodes
                if made not in self.sliced
                and isinstance(made.meta.get("val"), torch.Tensor)
                and made.meta.get("placement") in ("I", "P", "R")
                for dim, its in enumerate(sizes.shape_of(made.meta["val"]))
                if its == key
            )
            with self.graph.inserting_after(source):
                made = self.graph.call_function(aten.sym_size.int, (source, dim))
            made.meta = {"val": size, "calls": ()}
            self._lengths[key] = made
        return self._lengths[key]


def _tensors(node: Node) -> list[Node]:
    """The operands that are tensors."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _sequence_dim(node: Node) -> int | None:
    """The dim before the features."""
    value = node.meta["val"]
    return value.dim() - 2 if value.dim() > 1 else None


def _dim_of(node: Node, lengths: set[Any]) -> int | None:
    """The only dim of a value that has one of these lengths."""
    found = [i for i, size in enumerate(sizes.shape_of(node.meta["val"])) if size in lengths]
    return found[0] if len(found) == 1 else None


def _keeps_shape(node: Node, target: Any, source: Node) -> bool:
    """Whether a view gives the shape that its operand has."""
    if operators.TABLE.get(name_of(target)) is not views.regroup:
        return False
    return sizes.shape_of(node.meta["val"]) == sizes.shape_of(source.meta["val"])


def _shape_argument(target: Any) -> int | None:
    """Which argument is a shape."""
    names = [argument.name for argument in target._schema.arguments]
    return next((i for i, name in enumerate(names) if name in ("size", "shape")), None)


def _sizes_are_free(node: Node, target: Any, dim: int) -> bool:
    """Whether a shape among the arguments can leave the sliced dim open."""
    at = _shape_argument(target)
    args = node.args[4:] if node.target is draw else node.args
    rest = [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.Tensor)]
    if at is None:
        return node.target is draw or not rest
    given = args[at] if len(args) > at else None
    if not isinstance(given, (list, tuple)) or len(given) != node.meta["val"].dim():
        return False
    return not any(size == -1 for i, size in enumerate(given) if i != dim)


# ---- g below views


def _sunk(program: Program) -> Program:
    """Each g, and a bias that follows it, below a view that keeps the features: where tokens are
    one dim for a product's sake, the sequence is a dim behind the view."""
    graph = copied(program.graph)
    for node in list(graph.nodes):
        if node.target is reduce_from_region and len(node.users) == 1:
            _sink(graph, node)
    return replace(program, graph=graph)


def _sink(graph: Graph, g: Node) -> None:
    user = next(iter(g.users))
    added = user if _adds_bias(user, g) and len(user.users) == 1 else None
    last = added or g
    view = next(iter(last.users))
    if operators.TABLE.get(name_of(view.target)) is not views.regroup or view.args[0] is not last:
        return
    before, after = (sizes.shape_of(n.meta["val"]) for n in (g, view))
    if not before or not after or before[-1] != after[-1] or len(after) <= len(before):
        return
    with graph.inserting_before(view):
        product = graph.node_copy(view, lambda n: g.args[0] if n is last else n)
        product.meta = {**view.meta, "placement": "P"}
        whole = graph.call_function(reduce_from_region, (product,))
        whole.name = f"g_{view.name}"
        whole.meta = dict(view.meta)
        if added is not None:
            total = graph.node_copy(added, lambda n: whole if n is g else n)
            total.meta = dict(view.meta)
            whole = total
    view.replace_all_uses_with(whole)
    for node in (view, added, g):
        if node is not None:
            graph.erase_node(node)


def _adds_bias(node: Node, g: Node) -> bool:
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.args[0] is not g:
        return False
    bias = node.args[1]
    return isinstance(bias, Node) and bias.op == "get_attr" and bias.meta["val"].dim() == 1
