"""An optimizer of the original's parameters must not do nothing in silence.

    optimizer = AdamW(model.parameters())
    tp_model = autotp.parallelize(model)        # has parameters of its own
    tp_model(...).loss.backward()
    optimizer.step()                            # AutoTPError: it has no gradients to apply

torch calls a hook before each optimizer's step. It raises if the optimizer holds parameters of a
model that was parallelized and none of them has a gradient.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotp.errors import AutoTPError, message

_originals: dict[int, weakref.ref[nn.Parameter]] = {}  # by id: tensors do not compare to a bool
_hooks: list[Any] = []


def remember(model: nn.Module) -> None:
    """Note the parameters of a model that has been parallelized."""
    for parameter in model.parameters():
        forget = partial(_forget, id(parameter))
        _originals[id(parameter)] = weakref.ref(parameter, forget)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _forget(number: int, _: object) -> None:
    _originals.pop(number, None)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    given = [p for group in optimizer.param_groups for p in group["params"]]
    found = sum((ref := _originals.get(id(p))) is not None and ref() is p for p in given)
    has_closure = len(args) > 1 or kwargs.get("closure") is not None  # it makes gradients first
    if not found or has_closure or any(p.grad is not None for p in given):
        return
    raise AutoTPError(
        message(
            f"{type(optimizer).__name__} holds parameters of the original model",
            values=f"{found} of its {len(given)} parameters, none with a gradient",
            because="the parallel model has its own parameters, so this step would change nothing",
            try_="make the optimizer from tp_model.parameters(), after autotp.parallelize",
        )
    )
