"""Grad-mode and autocast regions of the original model, as calls in the flat graph."""

from __future__ import annotations

from typing import Any

import torch


def enter_grad_mode(enabled: bool) -> bool:
    """Set the grad mode; returns the mode to restore. Inside a caller's no_grad it stays off."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled and before)
    return before


def leave_grad_mode(before: bool) -> None:
    """Restore the grad mode."""
    torch.set_grad_enabled(before)


def enter_autocast(device: torch.device, enabled: bool, dtype: torch.dtype | None) -> Any:
    """Enter an autocast region on the module's device; returns the context to leave."""
    context = torch.autocast(device.type, dtype=dtype, enabled=enabled)
    context.__enter__()
    return context


def leave_autocast(context: Any) -> None:
    """Leave an autocast region."""
    context.__exit__(None, None, None)


SIDE_EFFECTS = (enter_grad_mode, leave_grad_mode, enter_autocast, leave_autocast)
