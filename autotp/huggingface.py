"""What autotp knows about Hugging Face transformers: caches as pytrees, and `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autotp.runtime.group import Group


def face_of(skeleton: nn.Module, forward: Callable[..., Any], like: nn.Module) -> Any:
    """The skeleton as a model that computes with `forward`: for `generate` and what goes with it.

    It has the original's configuration and methods, and the device and dtype of `like`; of weights
    it has shapes only.
    """

    class Face(type(skeleton)):  # type: ignore[misc]
        @property
        def device(self) -> torch.device:
            return next(like.parameters()).device

        @property
        def dtype(self) -> torch.dtype:
            return next(p.dtype for p in like.parameters() if p.is_floating_point())

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    face = copy.copy(skeleton)
    Face.__name__ = Face.__qualname__ = type(skeleton).__name__
    face.__class__ = Face
    return face


@contextmanager
def same_draws(group: Group) -> Iterator[None]:
    """All ranks sample the same tokens: generators are seeded alike, and set back afterwards."""
    with torch.random.fork_rng(enabled=group.size > 1):
        if group.size > 1:
            torch.manual_seed(group.broadcast_object(int(torch.randint(2**31, ()))))
        yield
