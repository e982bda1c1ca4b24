"""What autotp knows about Hugging Face transformers: its caches are pytrees once it is asked."""

from __future__ import annotations

import sys


def register_caches() -> None:
    """Let `torch.export` see into `DynamicCache`, if transformers is loaded."""
    if "transformers" not in sys.modules:
        return
    try:
        from transformers.integrations.executorch import register_dynamic_cache_export_support
    except ImportError:  # an older or a newer transformers: models with caches are refused then
        return
    register_dynamic_cache_export_support()
