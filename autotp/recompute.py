"""Which module calls the model runs under activation checkpointing.

before  x = torch.utils.checkpoint.checkpoint(block, x)     in the model's code
after   Program.recomputed = {"h.0", "h.1", ...}            the operators are captured as ever

`torch.export` traces through `checkpoint` and forgets it. While it does, every module call looks
whether torch's checkpointing is among its callers, and which module is the outermost inside; the
emitted blocks then recompute what the model would.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

_CHECKPOINT = torch.utils.checkpoint.__file__


@contextmanager
def recomputed_calls(model: nn.Module) -> Iterator[set[str]]:
    """The paths of modules that are called by checkpointing, filled while the model runs."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: set[str] = set()

    def look(module: nn.Module, _: Any) -> None:
        inside = _checkpointed(module, sys._getframe(1))
        if id(inside) in paths:
            found.add(paths[id(inside)])

    handle = register_module_forward_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def _checkpointed(module: nn.Module, frame: FrameType | None) -> nn.Module | None:
    """The outermost module that runs inside of torch's checkpointing, if a call comes from it.

    Locals are read of calls inside only: Python 3.11 keeps what `f_locals` gave as long as the
    frame runs, so that what the caller of `parallelize` deletes would stay alive.
    """
    inside: list[FrameType] = []
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        if frame.f_code.co_name == "forward":
            inside.append(frame)
        frame = frame.f_back
    if frame is None:
        return None
    callers = (forward.f_locals.get("self") for forward in reversed(inside))
    return next((caller for caller in callers if isinstance(caller, nn.Module)), module)
