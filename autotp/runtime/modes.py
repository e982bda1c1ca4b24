"""What torch has no public function for: whether someone sees every operator's result."""

from __future__ import annotations

import torch


def watched() -> bool:
    """Whether a TorchDispatchMode is on, as selective checkpointing and counters are: it may keep
    results. True where torch does not say. Compiled code decides for itself."""
    if torch.compiler.is_compiling():
        return False
    depth = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return depth is None or depth() > 0
