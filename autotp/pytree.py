"""Nested Python data, flattened: the one place that uses torch's pytree module.

`torch.utils._pytree` is not public by name, but it is what `torch.export` speaks (its specs are in
every ExportedProgram) and where Hugging Face registers its output classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure."""
    return _pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The inverse of `flatten`."""
    return _pytree.tree_unflatten(leaves, spec)


def flatten_until(tree: Any, kinds: type | tuple[type, ...]) -> tuple[list[Any], Any]:
    """Leaves and structure, where instances of some classes are leaves too."""
    return _pytree.tree_flatten(tree, is_leaf=lambda value: isinstance(value, kinds))


def structure(tree: Any) -> Any:
    """The structure alone; equal structures compare equal."""
    return _pytree.tree_structure(tree)


def paths(tree: Any) -> list[str]:
    """How each leaf is reached from the tree: `['kwargs']['input_ids']`."""
    return [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(tree)[0]]


def map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with each leaf replaced."""
    return _pytree.tree_map(function, tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The tree with each tensor replaced."""
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def map_some(wanted: Callable[[Any], bool], function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with each part that is wanted replaced; inside such a part nothing is looked at."""
    return _pytree.tree_map(lambda v: function(v) if wanted(v) else v, tree, is_leaf=wanted)


def register(
    kind: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Make a class a node whose children are numbered."""

    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(value)
        return [(_pytree.SequenceKey(i), child) for i, child in enumerate(children)], context

    _pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        flatten_with_keys_fn=with_keys,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
    )


def nodes_of(spec: Any, kind: type) -> list[tuple[int, Any]]:
    """The index of the first leaf, and the context, of each container of a class."""
    found: list[tuple[int, Any]] = []

    def walk(spec: Any, start: int) -> int:
        if spec.is_leaf():
            return start + 1
        if spec.type is kind:
            found.append((start, spec.context))
        for child in spec.children():
            start = walk(child, start)
        return start

    walk(spec, 0)
    return found
