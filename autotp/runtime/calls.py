"""A call as the graphs see it: its leaves, and the key under which a capture is found.

Done on every call, so plain containers are walked here and only others go through pytree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autotp import pytree
from autotp.caches import is_cache, pack
from autotp.program import Guards

_PLAIN = (bool, int, float, str, type(None))
_LEAVES = (Tensor, *_PLAIN)


@dataclass(frozen=True)
class Call:
    """One call: arguments in their normal form, leaves in pytree's order, and its structure.

    `entry` is the path of the submodule that is called, "" for the model itself.
    `caches` are the caller's cache objects, `places` the leaves that lie in them: (index, path).
    """

    entry: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    structure: Any
    caches: list[Any]
    places: list[tuple[int, str]]

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides whether a graph may serve the call: all but sizes above 1."""
        return (self.entry, self.structure, *map(_key, self.leaves))


def read(entry: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Flatten a call. Caches are taken apart; the objects stay what they are."""
    leaves: list[Any] = []
    caches: list[Any] = []
    places: list[tuple[int, str]] = []

    def walk(value: Any) -> Any:
        if isinstance(value, _LEAVES):
            leaves.append(value)
            return None
        if type(value) in (tuple, list):
            return (type(value), *map(walk, value))
        if type(value) is dict:
            return (dict, *((name, walk(item)) for name, item in value.items()))
        if is_cache(value):
            packed = pack(value)
            caches.append(value)
            places.extend(enumerate(packed.form.paths, len(leaves)))
            leaves.extend(packed.leaves)
            return packed.form
        found, spec = pytree.flatten(value)
        leaves.extend(found)
        return str(spec)

    structure = (walk(args), walk(kwargs))
    return Call(entry, args, kwargs, leaves, structure, caches, places)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, *[size if size < 2 else -1 for size in leaf.shape])
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else repr(leaf)


def described(call: Call, names: Sequence[str], mode: str) -> dict[str, str]:
    """What of a call a graph is captured for, by argument: `*` is a size that may vary."""
    cached = {index for index, _ in call.places}
    form = {"mode": mode}
    if call.entry:
        form["entry"] = call.entry
    for index, (name, leaf) in enumerate(zip(names, call.leaves, strict=True)):
        if index in cached:
            name = name.rstrip("0123456789").rstrip("_")
        if isinstance(leaf, Tensor):
            sizes = ", ".join(str(size) if size < 2 else "*" for size in leaf.shape)
            text = f"{str(leaf.dtype).removeprefix('torch.')}[{sizes}]"
        else:
            text = repr(leaf)
        form.setdefault(name.removeprefix("kwargs_"), text)
    return form


def difference(form: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> str:
    """In what a call form differs from the most similar one of others."""
    if not others:
        return "the first call"
    nearest = min(others, key=lambda other: len(form.items() ^ other.items()))
    found = [f"no {name}" for name in nearest if name not in form]
    for name, text in form.items():
        if nearest.get(name) != text:
            found.append(f"{name} {text}" + (f", not {nearest[name]}" if name in nearest else ""))
    return "; ".join(found) or "sizes that its conditions do not allow"


def holds(guards: Guards) -> Callable[[Sequence[Any]], bool]:
    """A function that says whether the sizes of a call's leaves are those of a capture.

    The guards become one expression, evaluated from left to right.
    """
    terms: list[str] = []
    known: dict[str, str] = {}
    for index, dims in enumerate(guards.sizes):
        for dim, wanted in enumerate(dims or ()):
            here = f"sizes[{index}][{dim}]"
            if isinstance(wanted, int):
                terms.append(f"{here} == {wanted}")
            elif wanted in known:
                terms.append(f"{here} == {known[wanted]}")
            else:
                known[wanted] = here
                if wanted in guards.ranges:
                    low, high = guards.ranges[wanted]
                    terms.append(f"{low} <= {here} <= {high}")
    terms.extend(f"({condition})" for condition in guards.conditions)
    scope: dict[str, Any] = {}  # a function, not eval: torch.compile can look into it
    exec(f"def fits(sizes, leaves): return {' and '.join(terms) or 'True'}", scope)
    fits = scope["fits"]

    def check(leaves: Sequence[Any]) -> bool:
        sizes = [leaf.shape if isinstance(leaf, Tensor) else () for leaf in leaves]
        return bool(fits(sizes, leaves))

    return check
