"""A training step of one rank on the meta device: what it would hold, send and compute.

The rank's real module runs, forward and backward, with tensors that have no storage; a dispatch
mode sees every operator. So recomputation, gradients and the runtime's own operators are counted as
they will be, for any model that was captured. Two operators are replaced by what an accelerator
runs: attention as one kernel that keeps a number for each query, and dropout that keeps a mask of
one byte.

`TorchDispatchMode` is documented, but stands in a private module of torch: this file is its only
user, and tests/test_estimate.py fails if it goes.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autotp.build import build
from autotp.planning import Plan
from autotp.runtime.block import Block
from autotp.runtime.group import Group
from autotp.runtime.random import draw
from autotp.runtime.sharded import plain

aten = torch.ops.aten
Work = Counter[tuple[str, str, float, float]]  # dtype, kind, FLOPs, bytes -> how often


@dataclass
class Step:
    """What one rank's step did. Bytes; `collectives` are (phase, kind, bytes) -> how often."""

    kept: int = 0  # at the end of the forward pass, without logits
    kept_whole: int = 0  # of these, what every rank holds alike
    logits: int = 0  # of these, along the vocabulary
    peak: int = 0  # the most that was held at a time
    collectives: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    work: Work = field(default_factory=Counter)


class _Rank(Group):
    """A rank whose peers are imagined: it notes what it would send."""

    def __init__(self, rank: int, size: int, note: Callable[[str, int], None]) -> None:
        super().__init__()
        self.rank, self.size, self._note = rank, size, note

    def all_reduce(self, x: Tensor, op: str = "sum", own: bool = False) -> Tensor:
        self._note("all-reduce", x.numel() * x.element_size())
        return x if own else torch.empty_like(x, memory_format=torch.contiguous_format)

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        return partial(self.all_reduce, x, own=True)

    def all_gather(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        counts = [math.prod(shape) for shape in shapes]  # padded to the largest, as in Group
        buffer = x.new_empty(self.size, max(counts))
        self._note("all-gather", buffer.numel() * x.element_size())
        rows = enumerate(zip(counts, shapes, strict=True))
        return [buffer[r, :n].view(tuple(shape)) for r, (n, shape) in rows]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        mine, width = parts[self.rank], max(part.numel() for part in parts)
        buffer = mine.new_empty(self.size, width)
        for row, part in zip(buffer, parts, strict=True):
            row[: part.numel()] = part.detach().reshape(-1)
        self._note("reduce-scatter", buffer.numel() * mine.element_size())
        return mine.new_empty(width)[: mine.numel()].view(mine.shape)

    def first_of(self, number: int) -> int:
        return number

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj


class _Watch(TorchDispatchMode):
    """Storages that come and go, and the work of every operator."""

    def __init__(self, vocabulary: frozenset[int], tokens: int) -> None:
        super().__init__()
        self.step, self.phase, self.placement = Step(), "forward", ""
        self._vocabulary, self._tokens = vocabulary, tokens
        self._live: dict[int, tuple[int, bool, bool]] = {}  # bytes, logits?, whole?
        self._refs: dict[int, Any] = {}
        self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain():  # a rank's part is a tensor like others here
            out = func(*args, **(kwargs or {}))
        new = [self._add(t) for t in tree_leaves(out) if isinstance(t, Tensor)]
        if any(new) or func._schema.is_mutable:
            self._work(func, args, kwargs or {}, out)
        return out

    def note(self, kind: str, size: int) -> None:
        self.step.collectives[self.phase, kind, size] += 1

    def add_work(self, dtype: torch.dtype, kind: str, flops: float, size: float) -> None:
        self.step.work[str(dtype).removeprefix("torch."), kind, flops, size] += 1

    def end_of_forward(self) -> None:
        """Note what is held now."""
        for size, logits, whole in self._live.values():
            self.step.logits += size * logits
            self.step.kept += size * (not logits)
            self.step.kept_whole += size * (whole and not logits)
        self.phase = "backward"

    def _add(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live:
            return False
        size = storage.nbytes()
        logits = tensor.dim() > 1 and tensor.shape[-1] in self._vocabulary
        whole = self.placement[:1] in ("I", "R") and tensor.numel() >= self._tokens
        self._live[key] = size, logits, whole
        self._refs[key] = weakref.ref(storage, partial(self._gone, key))
        self._now += size
        self.step.peak = max(self.step.peak, self._now)
        return True

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Storages that count elsewhere: parameters, buffers, gradients, inputs."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live[id(storage)] = 0, False, False
            self._refs[id(storage)] = storage

    def _gone(self, key: int, _: Any) -> None:
        self._now -= self._live.pop(key)[0]
        del self._refs[key]

    def _work(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        if func in (aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default):
            return
        size = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)
        count = flop_registry.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        dtype = tensors[0].dtype if tensors else torch.float32
        self.add_work(dtype, "product" if flops else "other", flops, float(size))


class _Attention(torch.autograd.Function):
    """Attention as one kernel: keeps its operands, its result, and one number for each query."""

    @staticmethod
    def forward(ctx: Any, watch: _Watch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # kernels lay the heads of a token side by side, so that joining them is no copy
        rows, heads = (*q.shape[:-3], q.shape[-2]), q.shape[-3:-2]
        out = q.new_empty((*rows, *heads, v.shape[-1])).transpose(-2, -3) if heads else q.clone()
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.watch = watch
        _Attention.count(watch, 1.0, q, k, v)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        _Attention.count(ctx.watch, 2.5, q, k, v)
        return None, torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    @staticmethod
    def count(watch: _Watch, times: float, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The backward computes the scores again: five products for the forward's two."""
        flops = 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        size = float(sum(2 * t.numel() * t.element_size() for t in (q, k, v)))
        watch.add_work(q.dtype, "product", times * flops, times * size)


class _Run(Interpreter):
    """A block's graph, node by node, so that it is known where a value lies."""

    def __init__(self, block: nn.Module, graph: Graph, watch: _Watch) -> None:
        super().__init__(block, graph=graph)
        self._watch = watch

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function":
            self._watch.placement = str(n.meta.get("placement", ""))
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is draw and args[0] is aten.dropout.default:
            x, p, train = args[4:7]
            return torch.native_dropout(x, p, train)[0] if train and p else x
        if target is draw and args[0] is aten.scaled_dot_product_attention.default:
            return _Attention.apply(self._watch, *args[4:7])
        if target is aten.scaled_dot_product_attention.default:
            return _Attention.apply(self._watch, *args[:3])
        return super().call_function(target, args, kwargs)


def dry_run(
    model: nn.Module,
    plan: Plan,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    rank: int = 0,
    recompute: Sequence[str] = (),
) -> Step:
    """One training step of a rank of a model on meta; `recompute` are the paths of modules that
    run under activation checkpointing."""
    axes = [axis for axis in plan.axes if axis.kind == "vocabulary"]
    widths = {width for axis in axes for width in (*axis.widths, axis.units)}
    losses = plan.program().graph.find_nodes(
        op="call_function", target=aten.cross_entropy_loss.default
    )
    widths |= {int(node.args[0].meta["val"].shape[-1]) for node in losses}
    inputs = [t for t in tree_leaves(call) if isinstance(t, Tensor)]
    tokens = math.prod(inputs[0].shape[:2]) if inputs else 1
    watch = _Watch(frozenset(widths), tokens)
    root = build(model, model, plan, _Rank(rank, plan.tp, watch.note), call)
    for path, block in root.named_modules():
        if isinstance(block, Block):
            for code in block._tp_codes:
                code.function = partial(_interpreted, code.graph, watch)
                code.recompute |= path in recompute
    with torch.no_grad():
        for parameter in root.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    args, kwargs = call
    with _counted(watch, root, inputs):
        loss = _loss(root(*args, **kwargs))
        watch.end_of_forward()
        loss.backward()
    return watch.step


def _interpreted(graph: Graph, watch: _Watch, block: nn.Module, *values: Any) -> Any:
    return _Run(block, graph, watch).run(*values)


@contextmanager
def _counted(watch: _Watch, root: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    def before() -> Iterator[Tensor]:
        yield from (*root.parameters(), *root.buffers(), *inputs)
        yield from (p.grad for p in root.parameters() if p.grad is not None)

    watch.ignore(before())
    with watch:
        yield


def _loss(results: Any) -> Tensor:
    """The results' loss; the sum of all numbers if there is none."""
    values = [getattr(results, "loss", None), *tree_leaves(results)]
    found = [t for t in values if isinstance(t, Tensor) and t.requires_grad]
    scalar = next((t for t in found if t.dim() == 0), None)
    return sum((t.float().sum() for t in found), torch.zeros(())) if scalar is None else scalar
