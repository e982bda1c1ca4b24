"""What autotp knows about Hugging Face transformers: `generate`, and the attributes that go with
it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from autotp.runtime.group import Group
from autotp.runtime.random import generators, set_generators

# What a pipeline or a trainer reads of a model and that says nothing about its weights.
_FACTS = "accepts_loss_kwargs base_model_prefix framework hf_device_map loss_type"
_FACTS += " input_modalities main_input_name name_or_path output_modalities"
_FACTS += " prepare_inputs_for_generation"
FACTS = frozenset(_FACTS.split())


class Runner(Protocol):
    """What computes: a rank's module, or all ranks in lockstep."""

    def call(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The forward of the original's submodule at a path; "" is the model itself."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters, for their device and dtype."""


class Entry(nn.Module):
    """A submodule of the original that is called by itself: an encoder, an embedding."""

    def __init__(self, runner: Runner, skeleton: nn.Module, path: str) -> None:
        super().__init__()
        self._original = (skeleton.get_submodule(path),)  # in a tuple: it is no submodule
        self.path = path

        @functools.wraps(self._original[0].forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return runner.call(path, args, kwargs)

        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__["_original"][0]
        if name in FACTS or name == "config":
            return getattr(original, name)
        raise AttributeError(f"{type(original).__name__} of a parallel model has no {name!r}")


def entry_of(runner: Runner, skeleton: nn.Module, getter: str, *args: Any, **kwargs: Any) -> Any:
    """What the original's `get_encoder` or its like gives, computing with `runner`."""
    found = getattr(skeleton, getter)(*args, **kwargs)
    path = next((name for name, module in skeleton.named_modules() if module is found), None)
    return found if path is None else Entry(runner, skeleton, path)


def face_of(skeleton: nn.Module, runner: Runner) -> Any:
    """The skeleton as a model that computes with `runner`: for `generate` and what goes with it.

    It has the original's configuration and methods, and the device and dtype of the parameters; of
    weights it has shapes only.
    """

    class Face(type(skeleton)):  # type: ignore[misc]
        @property
        def device(self) -> torch.device:
            return next(runner.parameters()).device

        @property
        def dtype(self) -> torch.dtype:
            return next(p.dtype for p in runner.parameters() if p.is_floating_point())

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return runner.call("", args, kwargs)

        def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
            return entry_of(runner, skeleton, "get_encoder", *args, **kwargs)

        def get_input_embeddings(self) -> Any:
            return entry_of(runner, skeleton, "get_input_embeddings")

    face = copy.copy(skeleton)
    Face.__name__ = Face.__qualname__ = type(skeleton).__name__
    face.__class__ = Face
    return face


def recomputes(model: nn.Module) -> bool:
    """Whether the model's activation checkpointing is on."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):  # the new name first
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    return False


@contextmanager
def same_draws(group: Group, device: torch.device) -> Iterator[None]:
    """All ranks draw what the first one draws, as the original would with that rank's generators.

    Afterwards the others have the generators that they had.
    """
    if group.size == 1:
        yield
        return
    own = generators(device)
    set_generators(device, group.broadcast_object(own))
    try:
        yield
    finally:
        if group.rank:
            set_generators(device, own)
