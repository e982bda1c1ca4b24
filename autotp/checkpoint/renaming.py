"""Names that transformers changes when it loads a checkpoint of an older layout.

Its conversion mapping has plain renames, which are applied here, and conversions that join or cut
tensors, which are not: the tensors are missing then, and the error says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def renaming(model: nn.Module) -> Callable[[str], str]:
    """A stored name as the model's class calls it now; the same name for other modules."""
    changes = _renames(model)

    def renamed(name: str) -> str:
        for change in changes:
            name, _ = change.rename_source_key(name)
        return name

    return renamed


def _renames(model: nn.Module) -> list[Any]:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return []
    try:  # not in its documentation; it may move
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:
        return []
    return [c for c in get_model_conversion_mapping(model) or () if type(c) is WeightRenaming]
