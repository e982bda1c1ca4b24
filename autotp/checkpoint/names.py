"""Which stored tensor each tensor of a model is read from, and under which name it is saved.

A tied tensor has several names and is stored under one of them. A base model may be stored without
the prefix that it has inside a larger one, as Hugging Face does: `base_model_prefix`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from autotp.checkpoint.reading import Stored
from autotp.checkpoint.renaming import renaming
from autotp.errors import CheckpointError, message

SHOWN = 8


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every name of every parameter and buffer."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def tied(model: nn.Module) -> dict[str, list[str]]:
    """All names of each tensor that `state_dict()` holds, by the first one."""
    every: dict[int, list[str]] = {}
    for name, tensor in tensors_of(model):
        every.setdefault(id(tensor), []).append(name)
    kept = set(model.state_dict(keep_vars=True))
    groups = {names[0]: [n for n in names if n in kept] for names in every.values()}
    return {first: names for first, names in groups.items() if names}


def temporary_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that `state_dict()` leaves out, by their first names."""
    kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    return {name: b for name, b in model.named_buffers() if id(b) not in kept}


def name_to_save(names: Sequence[str], model: nn.Module) -> str:
    """The one of a tied tensor's names that it is stored under."""
    targets = getattr(model, "all_tied_weights_keys", None)  # of transformers: {name: source}
    sources = [name for name in names if not isinstance(targets, Mapping) or name not in targets]
    return (sources or list(names))[0]


def stored_names(model: nn.Module, stored: Mapping[str, Stored]) -> dict[str, list[str]]:
    """For the first name of each tensor of the model, the stored tensors that hold it.

    Raises CheckpointError that names missing, superfluous and differently shaped tensors.
    """
    groups = tied(model)
    every = {name for names in groups.values() for name in names}
    now = renaming(model)
    renamed = {_renamed(name, stored, model, every, now): name for name in stored}
    tensors = dict(tensors_of(model))
    found: dict[str, list[str]] = {}
    missing, misfits = [], []
    for first, names in groups.items():
        found[first] = [renamed[name] for name in names if name in renamed]
        if not found[first]:
            missing.append(first)
        wanted = tensors[first]
        for source in found[first]:
            file, shape = stored[source], tuple(wanted.shape)
            if file.shape != shape:
                misfits.append(f"{first} is {list(shape)}, {source} in the file {list(file.shape)}")
            elif _is_float(file.dtype) != (wanted.is_floating_point() or wanted.is_complex()):
                misfits.append(f"{first} is {wanted.dtype}, {source} in the file {file.dtype}")
    extra = [old for new, old in renamed.items() if new not in every and not _known(new, model)]
    if missing or misfits or extra:
        raise _misfit(model, {"missing": missing, "different": misfits, "superfluous": extra})
    return found


def _renamed(
    name: str,
    stored: Mapping[str, Stored],
    model: nn.Module,
    every: set[str],
    now: Callable[[str], str],
) -> str:
    """A stored name as the model would say it."""
    if name not in every:
        name = now(name)
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not isinstance(prefix, str):
        return name
    has = any(other.startswith(f"{prefix}.") for other in stored)
    expects = any(other.startswith(f"{prefix}.") for other in every)
    if expects and not has and name not in every:
        return f"{prefix}.{name}"
    if has and not expects:
        return name.removeprefix(f"{prefix}.")
    return name


def _known(name: str, model: nn.Module) -> bool:
    """Whether a stored tensor is known to be of no use to the model.

    Older checkpoints hold buffers that are computed now. transformers lists further ones.
    """
    end = name.split(".")[-2:]
    if any(buffer.split(".")[-2:] == end for buffer in temporary_buffers(model)):
        return True
    patterns: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("F", "BF", "C"))


def _misfit(model: nn.Module, faults: Mapping[str, Sequence[str]]) -> CheckpointError:
    return CheckpointError(
        message(
            f"the checkpoint does not fit {type(model).__name__}",
            values=listed(faults),
            because="each rank reads its slices under the names that the model has now",
            try_="the class and configuration that wrote it; if from_pretrained converts it while "
            "loading, save_pretrained(..., save_original_format=False) there writes these names",
        )
    )


def listed(faults: Mapping[str, Sequence[str]]) -> str:
    """A line for each kind of fault that there is."""
    return "\n".join(f"{kind}: {some(names)}" for kind, names in faults.items() if names)


def some(names: Sequence[str]) -> str:
    """The first of many names."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
