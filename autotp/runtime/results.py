"""From a graph's flat results to what the original returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autotp import pytree
from autotp.caches import Given, Packed, unpack


def assembler(spec: Any) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """A function of flat results and the caller's caches, made once for each capture.

    The caches that were given hold the new keys and values afterwards, as after a call of the
    original, and stand in the result where it had them.
    """
    numbers = pytree.unflatten(list(range(spec.num_leaves)), spec)
    parts, outer = pytree.flatten_until(numbers, (Packed, Given))

    def part(of: Any, results: Sequence[Any], caches: Sequence[Any]) -> Any:
        if isinstance(of, Given):
            return caches[of.number]
        if isinstance(of, Packed):
            places: Any = of.leaves  # numbers here
            return unpack(Packed(tuple(results[i] for i in places), of.form))
        return results[of]

    def assemble(results: Sequence[Any], caches: Sequence[Any]) -> Any:
        found = [part(of, results, caches) for of in parts]
        output, states = pytree.unflatten(found, outer)
        for cache, state in zip(caches, states, strict=True):
            cache.__dict__.update(state.__dict__)
        return output

    return assemble
