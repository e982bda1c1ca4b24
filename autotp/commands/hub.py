"""Models of Hugging Face transformers: a configuration becomes a model without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from autotp.commands.files import exists, read_object
from autotp.errors import InputError, message


def build(name: str, changes: dict[str, Any], *, weights: bool = False) -> nn.Module:
    """The model of a directory, a configuration file, or a name; on the current device.

    `changes` replace values of the configuration. With `weights` those of the directory are read.
    """
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            message(
                "transformers is not installed",
                values=name,
                because="configurations are read by it",
                try_="pip install 'autotp[hf]', or give module:function",
            )
        ) from error
    transformers.logging.set_verbosity_error()  # its advice is about training, not about plans
    config = _config(transformers, name)
    for key, value in changes.items():
        if not hasattr(config, key):
            near = f"{type(config).__name__} has no {key}"
            raise InputError(message(f"--set {key} changes nothing", values=name, because=near))
        try:
            setattr(config, key, value)
        except Exception as error:  # a type validates its values with errors of its own
            because = f"{type(error).__name__}: {error}"
            raise InputError(
                message(f"--set {key} does not take this", values=repr(value), because=because)
            ) from error
    kind = _class(transformers, config)
    try:
        if weights:
            loaded: nn.Module = kind.from_pretrained(name, config=config)
            return loaded
        made: nn.Module = kind._from_config(config) if _is_model(kind) else kind.from_config(config)
        return made
    except Exception as error:  # a model may raise anything on values that do not fit together
        raise InputError(
            message(
                f"transformers cannot make a model of {name}",
                values=f"{type(config).__name__}, {kind.__name__}",
                because=f"{type(error).__name__}: {error}",
                try_="other values of the configuration",
            )
        ) from error


def _config(transformers: Any, name: str) -> Any:
    path = Path(name)
    if exists(path) and path.is_dir():
        path = path / "config.json"
    if not exists(path) and path.suffix != ".json":
        if name in transformers.CONFIG_MAPPING:  # a type: its own default values
            return transformers.AutoConfig.for_model(name)
        return _named(transformers, name)
    data = read_object(path)
    kind = data.pop("model_type", None)
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise InputError(
            message(
                f"{path} is no configuration of a model that transformers knows",
                values=f"model_type {kind!r}",
                because=f"transformers {transformers.__version__} has "
                f"{len(list(transformers.CONFIG_MAPPING.keys()))} types, and not this one",
                try_='"model_type": "gpt2"' if kind is None else "a newer transformers",
            )
        )
    try:
        return transformers.AutoConfig.for_model(kind, **data)
    except Exception as error:  # a type validates its values with errors of its own
        raise InputError(
            message(
                f"{path} has values that {kind} does not take",
                values=str(path),
                because=f"{type(error).__name__}: {error}",
            )
        ) from error


def _named(transformers: Any, name: str) -> Any:
    try:
        try:  # what is in the cache needs no network
            return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        except OSError:
            return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            message(
                f"there is no model {name}",
                values=name,
                because="no such directory, file or function, and transformers says: "
                + str(error).splitlines()[0],
                try_="a directory with config.json, a configuration file, or module:function",
            )
        ) from error


def _class(transformers: Any, config: Any) -> Any:
    """The class that the configuration names, else the one for causal language models, else the
    bare one."""
    names = getattr(config, "architectures", None)
    for name in names if isinstance(names, (list, tuple)) else ():
        if isinstance(name, str) and isinstance(getattr(transformers, name, None), type):
            return getattr(transformers, name)
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _is_model(kind: Any) -> bool:
    return issubclass(kind, nn.Module)
