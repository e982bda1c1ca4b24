"""Repeated blocks: while a model is captured, one block of a kind is traced for all of them.

before  for block in self.h: x = block(x, mask)         72 blocks that differ in parameters only
after   enter(x), ... the operators of h.0 ..., leave(x)
        stamped("h.1"), ..., stamped("h.70")            one operator each
        enter(x), ... the operators of h.71 ..., leave(x)

Blocks are siblings of one class whose submodules, parameters and attributes are alike. Where the
first of them read an attribute that differs, only blocks with the same value follow it; where the
call differs, a block is traced for itself. The second and the last are traced too, and
`autotp.stamping`, which writes the others out, compares them with the first: what a block keeps
outside of itself, such as a count of calls, shows there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autotp import pytree

FEWEST = 4  # of fewer, all would be traced
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type)
_OWN = ("_parameters", "_buffers", "_modules")


class NotAlike(Exception):
    """Blocks that looked alike are not: capture traces all of them."""


@torch.library.custom_op("tp_capture::enter", mutates_args=())
def enter(value: Tensor, path: str) -> Tensor:
    """An operand of the block whose operators follow."""
    return value.clone()


@torch.library.custom_op("tp_capture::leave", mutates_args=())
def leave(value: Tensor, path: str) -> Tensor:
    """A result of the block whose operators came before."""
    return value.clone()


@torch.library.custom_op("tp_capture::stamped", mutates_args=())
def stamped(values: Sequence[Tensor], like: Tensor, path: str, number: int) -> Tensor:
    """A result of a block that is not traced: like that of the block it follows."""
    return like.clone()


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


enter.register_fake(lambda value, path: _like(value))
leave.register_fake(lambda value, path: _like(value))
stamped.register_fake(lambda values, like, path, number: _like(like))
enter.register_autograd(lambda _, grad: (grad, None))
leave.register_autograd(lambda _, grad: (grad, None))
stamped.register_autograd(lambda _, grad: (None, grad, None, None))


@dataclass(frozen=True)
class _Operand:
    """A result that is an operand, by its number among the leaves of the call."""

    number: int


@dataclass
class _Traced:
    """The call of a block that was traced: what it was given, read and returned."""

    path: str
    key: Any
    reads: dict[tuple[str, str], Any] = field(default_factory=dict)
    tree: Any = None
    outputs: list[Any] = field(default_factory=list)  # tensors after `leave`, operands, plain data
    usable: bool = False

    def form(self) -> Any:
        """What is returned, tensors by their kind."""
        return self.tree, _facts(self.outputs)


@dataclass
class Stamps:
    """What was left out of a trace: the block that each path follows, and those to compare."""

    follows: dict[str, str] = field(default_factory=dict)
    compared: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


@dataclass
class _Kind:
    """Blocks alike, in order, and the attributes in which they differ, by submodule."""

    blocks: list[tuple[str, nn.Module]]
    differing: list[tuple[str, str]]
    firsts: list[_Traced] = field(default_factory=list)
    called: set[str] = field(default_factory=set)


@contextmanager
def stamped_blocks(model: nn.Module) -> Iterator[Stamps]:
    """While the model runs, blocks that are like an earlier one are one operator each."""
    stamps = Stamps()
    before: list[tuple[nn.Module, Any]] = []
    for kind in _kinds(model, ""):
        for path, block in kind.blocks:
            before.append((block, block.__dict__.get("forward")))
            call = functools.partial(_call, stamps, kind, path, block, block.forward)
            block.__dict__["forward"] = functools.update_wrapper(call, block.forward)
    try:
        yield stamps
    finally:
        for block, forward in before:
            del block.__dict__["forward"]
            if forward is not None:
                block.__dict__["forward"] = forward


def _call(
    stamps: Stamps,
    kind: _Kind,
    path: str,
    block: nn.Module,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    leaves, tree = pytree.flatten((args, kwargs))
    key = _key(leaves, tree)
    again = path in kind.called
    kind.called.add(path)
    if key is None or again or _has_hooks(block):
        return forward(*args, **kwargs)
    call = functools.partial(_traced, _Traced(path, key), kind, block, forward, leaves, tree)
    first = next((f for f in kind.firsts if f.key == key and _follows(block, f)), None)
    if first is None:
        traced, result = call()
        kind.firsts.append(traced)
        return result
    if not first.usable:
        return forward(*args, **kwargs)
    left = [p for p, other in kind.blocks if p not in kind.called and _follows(other, first)]
    if first.path not in stamps.compared.values() or not left:
        stamps.compared[path] = first.path
        traced, result = call()
        if not traced.usable or traced.form() != first.form():
            stamps.refused.append(path)
        return result
    stamps.follows[path] = first.path
    return _stamped(first, path, leaves, stamps)


def _stamped(first: _Traced, path: str, leaves: list[Any], stamps: Stamps) -> Any:
    """What the block would return, one operator for each tensor."""
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    made: list[Any] = []
    number = 0
    for output in first.outputs:
        if isinstance(output, _Operand):
            made.append(leaves[output.number])
        elif isinstance(output, Tensor):
            made.append(stamped(tensors, output, path, number))
            number += 1
            if made[-1].requires_grad != output.requires_grad:
                stamps.refused.append(path)
        else:
            made.append(output)
    return pytree.unflatten(made, first.tree)


def _traced(
    traced: _Traced,
    kind: _Kind,
    block: nn.Module,
    forward: Callable[..., Any],
    leaves: list[Any],
    tree: Any,
) -> tuple[_Traced, Any]:
    """The call, filled in, and its result; operands and results are marked."""
    entered: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in entered:
            entered[id(leaf)] = enter(leaf, traced.path)
    inner = [entered.get(id(leaf), leaf) for leaf in leaves]
    args, kwargs = pytree.unflatten(inner, tree)
    state = _state(block)
    with _recorded(block, kind.differing, traced.reads):
        result = forward(*args, **kwargs)
    unchanged = _is_state(state, _state(block))
    numbers = {id(leaf): i for i, leaf in enumerate(inner) if isinstance(leaf, Tensor)}
    outputs, traced.tree = pytree.flatten(result)
    given: list[Any] = []
    for output in outputs:
        if not isinstance(output, Tensor):
            traced.outputs.append(output)
            given.append(output)
        elif id(output) in numbers:
            traced.outputs.append(_Operand(numbers[id(output)]))
            given.append(leaves[numbers[id(output)]])
        else:
            traced.outputs.append(leave(output, traced.path))
            given.append(traced.outputs[-1])
    tensors = [id(output) for output in outputs if isinstance(output, Tensor)]
    plain = all(isinstance(output, (Tensor, *_PLAIN)) for output in outputs)
    marked = bool(entered) and any(isinstance(output, Tensor) for output in traced.outputs)
    traced.usable = marked and plain and unchanged and len({*tensors}) == len(tensors)
    return traced, pytree.unflatten(given, traced.tree)


def _key(leaves: Sequence[Any], tree: Any) -> Any:
    """What a call must share with another for its operators to be the same; None: nothing does.

    Sizes are compared as text, for a comparison of symbols would bind them.
    """
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    autocast = [
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
    ]
    return tree, _facts(leaves), torch.is_grad_enabled(), autocast


def _facts(leaves: Sequence[Any]) -> list[Any]:
    """What is known of each leaf, and which tensors are one."""
    seen: dict[int, int] = {}
    facts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            number = seen.setdefault(id(leaf), len(seen))
            sizes = (str(tuple(leaf.shape)), str(leaf.stride()))
            facts.append((number, *sizes, leaf.dtype, leaf.device, leaf.requires_grad))
        else:
            facts.append((type(leaf), leaf))
    return facts


def _follows(block: nn.Module, first: _Traced) -> bool:
    """Whether the attributes that the first read have the same values here."""
    return all(
        _same(block.get_submodule(path).__dict__[name], value)
        for (path, name), value in first.reads.items()
    )


@contextmanager
def _recorded(
    block: nn.Module, attributes: Sequence[tuple[str, str]], reads: dict[tuple[str, str], Any]
) -> Iterator[None]:
    """Notes which of some attributes the block's code reads."""
    names: dict[str, list[str]] = {}
    for path, name in attributes:
        names.setdefault(path, []).append(name)
    before = []
    for path, found in names.items():
        module = block.get_submodule(path)
        before.append((module, module.__class__))
        module.__class__ = _watched(module.__class__, path, found, reads)
    try:
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


def _watched(
    kind: type[nn.Module], path: str, names: Sequence[str], reads: dict[tuple[str, str], Any]
) -> type[nn.Module]:
    """The class, with properties that note reads."""

    def noted(name: str) -> property:
        def read(self: nn.Module) -> Any:
            reads[path, name] = self.__dict__[name]
            return self.__dict__[name]

        return property(read, lambda self, value: self.__dict__.__setitem__(name, value))

    body: dict[str, Any] = {name: noted(name) for name in names}
    body.update(__module__=kind.__module__, __qualname__=kind.__qualname__)
    return type(kind.__name__, (kind,), body)


def _state(block: nn.Module) -> list[dict[str, list[Any]]]:
    """What a call must leave as it was for others to follow it: attributes, and what those that
    are containers hold."""
    found = []
    for module in block.modules():
        values = dict(vars(module))
        for own in _OWN:
            values |= vars(module)[own]
        found.append({name: [value, *_held(value)] for name, value in values.items()})
    return found


def _held(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return [*value] if isinstance(value, (list, tuple, set)) else []


def _is_state(before: list[dict[str, list[Any]]], after: list[dict[str, list[Any]]]) -> bool:
    """Whether two states hold the same objects."""
    if [[*attributes] for attributes in before] != [[*attributes] for attributes in after]:
        return False
    return all(
        len(held) == len(now[name]) and all(a is b for a, b in zip(held, now[name], strict=True))
        for was, now in zip(before, after, strict=True)
        for name, held in was.items()
    )


def _has_hooks(block: nn.Module) -> bool:
    """Whether hooks would see what happens inside."""
    return any(
        vars(module).get("_forward_hooks") or vars(module).get("_forward_pre_hooks")
        for module in block.modules()
        if module is not block
    )


def _kinds(module: nn.Module, prefix: str) -> Iterator[_Kind]:
    """Siblings alike, outermost first; nothing is looked for inside of them."""
    groups: list[list[tuple[str, nn.Module]]] = []
    signatures: list[Any] = []
    for name, child in module.named_children():
        signature = _signature(child)
        if signature not in signatures:
            signatures.append(signature)
            groups.append([])
        groups[signatures.index(signature)].append((f"{prefix}{name}", child))
    for blocks in groups:
        if len(blocks) < FEWEST or not any(True for _ in blocks[0][1].children()):
            for path, block in blocks:
                yield from _kinds(block, f"{path}.")
        else:
            yield _Kind(blocks, _differing([block for _, block in blocks]))


def _signature(block: nn.Module) -> Any:
    """What siblings share: classes, parameters, buffers, names of attributes, and ties."""
    found: list[Any] = []
    seen: dict[int, int] = {}
    for path, module in block.named_modules():
        found.append((path, type(module), module.training, sorted(map(str, module.__dict__))))
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    found.append((name, None))
                    continue
                number = seen.setdefault(id(tensor), len(seen))
                kind = (tensor.shape, tensor.dtype, tensor.requires_grad, tensor.stride())
                found.append((name, number, *kind))
    return found


def _differing(blocks: Sequence[nn.Module]) -> list[tuple[str, str]]:
    """The attributes, by path of the submodule, that are not the same in all blocks."""
    first, *others = ([*block.named_modules()] for block in blocks)
    found: list[tuple[str, str]] = []
    for index, (path, module) in enumerate(first):
        siblings = [vars(other[index][1]) for other in others]
        for name, value in vars(module).items():
            if name in _OWN or name.startswith("_forward_") or name.startswith("_backward_"):
                continue
            if not all(_same(value, sibling[name]) for sibling in siblings):
                found.append((path, name))
    return found


def within(call: str, path: str) -> bool:
    """Whether a module call, "h.0.attn" or "h.0@1", is a module's or that of one inside it."""
    return call == path or call.startswith((f"{path}.", f"{path}@"))


def _same(left: Any, right: Any) -> bool:
    """Whether two values are one, or plain data of equal value."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, _PLAIN):
        return bool(left == right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, Mapping):
        pairs = ((left[key], right[key]) for key in left if key in right)
        return list(left) == list(right) and all(_same(*pair) for pair in pairs)
    if isinstance(left, (set, frozenset)):
        return all(isinstance(item, _PLAIN) for item in left) and bool(left == right)
    return False


__all__ = ["NotAlike", "Stamps", "enter", "leave", "stamped", "stamped_blocks", "within"]
