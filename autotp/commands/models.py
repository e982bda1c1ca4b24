"""The model that a command line names, built on a device: on meta nothing is read or stored."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotp.commands.files import exists
from autotp.errors import InputError, message


@dataclass(frozen=True)
class Source:
    """A model and what shows one call of it (None: the model tells itself)."""

    model: nn.Module
    example_inputs: Any


def load(arguments: Namespace, device: str = "meta") -> Source:
    """Build the model of a command line on a device."""
    name = _name(arguments)
    changes = dict(_change(text) for text in arguments.set)
    weights = getattr(arguments, "weights", False)
    if _is_function(name):
        if weights:
            raise _wrong("--weights is for directories", name, "a function fills its own weights")
        made = _from_function(name, changes, device)
    else:
        from autotp.commands import hub

        with torch.device(device):
            made = hub.build(name, changes, weights=weights)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise _wrong(f"{name} gives no model", type(model).__name__, "a torch.nn.Module is needed")
    model.train(not arguments.eval)
    return Source(model, _inputs(arguments.input, device) or inputs)


def _name(arguments: Namespace) -> str:
    if (arguments.model is None) == (arguments.config is None):
        raise InputError(
            message(
                "one model is needed",
                values=f"MODEL {arguments.model}, --config {arguments.config}",
                because="a model is given by MODEL or by --config",
                try_="autotp plan --config config.json --tp 2",
            )
        )
    return str(arguments.config if arguments.model is None else arguments.model)


def _is_function(name: str) -> bool:
    home, colon, function = name.rpartition(":")
    return bool(colon and home) and function.isidentifier() and not exists(name)


def _from_function(name: str, changes: dict[str, Any], device: str) -> Any:
    home, _, function = name.rpartition(":")
    found = getattr(_module(home), function, None)
    if not callable(found):
        raise _wrong(f"there is no function {name}", function, f"{home} has no such function")
    call: Callable[..., Any] = found
    try:
        with torch.device(device):
            return call(**changes)
    except TypeError as error:
        raise _wrong(f"cannot call {name}", f"--set {changes}", _raised(error)) from error
    except (Exception, SystemExit) as error:
        raise _wrong(f"{name} raised an error", f"--set {changes}", _raised(error)) from error


def _module(home: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        if home.endswith(".py"):
            path = Path(home)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(path.stem, module)
            spec.loader.exec_module(module)
            return module
        return importlib.import_module(home)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise _wrong(f"cannot import {home}", home, _raised(error)) from error
    finally:
        sys.path.remove(str(Path.cwd()))


def _raised(error: BaseException) -> str:
    """The error, and the line of the user's file that raised it, if there is one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    frames = [f for f in frames if "importlib" not in f.filename and f.line]
    where = f"\n{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise _wrong("--set needs KEY=VALUE", repr(text), "it changes one value by name")
    words = {"true": True, "false": False, "null": None}
    if value.lower() in words:
        return key, words[value.lower()]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _inputs(given: Sequence[str], device: str) -> Any:
    """(args, kwargs) of `--input`; None where there is none."""
    args, kwargs = [], {}
    for text in given:
        name, equals, shape = text.rpartition("=")
        tensor = _tensor(shape, device)
        if equals and not name.isidentifier():
            raise _wrong("--input has no such name", repr(text), f"{name!r} names no argument")
        if equals:
            kwargs[name] = tensor
        else:
            args.append(tensor)
    return (tuple(args), kwargs) if given else None


def _tensor(text: str, device: str) -> torch.Tensor:
    numbers, _, kind = text.partition(":")
    dtype = dtype_of(kind or "float32")
    try:
        shape = [int(number) for number in numbers.split(",")]
        if min(shape) < 1:
            raise ValueError("a size is less than 1")
    except ValueError as error:
        wrong = "a shape is `2,16,64`, perhaps with `:int64`"
        raise _wrong("--input is no shape", repr(text), wrong) from error
    try:
        if dtype.is_floating_point:
            return torch.randn(shape, device=device).to(dtype)
        return torch.ones(shape, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:  # more than memory, or than a number can count
        because = str(error).splitlines()[0]
        raise _wrong("--input cannot be made", repr(text), because) from error


def dtype_of(name: str) -> torch.dtype:
    """A dtype by name; InputError if there is none of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise _wrong("this is no dtype", repr(name), "torch has none of this name")
    return found


def _wrong(what: str, values: str, because: str) -> InputError:
    return InputError(message(what, values=values, because=because))
