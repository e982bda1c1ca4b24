"""All ranks in one process: the emitted graphs of every rank, run node by node in lockstep.

There is no second implementation: the graphs are those that ranks run under torchrun. Only the
collectives are others: they take the values of all ranks at once, in memory, and are
differentiable, so one `loss.backward()` computes every rank's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx import Graph, Node, map_arg

from autotp.axes import Ranges
from autotp.checkpoint.whole import Whole
from autotp.errors import AutoTPError, message
from autotp.huggingface import Entry, face_of
from autotp.runtime import vocabulary
from autotp.runtime.block import Block
from autotp.runtime.calls import Call
from autotp.runtime.captured import Capture
from autotp.runtime.collectives import (
    copy_all_to_region,
    copy_to_region,
    gather_from_region,
    place,
    reduce_from_region,
    scatter_to_region,
    take,
)
from autotp.runtime.folded import column_product, copy_each_to_region, row_product
from autotp.runtime.group import Group
from autotp.runtime.module import TensorParallel
from autotp.runtime.random import draw, next_seed, ticket
from autotp.runtime.regions import leave_autocast, leave_grad_mode
from autotp.runtime.sequence import (
    gather_from_sequence,
    gather_sequence_to_region,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
    slices,
)
from autotp.runtime.sharded import plain


class Lockstep(Whole):
    """Every rank of a parallelized model, called as the original.

    `ranks[r]` is the module that rank r would hold. The result is rank 0's, which is every rank's;
    gradients reach the shards of all ranks.
    """

    def __init__(self, ranks: Sequence[TensorParallel]) -> None:
        super().__init__()
        self.ranks = nn.ModuleList(ranks)
        self.training = ranks[0].training
        self.watch: Callable[[Block, Any, list[Any]], None] | None = None

    @property
    def plan(self) -> Any:
        """The plan that all ranks follow."""
        return self.ranks[0].plan

    @property
    def tp_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward, on every rank."""
        return self.call("", args, kwargs)

    def call(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The forward of the original's submodule at a path; "" is the model itself."""
        results, capture, call = self.run(args, kwargs, entry)
        leaves = [_leave(values) for values in zip(*results, strict=True)]
        return capture.assemble(leaves, call.caches)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The original's `generate`. The caller sees whole caches; each rank computes its heads."""
        return face_of(self.skeleton, self).generate(*args, **kwargs)

    @property
    def skeleton(self) -> nn.Module:
        """The original without storage."""
        found = self.ranks[0].skeleton
        assert isinstance(found, nn.Module)
        return found

    def entry(self, path: str) -> Entry:
        """A submodule of the original that is called by itself."""
        return Entry(self, self.skeleton, path)

    def _tp_members(self) -> Sequence[TensorParallel]:
        return list(self.ranks)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the original's state dict on every rank; or this module's own, `ranks.0. ...`."""
        if any(name.startswith("ranks.") for name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        first, *_ = [rank.load_state_dict(state_dict, strict, assign) for rank in self.ranks]
        return first

    def run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], entry: str = ""
    ) -> tuple[list[Any], Capture, Call]:
        """The flat results of every rank, and the capture and the call as rank 0 sees them."""
        blocks = list(self.ranks)
        found = [block.capture_for(args, kwargs, entry) for block in blocks]  # type: ignore[operator]
        numbers = {capture.number for capture, _ in found}
        assert len(numbers) == 1, "ranks capture in the same order"
        leaves = zip(*(_own_caches(call) for _, call in found), strict=True)
        entered = zip(*(_enter(leaf, self.devices) for leaf in leaves), strict=True)
        given = list(entered) or [()] * len(blocks)
        with plain():
            results = [list(values) for values in self._run(blocks, numbers.pop(), given)]
        for index, where in found[0][0].outputs.items():
            parts = [values[index] for values in results]
            whole = parts if len(parts) == 1 else _Gather.apply(where.dim, where.ranges, *parts)
            for values, value in zip(results, whole, strict=True):
                values[index] = value
        return results, *found[0]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each rank."""
        return [
            next((p.device for p in rank.parameters()), torch.device("cpu")) for rank in self.ranks
        ]

    def _run(self, blocks: Sequence[Any], number: int, given: Sequence[Sequence[Any]]) -> list[Any]:
        graphs: list[Graph] = [block._tp_codes[number].graph for block in blocks]
        envs: list[dict[str, Any]] = [{} for _ in blocks]
        inputs = [iter(values) for values in given]
        for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
            node, name = nodes[0], nodes[0].name
            assert all((n.op, n.name) == (node.op, name) for n in nodes), "ranks run the same graph"
            operands = [_operands(n, env) for n, env in zip(nodes, envs, strict=True)]
            match node.op:
                case "placeholder":
                    values: list[Any] = [next(values) for values in inputs]
                case "get_attr":
                    values = [_attribute(block, str(node.target)) for block in blocks]
                case "call_module":
                    inner = [block.get_submodule(str(node.target)) for block in blocks]
                    values = self._run(inner, node.kwargs["_graph"], [a for a, _ in operands])
                case "output":
                    return [args[0] for args, _ in operands]
                case _:
                    values = _call(node.target, operands)
            if self.watch is not None and node.op == "call_function":
                self.watch(blocks[0], node, values)
            for env, value in zip(envs, values, strict=True):
                env[name] = value
        raise AssertionError("a graph has an output")


def _operands(node: Node, env: dict[str, Any]) -> Any:
    return map_arg((node.args, dict(node.kwargs)), lambda n: env[n.name])


def _call(target: Any, operands: Sequence[Any]) -> list[Any]:
    joint = _JOINT.get(target)
    if target in (leave_grad_mode, leave_autocast):  # modes are the process's: the last one in is
        return [target(*args) for args, _ in reversed(operands)]  # the first one out
    if target is draw:
        return _draws(operands)
    if joint is None:
        return [target(*args, **kwargs) for args, kwargs in operands]
    return list(joint([args for args, _ in operands]))


def _draws(operands: Sequence[Any]) -> list[Any]:
    """What each rank draws; of the whole all draw the same, beginning where the first one began."""
    if operands[0][0][1] != "whole":
        return [draw(*args, **kwargs) for args, kwargs in operands]
    before, values = torch.get_rng_state(), []
    for (operator, _, _, _, *args), kwargs in operands:
        torch.set_rng_state(before)
        values.append(operator(*args, **{k: v for k, v in kwargs.items() if k != "group"}))
    return values


def _attribute(block: nn.Module, path: str) -> Any:
    value: Any = block
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _to(x: Tensor, like: Tensor) -> Tensor:
    return x if x.device == like.device else x.to(like.device)


def _total(xs: Sequence[Tensor]) -> list[Tensor]:
    total = xs[0].clone(memory_format=torch.contiguous_format)
    for x in xs[1:]:
        total += _to(x, total)
    return [total, *(_to(total, x).clone() for x in xs[1:])]


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return _Reduce.apply(*grads)  # type: ignore[no-any-return]


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_total(xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return _Copy.apply(*grads)  # type: ignore[no-any-return]


class _Added(Function):
    """A sum to which the first rank added a bias: the gradient of each rank's own."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, bias: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.flatten(0, -2).sum(0)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, dim: int, ranges: tuple[Ranges, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.dim, ctx.ranges = dim, ranges
        whole = place([_to(x, xs[0]) for x in xs], dim, ranges)
        return tuple(_to(whole, x).clone() for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *_Scatter.apply(ctx.dim, ctx.ranges, *grads))


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, dim: int, ranges: tuple[Ranges, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.dim, ctx.ranges = dim, ranges
        return tuple(take(x, dim, held).clone() for x, held in zip(xs, ranges, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *_Gather.apply(ctx.dim, ctx.ranges, *grads))


class _Enter(Function):
    """One input becomes every rank's: all compute the same gradient for it, one of them counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, devices: Sequence[torch.device]) -> tuple[Tensor, ...]:
        ctx.device = x.device
        return tuple(x.to(device, copy=True) for device in devices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.device), None


class _Leave(Function):
    """Every rank's result becomes one: each rank gets the gradient that it would get by itself."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.devices = [x.device for x in xs]
        return xs[0].view_as(xs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.to(device) for device in ctx.devices)


def _own_caches(call: Call) -> list[Any]:
    """A call's leaves with copies of those in caches: a rank may write to them."""
    leaves = list(call.leaves)
    for index, _ in call.places:
        leaves[index] = leaves[index].clone()
    return leaves


def _enter(leaves: Sequence[Any], devices: Sequence[torch.device]) -> tuple[Any, ...]:
    """One input for every rank; what was split for the ranks stays split."""
    first = leaves[0]
    if not isinstance(first, Tensor):
        return tuple(leaves)
    if first.requires_grad and all(leaf is first for leaf in leaves):
        return tuple(_Enter.apply(first, devices))
    # a model may write to its inputs, but each rank once
    pairs = enumerate(zip(leaves, devices, strict=True))
    return tuple(leaf.to(device, copy=rank > 0) for rank, (leaf, device) in pairs)


def _leave(values: Sequence[Any]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    if any(v.shape != first.shape for v in values):
        raise AutoTPError(
            message(
                "ranks return tensors of different shapes",
                values=str([tuple(v.shape) for v in values]),
                because="a result of the module is sharded",
            )
        )
    return _Leave.apply(*values)


def _first(calls: Sequence[Any]) -> list[Tensor]:
    return [args[0] for args in calls]


def _copy_all(calls: Sequence[Any]) -> Any:
    each = [_Copy.apply(*values) for values in zip(*_first(calls), strict=True)]
    return zip(*each, strict=True)


def _copy_each(calls: Sequence[Any]) -> Any:
    return zip(*(_Copy.apply(*_first(calls)) for _ in range(calls[0][1])), strict=True)


def _column_product(calls: Sequence[Any]) -> list[Tensor]:
    copies, alone = _Copy.apply(*_first(calls)), Group()
    return [
        column_product(x, weight, bias, transposed, alone)
        for x, (_, weight, bias, transposed) in zip(copies, calls, strict=True)
    ]


def _row_product(calls: Sequence[Any]) -> list[Tensor]:
    alone, bias = Group(), calls[0][2]
    in_first = None if bias is None else bias.detach()
    sums = _Reduce.apply(
        *(
            row_product(x, weight, None if rank else in_first, transposed, alone)
            for rank, (x, weight, _, transposed) in enumerate(calls)
        )
    )
    if bias is None:
        return list(sums)
    return [_Added.apply(total, call[2]) for total, call in zip(sums, calls, strict=True)]


def _reduce_scatter(calls: Sequence[Any]) -> Any:
    dim = calls[0][1]
    return _Scatter.apply(dim, _slices(calls), *_Reduce.apply(*_first(calls)))


def _gather_to_region(calls: Sequence[Any]) -> Any:
    dim, size = calls[0][1:3]
    return _Copy.apply(*_Gather.apply(dim, slices(size, len(calls)), *_first(calls)))


def _slices(calls: Sequence[Any]) -> tuple[Ranges, ...]:
    x, dim = calls[0][:2]
    return slices(x.shape[dim], len(calls))


_JOINT: dict[Any, Callable[..., Any]] = {
    next_seed: lambda calls: [ticket()] * len(calls),
    copy_all_to_region: _copy_all,
    column_product: _column_product,
    copy_each_to_region: _copy_each,
    copy_to_region: lambda calls: _Copy.apply(*_first(calls)),
    reduce_from_region: lambda calls: _Reduce.apply(*_first(calls)),
    row_product: _row_product,
    gather_from_region: lambda calls: _Gather.apply(*calls[0][1:], *_first(calls)),
    scatter_to_region: lambda calls: _Scatter.apply(*calls[0][1:], *_first(calls)),
    reduce_scatter_to_sequence: _reduce_scatter,
    gather_sequence_to_region: _gather_to_region,
    scatter_to_sequence: lambda calls: _Scatter.apply(calls[0][1], _slices(calls), *_first(calls)),
    gather_from_sequence: lambda calls: _Gather.apply(
        calls[0][1], slices(calls[0][2], len(calls)), *_first(calls)
    ),
    vocabulary.cross_entropy: vocabulary.cross_entropy_of_all,
}
