"""torch's optimizers and gradient clipping take their fast path for shards too.

They take it (all tensors in one call) for the types in a private list of torch, and work tensor by
tensor for any other. If the list is gone, they are slower and nothing else: a test says so.
"""

from __future__ import annotations

import importlib

HOMES = ("torch.utils._foreach_utils", "torch.optim.optimizer")
NAME = "_foreach_supported_types"


def supported(*types: type) -> None:
    """Add types to torch's lists."""
    for home in HOMES:
        known = getattr(importlib.import_module(home), NAME, None)
        if isinstance(known, list):
            known.extend(kind for kind in types if kind not in known)
