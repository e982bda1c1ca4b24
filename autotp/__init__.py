"""autotp: tensor parallelism for unmodified PyTorch models."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
_HOMES = {
    "parallelize": "autotp.api",
    "plan": "autotp.api",
    "verify": "autotp.api",
    "save": "autotp.checkpoint.training",
    "load": "autotp.checkpoint.training",
    "Report": "autotp.verification",
    "Plan": "autotp.planning",
    "AutoTPError": "autotp.errors",
    "CaptureError": "autotp.errors",
    "CheckError": "autotp.errors",
    "CheckpointError": "autotp.errors",
    "GroupError": "autotp.errors",
    "PlanError": "autotp.errors",
    "ShardError": "autotp.errors",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autotp' has no attribute {name!r}")
