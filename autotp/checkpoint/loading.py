"""Where the tensors of a rank come from: a model in memory, or a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from autotp.axes import Ranges
from autotp.checkpoint.buffers import real_buffers
from autotp.checkpoint.names import stored_names
from autotp.checkpoint.reading import Files
from autotp.errors import CheckpointError, message
from autotp.runtime.weights import shard

Source: TypeAlias = Callable[[str, Tensor, Sequence[Ranges]], Tensor]


def from_memory(name: str, tensor: Tensor, ranges: Sequence[Ranges]) -> Tensor:
    """The part of a tensor that the model itself holds."""
    return shard(tensor, ranges)


class Checkpoint:
    """A checkpoint that fits a model. Calling it reads the part of one tensor."""

    def __init__(self, path: str | Path, model: nn.Module) -> None:
        self._files = Files(path)
        self._names = stored_names(model, self._files.tensors)
        self._buffers = real_buffers(model)

    def __call__(self, name: str, tensor: Tensor, ranges: Sequence[Ranges]) -> Tensor:
        """The rank's part of the tensor that the model calls `name`, in the model's dtype."""
        if name not in self._names:  # it is not saved
            return shard(self._buffers.get(name, tensor), ranges)
        first, *others = self._names[name]
        part = self._files.read(first, ranges, tensor.dtype)
        for other in others:
            if not torch.equal(part, self._files.read(other, ranges, tensor.dtype)):
                raise CheckpointError(
                    message(
                        "a tied tensor is stored twice, with different values",
                        values=f"{first} and {other} in {self._files.path}",
                        because=f"the model has one tensor for both: {name}",
                        try_="a configuration that does not tie them (tie_word_embeddings=False)",
                    )
                )
        return part

    @property
    def fingerprint(self) -> str:
        """A hash of names, shapes and dtypes: what ranks can compare without reading all."""
        lines = [f"{n} {t.shape} {t.dtype}" for n, t in sorted(self._files.tensors.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
