"""A model and example inputs become a Program: an ATen graph with shapes, on the meta device.

before  model(input_ids=..., labels=...)
after   %linear : f32[s0, s1, 192] = torch.ops.aten.linear.default(%layer_norm, %qkv.weight,
%qkv.bias)

`torch.export` (non-strict, training IR, not decomposed) traces a copy without storage, so no weight
is copied or run. Batch and sequence stay dynamic. Checks of dtypes and devices that export inserts,
and conversions that change nothing, are dropped; literals of the capture device become the device
of the module. Requires a `skeleton` (see `autotp.skeleton`), which is not changed.
"""

from __future__ import annotations

import hashlib
import operator
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from autotp import pytree, sizes
from autotp.blocks import NotAlike, Stamps, stamped_blocks, within
from autotp.caches import Given, Packed, is_cache, pack, pack_all, unpack_all
from autotp.errors import CaptureError, message
from autotp.frames import with_room
from autotp.program import Guards, Program, Signature, TensorSpec
from autotp.recompute import recomputed_calls
from autotp.runtime.regions import (
    SIDE_EFFECTS,
    enter_autocast,
    enter_grad_mode,
    leave_autocast,
    leave_grad_mode,
)
from autotp.stamping import MARKS, STAMPED, Stamping

_META = torch.device("meta")
_CHECKS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
_CONVERSIONS = {
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.device,
    torch.ops.aten.to.other,
}
_CONVERTERS = {torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.type_as}
_TREATED = {
    torch.Tensor.new_tensor,
    torch.Tensor.__getitem__,
    torch.tensor,
    torch.as_tensor,
    *_CONVERTERS,
}
_PASSED_ON = (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError, AssertionError)
_WRAPPERS = (__file__, stamped_blocks.__code__.co_filename)
_REGIONS = {
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
}


def capture(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    entry: str = "",
    *,
    stamp: bool = True,
) -> Program:
    """Trace `skeleton(*args, **kwargs)`; of tensors among the inputs only shape and dtype count.

    With `entry` the submodule of that path is called instead. Without `stamp` every block is
    traced, and none written out like another.

    Raises CaptureError with the module and source line that refused.
    """
    if stamp:
        try:
            with stamped_blocks(skeleton) as stamps:
                return _captured(skeleton, args, kwargs, entry, stamps)
        except (NotAlike, CaptureError):
            pass  # traced as a whole below, or refused for its own sake
    return _captured(skeleton, args, kwargs, entry, Stamps())


def _captured(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    entry: str,
    stamps: Stamps,
) -> Program:
    packed = pack_all((args, dict(kwargs)))
    args, named = pytree.map_tensors(_blank, packed)
    begun = time.perf_counter()
    with recomputed_calls(skeleton) as recomputed:
        call = _Call(skeleton, entry)
        exported = with_room(lambda: _export(call, args, named, _fixed(packed)))
    seconds = time.perf_counter() - begun
    tensors, names, aliases = _tensors(skeleton, exported)
    graph = Graph()
    rebuilt = _Rebuild(graph, exported, names, Stamping(graph, skeleton, aliases, stamps))
    for path, first in stamps.follows.items():
        inside = [call for call in recomputed if within(call, first)]
        recomputed.update(path + call[len(first) :] for call in inside)
    signature = Signature(
        pytree.structure((args, named)),
        exported.call_spec.out_spec,
        tuple(rebuilt.inputs),
        _guards(exported, pytree.paths({"args": args, "kwargs": named})),
    )
    note = f"captured by torch.export in {seconds:.1f} s: {len(graph.nodes)} nodes"
    if stamps.follows:
        note += f", {len(stamps.follows)} blocks written like others"
    again = frozenset(recomputed)
    return Program(graph, tensors, aliases, signature, skeleton.training, again, provenance=(note,))


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    # a new tensor each time: export takes two arguments that are one object for one input
    blank = torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)
    return blank.requires_grad_(tensor.requires_grad)


class _KeepConstants(TorchFunctionMode):
    """Values of tensors that the model makes from Python numbers survive capture on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TREATED:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor:
            like, *args = args
            kwargs = {"dtype": like.dtype, "device": like.device, **kwargs}
            func = torch.tensor
        if (
            func in (torch.tensor, torch.as_tensor)
            and args
            and not isinstance(args[0], torch.Tensor)
        ):
            if torch.device(kwargs.get("device") or _META) == _META:
                return func(*args, **{**kwargs, "device": "cpu"}).to(_META)
        if func in _CONVERTERS and _under_autocast():
            # a conversion that changes nothing here returns its operand, and the graph would read
            # the converted value wherever the model reads the other
            args = (torch.ops.aten.alias.default(args[0]), *args[1:])
        if func is torch.Tensor.__getitem__:
            args = (args[0], _plain_index(args[1]))
        return func(*args, **kwargs)


def _under_autocast() -> bool:
    """Whether values may come in another dtype than the captured one."""
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _plain_index(index: Any) -> Any:
    """`x[:, [-1]]` as `x[:, -1:]`: a list of neighbours is a slice, which needs no tensor."""
    if isinstance(index, tuple):
        return tuple(_plain_index(item) for item in index)
    if not isinstance(index, list) or not all(type(item) is int for item in index):
        return index
    if index and index == list(range(index[0], index[0] + len(index))):
        return slice(index[0], index[-1] + 1 or None)
    return torch.tensor(index, device="cpu").to(_META)


class _Call(nn.Module):
    """Passes (args, kwargs) on, so that every call form is the same to export.

    Caches come and leave as data. Those that are given also leave in their state after the call;
    where the result holds one of them its number stands.
    """

    def __init__(self, model: nn.Module, entry: str) -> None:
        super().__init__()
        self.model = model
        self.entry = entry
        self.training = model.training

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (given, named), caches = unpack_all((args, kwargs))
        numbers = {id(cache): Given(number) for number, cache in enumerate(caches)}
        model = self.model.get_submodule(self.entry) if self.entry else self.model
        with _META, _KeepConstants():  # what is made without a device is on the module's
            result = model(*given, **named)
        result = pytree.map_some(is_cache, lambda c: numbers.get(id(c)) or pack(c), result)
        return result, [pack(cache) for cache in caches]


def _fixed(packed: Any) -> list[int | None]:
    """Of each leaf the dim that is not dynamic: the heads of caches."""
    found: list[int | None] = []
    for part in pytree.flatten_until(packed, Packed)[0]:
        if isinstance(part, Packed):
            found.extend(part.fixed or [None] * len(part.leaves))
        else:
            found.append(None)
    return found


def _export(
    call: _Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fixed: Sequence[int | None],
) -> ExportedProgram:
    shapes = ShapesCollection()
    for leaf, dim in zip(pytree.flatten((args, kwargs))[0], fixed, strict=True):
        if isinstance(leaf, torch.Tensor):
            dims: dict[int, Any] = {i: Dim.AUTO for i, size in enumerate(leaf.shape) if size > 1}
            if dim is not None:
                dims[dim] = Dim.STATIC
            shapes[leaf] = dims
    try:
        return export(call, (args, kwargs), dynamic_shapes=shapes, strict=False)  # type: ignore[arg-type]
    except Exception as error:
        raise _error_like(error)(
            message(
                f"torch.export cannot capture {type(call.model).__name__}",
                values=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
                because=_where(error, call.model),
                try_="example_inputs that take the path you train or run; control flow must not "
                "depend on tensor values",
            )
        ) from error


def _error_like(error: Exception) -> type[CaptureError]:
    """CaptureError; also of the model's own error class if the model's code raised it, so that
    callers who expect that class catch it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    torch_itself = trace is None or trace.tb_frame.f_globals["__name__"].startswith("torch.")
    if torch_itself or type(error) not in _PASSED_ON:
        return CaptureError
    return type("CaptureError", (CaptureError, type(error)), {})


def _where(error: BaseException, skeleton: nn.Module) -> str:
    """The innermost frame of the model's own code, and the module that it was running."""
    line, module, trace = "the model's code could not be traced", "", error.__traceback__
    paths = {id(child): path for path, child in skeleton.named_modules()}
    while trace is not None:
        frame = trace.tb_frame
        owner = frame.f_locals.get("self")
        if id(owner) in paths:
            module = paths[id(owner)] or type(owner).__name__
            line = f"{frame.f_code.co_filename}:{trace.tb_lineno} in {frame.f_code.co_name}"
        trace = trace.tb_next
    return f"module {module}, {line}" if module else line


def _tensors(
    skeleton: nn.Module, exported: ExportedProgram
) -> tuple[dict[str, TensorSpec], dict[str, str], dict[str, str]]:
    """Specs by first name, the name of each placeholder, and the further names of tied tensors."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    specs: dict[str, TensorSpec] = {}
    named = [
        *(("parameter", *item) for item in skeleton.named_parameters(remove_duplicate=False)),
        *(("buffer", *item) for item in skeleton.named_buffers(remove_duplicate=False)),
    ]
    for kind, name, tensor in named:
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        specs[name] = TensorSpec(tuple(tensor.shape), tensor.dtype, kind, tensor.requires_grad)
    names: dict[str, str] = {}
    for given in exported.graph_signature.input_specs:
        if given.kind in (InputKind.PARAMETER, InputKind.BUFFER) and given.target:
            name = given.target.removeprefix("model.")
            names[given.arg.name] = aliases.get(name, name)
        elif given.kind is InputKind.CONSTANT_TENSOR and given.target:
            value = exported.constants[given.target]
            assert isinstance(value, torch.Tensor)
            name = _constant_name(given.target.removeprefix("model."), value)
            specs[name] = TensorSpec(tuple(value.shape), value.dtype, "constant", value=value)
            names[given.arg.name] = name
        elif given.kind is not InputKind.USER_INPUT:
            raise CaptureError(f"inputs of kind {given.kind.name} are not supported")
    for out in exported.graph_signature.output_specs:
        if out.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                message(
                    f"the model writes to {out.target} ({out.kind.name})",
                    values=f"{out.target}",
                    because="a captured graph returns values, it does not keep state",
                    try_="model.eval(), if the state is only kept in training",
                )
            )
    return specs, names, aliases


def _constant_name(name: str, value: torch.Tensor) -> str:
    """A name that another capture gives to the same value only."""
    if value.is_meta:
        raise CaptureError(
            message(
                f"the value of the tensor {name} is lost",
                values=f"{name}, {str(value.dtype).removeprefix('torch.')}{[*value.shape]}",
                because="the model makes it while it runs, in a way that capture cannot follow",
                try_="register_buffer(name, value, persistent=False) in __init__",
            )
        )
    data = repr((value.dtype, value.shape, value.tolist())).encode()
    return f"{name}_{hashlib.sha256(data).hexdigest()[:8]}"


def _guards(exported: ExportedProgram, paths: Sequence[str]) -> Guards:
    found: list[tuple[int | str, ...] | None] = []
    inputs = {
        spec.arg.name
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    }
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in inputs:
            value = node.meta.get("val")
            tensor = isinstance(value, torch.Tensor)
            found.append(tuple(_entry(size) for size in value.shape) if tensor else None)
    ranges = {
        str(symbol): (int(max(0, bound.lower)), int(min(bound.upper, sys.maxsize)))
        for symbol, bound in exported.range_constraints.items()
    }
    # not public; without it the ranges and equal symbols above still hold
    conditions = list(getattr(exported, "_guards_code", None) or ())
    for index, path in enumerate(paths):  # by leaf: a cache is no tree at call time
        conditions = [c.replace(f"L{path}.size()", f"sizes[{index}]") for c in conditions]
        conditions = [c.replace(f"L{path}", f"leaves[{index}]") for c in conditions]
    return Guards(tuple(found), ranges, tuple(conditions))


def _entry(size: int | torch.SymInt) -> int | str:
    found = sizes.size_of(size)
    return str(size) if found[1] else found[0]


class _Rebuild:
    """Copies an exported graph: tensors become get_attr nodes at their first use, checks and
    conversions that change nothing go, and nested regions are written out in place."""

    def __init__(
        self,
        graph: Graph,
        exported: ExportedProgram,
        names: Mapping[str, str],
        stamping: Stamping,
    ) -> None:
        self.graph = graph
        self._stamping = stamping
        self.inputs: list[str] = []
        self.device: Node | None = None
        self._autocast = _under_autocast()
        self._new: dict[Node, Any] = {}
        self._names: dict[Node, str] = {}
        self._made: dict[str, Node] = {}
        for node in exported.graph.nodes:
            if node.op == "placeholder" and node.name in names:
                self._names[node] = names[node.name]
                if self.device is None:
                    self._device(node)
            elif node.op == "placeholder":
                self.inputs.append(node.name)
                self._new[node] = self.graph.create_node("placeholder", node.name, name=node.name)
                self._new[node].meta = {"val": node.meta.get("val")}
            elif node.op == "output":
                self.graph.output(self._map(node.args[0], node))
            else:
                self._copy(node, exported.graph_module)
        stamping.end(self.device)
        self.graph.eliminate_dead_code(lambda n: n.is_impure() or n.target in SIDE_EFFECTS)

    def _device(self, node: Node) -> None:
        source = self._tensor(node, node)
        self.device = self.graph.call_function(getattr, (source, "device"))
        self.device.name = "device"

    def _tensor(self, node: Node, user: Node) -> Node:
        return self._named(self._names[node], node.meta["val"], _origin(user))

    def _named(self, name: str, value: Any, origin: dict[str, Any]) -> Node:
        if name not in self._made:
            made = self.graph.create_node("get_attr", name, name=name.replace(".", "_"))
            made.meta = {"val": value, **origin}
            self._made[name] = made
        return self._made[name]

    def _map(self, value: Any, user: Node) -> Any:
        def operand(node: Node) -> Any:
            return self._tensor(node, user) if node in self._names else self._new[node]

        mapped = torch.fx.map_arg(value, operand)
        return self.device if mapped == _META else mapped

    def _copy(self, node: Node, module: nn.Module) -> None:
        if node.target in _CHECKS or node.op == "get_attr":
            return
        if node in self._new:  # a result of a nested graph that was written out
            return
        converts = node.target in _CONVERSIONS and not self._autocast and _changes_nothing(node)
        if converts or _takes_all(node) or _drops_nothing(node):
            self._new[node] = self._map(node.args[0], node)
        elif node.target in _REGIONS:
            self._region(node, module)
        elif node.target is torch.ops.aten.histc.default:
            self._count(node)
        elif node.target in MARKS:
            self._stamp(node)
        else:
            target, given = _as_slice(node)
            args = tuple(self._map(value, node) for value in given)
            kwargs = {key: self._map(value, node) for key, value in node.kwargs.items()}
            made = self.graph.create_node(node.op, target, args, kwargs, name=node.name)
            made.meta = {"val": node.meta.get("val"), **_origin(node)}
            self._stamping.require_apart(made)
            self._new[node] = made

    def _stamp(self, node: Node) -> None:
        """Marks of traced blocks, and the blocks that were not traced."""
        origin = _origin(node)
        if node.target is not STAMPED:
            value, path = self._map(node.args, node)
            self._new[node] = self._stamping.mark(node, value, path, origin)
            return
        values, _, path, number = self._map(node.args, node)
        self._new[node] = self._stamping.written(values, path, origin, self._named)[number]

    def _count(self, node: Node) -> None:
        """histc counts integers on some devices only, and floats on all."""
        kind, x = node.meta["val"].dtype, self._map(node.args[0], node)
        copy = torch.ops.aten._to_copy.default
        wide = self.graph.call_function(copy, (x,), {"dtype": torch.float32})
        made = self.graph.call_function(node.target, (wide, *node.args[1:]), node.kwargs)  # type: ignore
        back = self.graph.call_function(copy, (made,), {"dtype": kind})
        for step, value in ((wide, x.meta["val"]), (made, node.meta["val"])):
            step.meta = {"val": value.to(torch.float32), **_origin(node)}
        back.meta = {"val": node.meta["val"], **_origin(node)}
        self._new[node] = back

    def _region(self, node: Node, module: nn.Module) -> None:
        """Write a nested graph out between the calls that enter and leave its region."""
        at = next(
            i for i, arg in enumerate(node.args) if isinstance(arg, Node) and arg.op == "get_attr"
        )
        nested = node.args[at]
        assert isinstance(nested, Node)
        inner = module.get_submodule(str(nested.target))
        graph = getattr(inner, "graph", None)
        assert isinstance(graph, Graph)
        end: Any = leave_grad_mode
        if at == 1:
            entered = self.graph.call_function(enter_grad_mode, (node.args[0],))
        else:
            end = leave_autocast
            operands_ = (self.device, node.args[2], node.args[1])
            entered = self.graph.call_function(enter_autocast, operands_)
        entered.meta = _origin(node)
        operands = iter(node.args[at + 1 :])
        results: Any = None
        for child in graph.nodes:
            if child.op == "placeholder":
                given = next(operands)
                assert isinstance(given, Node)
                if given in self._names:
                    self._names[child] = self._names[given]
                else:
                    self._new[child] = self._new[given]
            elif child.op == "output":
                results = self._map(child.args[0], node)
            else:
                self._copy(child, inner)
        left = self.graph.call_function(end, (entered,))
        left.meta = _origin(node)
        for user in node.users:
            assert user.target is operator.getitem, "a nested graph returns a tuple"
            self._new[user] = results[user.args[1]]


def _as_slice(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """A call's operator and operands; `narrow` is a slice in other words."""
    match node.target, node.args:
        case torch.ops.aten.narrow.default, (x, dim, int(start), int(length)):
            end = start + length if start >= 0 else start + length or sys.maxsize
            return torch.ops.aten.slice.Tensor, (x, dim, start, end)
    return node.target, node.args


def _takes_all(node: Node) -> bool:
    """Whether a slice has all items: indexing writes one for each `:`."""
    match node.target, node.args:
        case torch.ops.aten.slice.Tensor, (_, _, 0 | None, sys.maxsize):
            return True
    return False


def _drops_nothing(node: Node) -> bool:
    """Whether a dropout is off: it returns its operand."""
    match node.target, node.args:
        case torch.ops.aten.dropout.default, (_, p, train):
            return not train or bool(p == 0)
    return False


def _origin(node: Node) -> dict[str, Any]:
    """Where a node comes from: module calls as (path, class), outermost first, and source lines."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        if path.startswith("model."):  # not the wrapper, nor the model itself
            again = key.rpartition("@")[2] if "@" in key else ""
            name = path.removeprefix("model.") + (f"@{again}" if again else "")
            calls.append((name, getattr(kind, "__name__", kind)))
    return {"calls": tuple(calls), "stack_trace": _own(node.meta.get("stack_trace"))}


def _own(trace: str | None) -> str | None:
    """A stack trace without the frame of the wrapper that is exported here."""
    frames = (trace or "").strip().split("\n")
    if trace is None or not any(file in trace for file in _WRAPPERS):
        return trace
    pairs = [frames[i : i + 2] for i in range(0, len(frames), 2)]
    return "\n".join(
        line for pair in pairs if not any(f in pair[0] for f in _WRAPPERS) for line in pair
    )


def _changes_nothing(node: Node) -> bool:
    before, after = node.args[0], node.meta.get("val")
    if not isinstance(before, Node) or node.kwargs.get("copy") or True in node.args[3:]:
        return False
    if any(isinstance(given, torch.memory_format) for given in (*node.args, *node.kwargs.values())):
        return False  # strides change
    value = before.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and (value.dtype, value.device) == (after.dtype, after.device)
    )
