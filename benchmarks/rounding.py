"""How far rounding alone moves a model's gradients: what no comparison can be stricter than."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autotp import pytree
from autotp.caches import pack_all
from autotp.verification import prepared, relative_error, total_of

SEEDS = 4
SINGLE = 2.0**-24  # float32's rounding: Hugging Face computes parts in it in any dtype


def moved(model: nn.Module, call: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """For each parameter the largest relative change of its gradient when all parameters are moved
    by half a unit in float32's last place, up or down at random; measured as `autotp.verify`
    measures errors."""
    twin, _ = prepared(model, dtype)
    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    wanted = _gradients(twin, call)
    floor = 1e-3 * max(float(grad.abs().max()) for grad in wanted.values())
    found = dict.fromkeys(wanted, 0.0)
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in twin.named_parameters():
                signs = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
                p.copy_(before[name] * (1 + signs.to(p.dtype) * SINGLE))
        for name, grad in _gradients(twin, call).items():
            found[name] = max(found[name], relative_error(wanted[name], grad, floor))
    return found


def _gradients(model: nn.Module, call: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    total_of(pytree.flatten(pack_all(model(**call)))[0]).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
