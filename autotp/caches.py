"""Caches of keys, values and states as data: tensors, and a form that says where they lie.

    DynamicCache, two layers   ->   leaves (keys, values, keys, values), form (classes, attributes)

A cache is any object with `update` and `get_seq_length` (Hugging Face's `Cache`). Its attributes
are walked; what is found decides: tensors are leaves, numbers that count tokens become leaves too
(sizes of empty tensors, so that a graph serves every length), and all else is the form, which a
graph is captured for. A number counts if the class's constructor does not take it, or if it is the
length that a cache is made for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch

from autotp import pytree
from autotp.errors import CaptureError, message

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, type)


@dataclass(frozen=True)
class Form:
    """A cache without its tensors: nested tuples, equal for caches that one graph serves."""

    tree: Any
    paths: tuple[str, ...]  # of the leaves, as `layers.0.keys`


@dataclass(frozen=True, eq=False)
class Packed:
    """A cache as leaves and form. `fixed` has for each leaf the dim of the heads, where known."""

    leaves: tuple[torch.Tensor, ...]
    form: Form
    fixed: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Given:
    """In a result: the cache of this number among those that were given."""

    number: int


def is_cache(value: Any) -> bool:
    """Whether an object holds keys and values of earlier tokens, packed or not."""
    if isinstance(value, Packed):
        return True
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def pack(cache: Any) -> Packed:
    """A cache as data; a packed one is that already.

    Raises CaptureError for an attribute that is neither tensor nor constant.
    """
    if isinstance(cache, Packed):
        return cache
    leaves: list[torch.Tensor] = []
    paths: list[str] = []
    tree = _pack(cache, "", leaves, paths)
    return Packed(tuple(leaves), Form(tree, tuple(paths)))


def unpack(packed: Packed) -> Any:
    """A new cache object of the same class."""
    return _unpack(packed.form.tree, iter(packed.leaves), _device(packed.leaves))


def pack_all(tree: Any) -> Any:
    """Nested data with every cache packed."""
    return pytree.map_some(is_cache, pack, tree)


def unpack_all(tree: Any) -> tuple[Any, list[Any]]:
    """Nested data with every packed cache an object again, and these objects, in order."""
    found: list[Any] = []

    def made(packed: Packed) -> Any:
        found.append(unpack(packed))
        return found[-1]

    return pytree.map_some(lambda value: isinstance(value, Packed), made, tree), found


def paths_in(spec: Any) -> list[tuple[int, str]]:
    """The leaves of packed caches in a pytree's structure: index and path in the cache."""
    return [
        (start + offset, path)
        for start, form in pytree.nodes_of(spec, Packed)
        for offset, path in enumerate(form.paths)
    ]


def _pack(value: Any, path: str, leaves: list[torch.Tensor], paths: list[str]) -> Any:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        paths.append(path)
        return ("tensor",)
    if isinstance(value, _CONSTANTS):
        return ("constant", value)
    if isinstance(value, torch.device):
        return ("device",)
    inner = f"{path}." if path else ""
    if isinstance(value, (list, tuple)):
        items = tuple(_pack(v, f"{inner}{i}", leaves, paths) for i, v in enumerate(value))
        return ("sequence", type(value), items)
    if isinstance(value, dict):
        items = tuple((k, _pack(v, f"{inner}{k}", leaves, paths)) for k, v in value.items())
        return ("mapping", type(value), items)
    if not hasattr(value, "__dict__") or isinstance(value, torch.nn.Module) or callable(value):
        raise CaptureError(
            message(
                f"a cache holds {type(value).__name__} at {path}",
                values=f"{value!r}"[:200],
                because="a cache must be made of tensors, numbers and layers to pass into a graph",
                try_="a DynamicCache or StaticCache without offloading or quantization",
            )
        )
    settings, entries = _settings(cast(Hashable, type(value))), list[Any]()
    for name, held in value.__dict__.items():
        if _counts(held) and (name not in settings or name == "max_cache_len"):
            device = getattr(value, "device", None)
            leaves.append(torch.empty((held, 0), dtype=torch.bool, device=device))
            paths.append(f"{inner}{name}")
            entries.append((name, ("count",)))
        else:
            entries.append((name, _pack(held, f"{inner}{name}", leaves, paths)))
    return ("object", type(value), tuple(entries))


def _unpack(tree: Any, leaves: Any, device: Any) -> Any:
    match tree:
        case ("tensor",):
            return next(leaves)
        case ("count",):
            return next(leaves).shape[0]
        case ("constant", value):
            return value
        case ("device",):
            return device
        case ("sequence", kind, items):
            return kind(_unpack(item, leaves, device) for item in items)
        case ("mapping", kind, items):
            return kind((key, _unpack(item, leaves, device)) for key, item in items)
        case ("object", kind, items):
            made = object.__new__(kind)
            for name, item in items:
                made.__dict__[name] = _unpack(item, leaves, device)
            return made
    raise AssertionError(tree)


def _counts(value: Any) -> bool:
    """Whether a number may change from call to call."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _device(leaves: Any) -> torch.device | None:
    return next((leaf.device for leaf in leaves if leaf.dim() > 1), None)


@functools.cache
def _settings(kind: type) -> frozenset[str]:
    """What constructors of a class take: numbers that stay what they were."""
    found: set[str] = set()
    for base in kind.__mro__[:-1]:
        if "__init__" in base.__dict__:
            found.update(inspect.signature(base.__dict__["__init__"]).parameters)
    return frozenset(found)


pytree.register(Given, lambda given: ([], given.number), lambda _, number: Given(number))
pytree.register(Packed, lambda p: (list(p.leaves), p.form), lambda v, form: Packed(tuple(v), form))
