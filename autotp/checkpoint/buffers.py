"""Values of buffers that no checkpoint holds, of a model that was built on the meta device.

Position tables and masks are computed when a model is built and not saved. On meta their values are
lost, so the model is built once more from its configuration, with parameters on meta and buffers
not: accelerate's `init_empty_weights` does that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autotp.checkpoint.names import some, temporary_buffers
from autotp.errors import CheckpointError, message


def real_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers on meta that are not saved, by their first names, with values."""
    lost = {name: b for name, b in temporary_buffers(model).items() if b.is_meta}
    if not lost:
        return {}
    twin, other = (temporary_buffers(_built_again(model, list(lost), seed)) for seed in (0, 1))
    for name, buffer in lost.items():
        if name not in twin or twin[name].shape != buffer.shape or twin[name].is_meta:
            raise _lost([name], "the model built again from its configuration has no such buffer")
        if not torch.equal(twin[name], other[name]):
            raise _lost([name], "its values are drawn at random when the model is built")
    return {name: twin[name].to(buffer.dtype) for name, buffer in lost.items()}


def _built_again(model: nn.Module, names: Sequence[str], seed: int) -> nn.Module:
    config = getattr(model, "config", None)
    if config is None or isinstance(config, Mapping) or not hasattr(config, "save_pretrained"):
        raise _lost(names, "a buffer that is not saved has no value on meta")
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        because = "building them again takes the package accelerate, which is not installed"
        raise _lost(names, because) from error
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        init_empty_weights(include_buffers=False),
    ):
        torch.default_generator.manual_seed(seed)
        return type(model)(copy.deepcopy(config))


def _lost(names: Sequence[str], because: str) -> CheckpointError:
    return CheckpointError(
        message(
            "the values of buffers are lost",
            values=some(names),
            because=because,
            try_="build the model under accelerate.init_empty_weights(include_buffers=False): "
            "its parameters are on meta, its buffers are not",
        )
    )
