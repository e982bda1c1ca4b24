"""What a user reads of a Hugging Face model: configuration, `generate`, parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autotp.huggingface import FACTS, Entry, entry_of, face_of, same_draws
from autotp.runtime.group import Group
from autotp.runtime.inputs import same_inputs


class Face(nn.Module):
    """The original's configuration and methods, computing with this module."""

    _face: tuple[Any] | None
    recomputes: bool  # whether layers are under activation checkpointing

    @property
    def skeleton(self) -> nn.Module:
        """The original without storage."""
        raise NotImplementedError

    @property
    def group(self) -> Group:
        """The ranks that share the model."""
        raise NotImplementedError

    def call(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The forward of the original's submodule at a path; "" is the model itself."""
        raise NotImplementedError

    @property
    def face(self) -> Any:
        """The original as a model that computes with this module."""
        if self._face is None:
            self._face = (face_of(self.skeleton, self),)
        return self._face[0]

    @property
    def config(self) -> Any:
        """The original's configuration."""
        return self.skeleton.config

    @property
    def generation_config(self) -> Any:
        """How `generate` works unless told otherwise."""
        return self.face.generation_config

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the floating-point parameters."""
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The original's `generate`, with this rank's heads in its cache. Call it on every rank.

        All ranks sample what the first rank's generator draws.
        """
        same_inputs(self.group, {**dict(enumerate(args)), **kwargs})
        with same_draws(self.group, self.device):
            return self.face.generate(*args, **kwargs)

    def can_generate(self) -> bool:
        """Whether the original generates."""
        return bool(getattr(self.skeleton, "can_generate", lambda: False)())

    def entry(self, path: str) -> Entry:
        """A submodule of the original that computes what the original's computes when it is called
        by itself. Every rank must call it."""
        return Entry(self, self.skeleton, path)

    def get_input_embeddings(self) -> Any:
        """The embedding of tokens, whole for the caller however it is split."""
        return entry_of(self, self.skeleton, "get_input_embeddings")

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """The encoder of a model that has one."""
        return entry_of(self, self.skeleton, "get_encoder", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in FACTS and "_skeleton" in self.__dict__ and hasattr(self.skeleton, name):
                return getattr(self.face, name)
            raise

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """The original's: layers are computed again in the backward, which saves their memory.

        The next training call is captured anew.
        """
        self.skeleton.gradient_checkpointing_enable(*args, **kwargs)  # type: ignore[operator]
        self.recomputes = True

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """The same under the name that newer versions of transformers give it."""
        self.skeleton.activation_checkpointing_enable(*args, **kwargs)  # type: ignore[operator]
        self.recomputes = True

    def gradient_checkpointing_disable(self) -> None:
        """The original's: nothing is computed again."""
        self.skeleton.gradient_checkpointing_disable()  # type: ignore[operator]
        self.recomputes = False

    def activation_checkpointing_disable(self) -> None:
        """The same under the name that newer versions of transformers give it."""
        self.skeleton.activation_checkpointing_disable()  # type: ignore[operator]
        self.recomputes = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether layers are computed again in the backward."""
        return self.recomputes

    @property
    def is_activation_checkpointing(self) -> bool:
        """The same under the name that newer versions of transformers give it."""
        return self.recomputes

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        """Parameters of the whole model."""
        return int(self.skeleton.num_parameters(*args, **kwargs))  # type: ignore[operator]
