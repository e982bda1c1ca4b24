"""A model without storage: what capture works on, and all that is kept of the original model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers have shapes but no storage; ties are kept.

    Gradients and hooks on tensors are not copied. The model is not changed.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        blank = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(blank, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
