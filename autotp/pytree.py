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


def leaves_under(spec: Any, wanted: Callable[[type], bool]) -> set[int]:
    """Indices of the leaves that lie in a container whose class is wanted."""
    found: set[int] = set()

    def walk(spec: Any, start: int, inside: bool) -> int:
        if spec.is_leaf():
            if inside:
                found.add(start)
            return start + 1
        inside = inside or (isinstance(spec.type, type) and wanted(spec.type))
        for child in spec.children():
            start = walk(child, start, inside)
        return start

    walk(spec, 0, False)
    return found
