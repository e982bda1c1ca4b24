"""Room for Python's frames.

CPython keeps the frames of Python functions in pieces of 16 kB that it maps and unmaps again. A
loop whose calls pass the end of a piece does so in every turn: up to a fifth of a trace's time, as
chance has it with the depth of the caller's stack. A frame that does not fit is given a piece of
its own, of the next power of two, and the frames of what it calls live in the rest.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_SLOTS = 70_000  # of 8 bytes: almost half of a piece of 1 MB is left


def with_room(work: Callable[[], T]) -> T:
    """What `work()` returns, called where the frames below it have room.

    Only addresses are taken: of the piece, pages that no frame reaches are never used.
    """
    found: T = _roomy(work)
    return found


def _call(work: Callable[[], Any]) -> Any:
    return work()


_roomy = types.FunctionType(_call.__code__.replace(co_stacksize=_SLOTS), {})
