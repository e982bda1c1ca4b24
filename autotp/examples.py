"""Example inputs: the caller's, or derived from a Hugging Face model's own dummy inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from autotp.errors import PlanError, message

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def example_call(model: nn.Module, example_inputs: Any) -> Call:
    """(args, kwargs) of one call. A tuple is positional, a dict is keywords, (args, kwargs) is
    both."""
    if example_inputs is None:
        return _derived(model)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        given = tuple(example_inputs)
        if (
            len(given) == 2
            and isinstance(given[0], (tuple, list))
            and isinstance(given[1], Mapping)
        ):
            return tuple(given[0]), dict(given[1])
        return given, {}
    raise PlanError(
        message(
            "example_inputs are not inputs",
            values=f"{type(example_inputs).__name__}",
            because="they must show one call of the model",
            try_="a tuple (positional), a dict (keywords), or (args, kwargs)",
        )
    )


def _derived(model: nn.Module) -> Call:
    dummy = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy, Mapping):
        raise PlanError(
            message(
                f"{type(model).__name__} needs example_inputs",
                values="example_inputs=None",
                because="only models with `dummy_inputs` (Hugging Face) tell how they are called",
                try_="parallelize(model, tp=..., example_inputs=(x,))",
            )
        )
    accepted = inspect.signature(model.forward).parameters
    inputs = {key: value for key, value in dummy.items() if key in accepted}
    tokens = inputs.get("input_ids")
    if "labels" in accepted and isinstance(tokens, torch.Tensor) and _predicts_tokens(model):
        inputs["labels"] = tokens.clone()
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return (), inputs


def _predicts_tokens(model: nn.Module) -> bool:
    """Whether labels are tokens: the output head is as wide as the input embedding is long."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None


def call_of(model: nn.Module, example_inputs: Any) -> Call:
    """(args, kwargs) of one call in its normal form; PlanError if the model does not take them."""
    args, kwargs = example_call(model, example_inputs)
    try:
        return normal_call(inspect.signature(model.forward), args, kwargs)
    except TypeError as error:
        raise PlanError(
            message(
                f"{type(model).__name__} does not take these inputs",
                values=f"{len(args)} by position, by name: {', '.join(map(str, kwargs)) or 'none'}",
                because=str(error),
                try_=f"inputs for forward{inspect.signature(model.forward)}",
            )
        ) from error


def normal_call(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call:
    """A call in one form: by keyword where possible, in order, arguments at their default left out.

    Raises TypeError as the function itself does for arguments that it does not take.
    """
    given: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(value)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            given, named = [*given, *named.values(), *value], {}
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            given.append(value)
        elif value is not parameter.default:
            named[name] = value
    return tuple(given), named
