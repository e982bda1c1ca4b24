"""f and g are in the graph: replicated values enter sharded computation through f, partial sums
leave through g.

before  %up : linear(%x, up.weight, up.bias)          columns of up.weight sharded
        %down : linear(%gelu, down.weight, down.bias)   rows of down.weight sharded
after   %f : copy_to_region(%x)
        %up : linear(%f, up.weight, up.bias)
        %down : linear(%gelu, down.weight)
        %g : reduce_from_region(%down)
        %add : add(%g, down.bias)

One f for each value however many operators read it, on parameters too (a scale that all heads
share). The bias of a row-parallel product is added once, after g. Sharded results are gathered
where they leave the module; inputs and counted positions (`arange`) enter by the rank's own part.
Random operators draw from the stream of their placement. Every value gets `meta["dims"]` and
`meta["placement"]`. The graph is the same on every rank; sizes are still the whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autotp.axes import Axis, Dim, Ranges, Shares, is_sharded, leaves, ranges, substitute
from autotp.caches import paths_in
from autotp.gradients import needs_grad
from autotp.options import DEFAULTS, Options
from autotp.placement import text
from autotp.planning import Collectives, Plan
from autotp.program import Program, common_calls, regions
from autotp.rules import border, pointwise, reduction, rule_for, view
from autotp.runtime import vocabulary
from autotp.runtime.collectives import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)
from autotp.runtime.outputs import LocalOutput
from autotp.runtime.random import draw, next_seed
from passes.infer import Inferred

_LINEAR_VIEWS = (view.regroup, view.permute, view.adjoint, view.expand)
aten = torch.ops.aten


def insert(
    program: Program, inferred: Inferred, plan: Plan, options: Options = DEFAULTS
) -> tuple[Program, Collectives]:
    """Insert the collectives that a plan needs; also says how many a call issues.

    Results split along the vocabulary are gathered ("gather"), stay split ("local"), or stay split
    in training with a loss ("auto"), as `options.logits` says. Caches stay split.
    """
    rewriter = _Insert(program, inferred, plan, options)
    note = (
        f"inserted {rewriter.forward} g, {rewriter.copies} f, {rewriter.gathers} gathers "
        f"for tp={plan.tp}"
    )
    counts = Collectives(
        rewriter.forward, rewriter.backward, rewriter.gathers, rewriter.loss, rewriter.parts
    )
    result = replace(
        program,
        graph=rewriter.graph,
        outputs=rewriter.outputs,
        inputs=rewriter.inputs,
        provenance=(*program.provenance, note),
    )
    return result, counts


class _Insert:
    def __init__(self, program: Program, inferred: Inferred, plan: Plan, options: Options) -> None:
        self.graph = Graph()
        self.outputs: dict[int, LocalOutput] = {}
        self.inputs: dict[str, LocalOutput] = {}
        self.forward = self.backward = self.copies = self.gathers = self.loss = self.parts = 0
        self._tensors, self._plan, self._shares = program.tensors, plan, plan.shares
        self._dims = {node: _renamed(value, plan) for node, value in inferred.dims.items()}
        self._may, self._does = needs_grad(program, any_parameter=True), needs_grad(program)
        self._contracts = {
            use.node
            for use, dim in zip(inferred.uses, inferred.use_dims, strict=True)
            if use.kind == "contract" and is_sharded(substitute(dim, plan.names), self._shares)
        }
        self._special = {
            use.node: use.kind
            for use, dim in zip(inferred.uses, inferred.use_dims, strict=True)
            if use.kind in ("lookup", "classes")
            and is_sharded(substitute(dim, plan.names), self._shares)
        }
        has_loss = any(kind == "classes" for kind in self._special.values())
        self._keep_logits = options.logits == "local" or (
            options.logits == "auto" and has_loss and program.training
        )
        self._caches = {index for index, _ in paths_in(program.signature.out_spec)}
        given = paths_in(program.signature.in_spec)
        self._given_caches = {program.signature.inputs[index] for index, _ in given}
        nodes = list(program.graph.nodes)
        self._whole: dict[
            Node, Node
        ] = {}  # of split values that are computed whole, the whole ones
        self._drawn = {n for n in nodes if _is_random(n)} if options.random == "whole" else set()
        self._entered = inferred.entered | self._drawn
        self._inside = {node for node in nodes if self._is_inside(node)}
        self._entries, self._copied = self._where_f_goes(nodes)
        self._new: dict[Node, Node] = {}
        self._f: dict[tuple[Node, int], Node] = {}
        self._places = regions(program.graph)
        self._seed: Node | int | None = None
        self._draws = 0
        for node in nodes:
            self._copy(node)

    # ---- analysis

    def _is_inside(self, node: Node) -> bool:
        """Whether an operator computes something else on each rank."""
        if node.op != "call_function" or node in self._entered:
            return False
        return any(_sharded(self._dims[n], self._shares) for n in (node, *node.all_input_nodes))

    def _where_f_goes(self, nodes: Sequence[Node]) -> tuple[set[Node], set[Node]]:
        """Values that enter through f, and views behind f that stay replicated (moved up to share
        it)."""
        entries: set[Node] = set()
        for node in nodes:
            if node in self._inside:
                bias = _bias(node) if node in self._contracts else None
                entries.update(n for n in node.all_input_nodes if n is not bias and self._enters(n))
        copied: set[Node] = set()
        for node in reversed(nodes):
            users = list(node.users)
            if (
                node in entries
                and rule_for(node) in _LINEAR_VIEWS
                and all(user in self._inside or user in copied for user in users)
            ):
                source = node.args[0]
                assert isinstance(source, Node)
                if self._enters(source):
                    entries.discard(node)
                    copied.add(node)
                    entries.add(source)
        return entries, copied

    def _enters(self, node: Node) -> bool:
        return self._may[node] and not _sharded(self._dims[node], self._shares)

    # ---- rewriting

    def _copy(self, node: Node) -> None:
        match node.op:
            case "placeholder" | "get_attr":
                made = self.graph.create_node(node.op, node.target, node.args, name=node.name)
                self._finish(node, made)
                if node.target in self._plan.held:
                    self._new[node] = self._gather_held(node, made)
                if node.op == "placeholder" and _sharded(self._dims[node], self._shares):
                    if node.name in self._given_caches:
                        self.inputs[node.name] = LocalOutput(*self._where(node), True)
                        return
                    made.meta["placement"] = text((), self._shares)
                    self._new[node] = self._scatter(node, made)
            case "output":
                given = node.args[0]
                assert isinstance(given, (list, tuple))
                leaves = [self._leave(leaf, index) for index, leaf in enumerate(given)]
                self.graph.output(tuple(leaves))
            case _ if rule_for(node) is border.part:
                self._part(node)
            case _:
                self._call(node)

    def _part(self, node: Node) -> None:
        """Each rank takes its features of a value that is whole, if this call splits them."""
        source = node.args[0]
        assert isinstance(source, Node)
        self._new[node] = self._new[source]
        at = len(self._dims[node]) - 1
        if is_sharded(self._dims[node][at], self._shares):
            self._new[node] = self._scatter(node, self._new[source])
            self.parts += self._does[source]

    def _call(self, node: Node) -> None:
        inside = node in self._inside or node in self._copied

        bias = _bias(node) if node in self._contracts else None

        def operand(source: Node) -> Node:
            through = inside and source in self._entries and source is not bias
            if node in self._entered:
                return self._whole_of(source, node in self._drawn)
            return self._through_f(source, node) if through else self._new[source]

        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), operand)
        if node in self._contracts:
            self._row_parallel(node, args, kwargs)
            return
        if node in self._special:
            self._vocabulary(node, args, kwargs)
            return
        if _is_random(node):
            stream = "sharded" if node in self._inside else "replicated"
            stream = "whole" if node in self._drawn else stream
            if self._seed is None:
                self._seed = 0 if stream == "whole" else self._first(next_seed)
            self._draws += 1
            operator: Any = node.target
            args = (operator, stream, self._seed, self._draws, *args)
            made = self.graph.create_node("call_function", draw, args, kwargs, name=node.name)
        else:
            made = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        self._finish(node, made)
        if node in self._copied:
            made.meta["placement"] = "R"
        if node in self._entered and _sharded(self._dims[node], self._shares):
            made.meta.update(dims=_plain(node), placement="I")
            self._whole[node], self._new[node] = made, self._scatter(node, made)

    def _whole_of(self, source: Node, gather: bool) -> Node:
        """A value as an operator reads it that is computed whole."""
        if source not in self._whole and gather and _sharded(self._dims[source], self._shares):
            self._whole[source] = self._move(gather_from_region, source, self._new[source])
            self._whole[source].meta.update(dims=_plain(source), placement="I")
            self.gathers += 1
        return self._whole.get(source, self._new[source])

    def _first(self, function: Any) -> Node:
        anchor = next(iter(self.graph.nodes))
        with self.graph.inserting_before(anchor):
            return self.graph.call_function(function)

    def _finish(self, node: Node, made: Node) -> None:
        made.meta = {**node.meta, "dims": self._dims[node], "source": node.name}
        made.meta["placement"] = text(self._dims[node], self._shares)
        self._new[node] = made

    def _through_f(self, source: Node, reader: Node) -> Node:
        place = self._places[reader]  # no gradient comes out of a region without gradients
        if (source, place) not in self._f:
            readers = [n for n in source.users if n in self._inside or n in self._copied]
            readers = [n for n in readers if self._places[n] == place]
            made = self.graph.call_function(copy_to_region, (self._new[source],))
            made.name = f"f_{source.name}"
            made.meta = {**self._new[source].meta, "placement": "R", "calls": common_calls(readers)}
            made.meta["stack_trace"] = readers[0].meta.get("stack_trace")
            self._f[source, place] = made
            self.copies += 1
            self.backward += self._does[source] and any(self._does[n] for n in readers)
        return self._f[source, place]

    def _row_parallel(self, node: Node, args: Any, kwargs: Any) -> None:
        """The product without its bias, g, and the bias added once."""
        target, bias = node.target, None
        kwargs = dict(kwargs)
        alpha, beta = kwargs.pop("alpha", 1), kwargs.pop("beta", 1)
        match node.target:
            case aten.addmm.default:
                target, bias, args = aten.mm.default, args[0], args[1:]
            case aten.baddbmm.default:
                target, bias, args = aten.bmm.default, args[0], args[1:]
            case aten.linear.default:
                bias, args = (*args, None)[2], args[:2]
            case aten.mean.dim:
                target, alpha = aten.sum.dim_IntList, 1 / reduction.count(node)
        product = self.graph.create_node("call_function", target, args, kwargs, name=node.name)
        product.meta = {**node.meta, "dims": self._dims[node], "placement": "P"}
        if alpha != 1:
            scaled = self.graph.call_function(aten.mul.Tensor, (product, alpha))
            scaled.meta = dict(product.meta)
            product = scaled
        result = self._reduce(product)
        if bias is None:
            result.meta["source"] = node.name
        else:
            factor = {} if beta == 1 else {"alpha": beta}
            total = self.graph.call_function(aten.add.Tensor, (result, bias), factor)
            total.meta = {**result.meta, "source": node.name}
            result = total
        self._new[node] = result

    def _vocabulary(self, node: Node, args: Any, kwargs: Any) -> None:
        """A lookup in a split table leaves a partial sum; a loss of split logits is whole."""
        lookup = self._special[node] == "lookup"
        split = node.args[0]
        assert isinstance(split, Node)
        axis = self._dims[split][0 if lookup else min(len(self._dims[split]) - 1, 1)]
        rows = tuple(ranges(axis, self._shares, rank)[0] for rank in range(self._plan.tp))
        function = vocabulary.embedding if lookup else vocabulary.cross_entropy
        rest = args[2:3] if lookup else args[2:]
        made = self.graph.create_node(
            "call_function", function, (*args[:2], rows, *rest), kwargs, name=node.name
        )
        self._finish(node, made)
        if lookup:
            made.meta["placement"] = "P"
            self._new[node] = self._reduce(made)
        else:
            self.loss += 2

    def _reduce(self, product: Node) -> Node:
        result = self.graph.call_function(reduce_from_region, (product,))
        result.name = f"g_{product.name}"
        result.meta = {**product.meta, "placement": "I"}
        self.forward += 1
        return result

    def _gather_held(self, node: Node, made: Node) -> Node:
        """A parameter that lies split and is needed whole."""
        dims = self._plan.by_name[str(node.target)].dims
        made.meta.update(dims=dims, placement=text(dims, self._shares))
        whole = self.graph.call_function(gather_from_region, (made, *self._split_in(dims)))
        whole.meta = {**node.meta, "dims": self._dims[node], "placement": "I"}
        self.gathers += 1
        return whole

    def _scatter(self, node: Node, whole: Node) -> Node:
        return self._move(scatter_to_region, node, whole)

    def _leave(self, leaf: Any, index: int) -> Any:
        """A split result is gathered, or its place noted if it stays split."""
        if not isinstance(leaf, Node):
            return leaf
        if not _sharded(self._dims[leaf], self._shares):
            return self._new[leaf]
        at, pieces = self._where(leaf)
        names = {axis.name for axis in leaves(self._dims[leaf][at])}
        words = any(a.kind == "vocabulary" and a.name in names for a in self._plan.axes)
        if index in self._caches or (words and self._keep_logits):
            self.outputs[index] = LocalOutput(at, pieces, index in self._caches)
            return self._new[leaf]
        self.gathers += 1
        made = self._move(gather_from_region, leaf, self._new[leaf])
        made.meta["placement"] = "I"
        made.meta["calls"] = ()
        return made

    def _where(self, node: Node) -> tuple[int, tuple[Ranges, ...]]:
        return self._split_in(self._dims[node])

    def _split_in(self, dims: Sequence[Dim]) -> tuple[int, tuple[Ranges, ...]]:
        """The dim that is split, and the positions that each rank holds."""
        at = next(i for i, dim in enumerate(dims) if is_sharded(dim, self._shares))
        return at, tuple(ranges(dims[at], self._shares, rank) for rank in range(self._plan.tp))

    def _move(self, function: Any, node: Node, value: Node) -> Node:
        dims = self._dims[node]
        at, pieces = self._where(node)
        made = self.graph.call_function(function, (value, at, pieces))
        made.meta = {**node.meta, "dims": dims, "placement": text(dims, self._shares)}
        return made


def _renamed(value: Any, plan: Plan) -> Any:
    if isinstance(value, list):
        return [_renamed(item, plan) for item in value]
    return None if value is None else tuple(_readable(dim, plan) for dim in value)


def _readable(dim: Dim, plan: Plan) -> Dim:
    """Sharded axes by name, other static ones by size: their numbers mean nothing to a reader."""
    others = {a.name: str(a.size) for a in leaves(dim) if a.size is not None}
    return substitute(dim, {**others, **plan.names})


def _plain(node: Node) -> tuple[Dim, ...]:
    """The dims of a value that is whole: no axis of theirs is split."""
    return tuple(Axis(str(size), size) for size in node.meta["val"].shape)


def _sharded(value: Any, shares: Shares) -> bool:
    if isinstance(value, list):
        return any(_sharded(item, shares) for item in value)
    return any(is_sharded(dim, shares) for dim in value or ())


def _bias(node: Node) -> Any:
    """The operand that a product adds to its result: it is added once, after g."""
    match node.target:
        case aten.addmm.default | aten.baddbmm.default:
            return node.args[0]
        case aten.linear.default:
            return node.args[2] if len(node.args) > 2 else None
    return None


def _is_random(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if rule_for(node) is pointwise.like and len(node.args) > 2:  # dropout(x, p, train)
        return bool(node.args[2]) and bool(node.args[1])
    if target is aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    return True
