"""`save_pretrained`: the whole model as an ordinary Hugging Face checkpoint.

Rank 0 writes. The others send it their parts of one tensor at a time, so that no rank ever holds
more than its shards and one whole tensor.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotp.axes import Ranges
from autotp.checkpoint.folder import replaced
from autotp.checkpoint.layout import part_shape, put
from autotp.checkpoint.names import name_to_save, tied
from autotp.checkpoint.reading import INDEX
from autotp.checkpoint.together import Peers, together
from autotp.checkpoint.writing import in_order, write
from autotp.errors import CheckpointError, message

if TYPE_CHECKING:
    from autotp.runtime.module import TensorParallel

_OURS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|(generation_)?config\.json")


def save_pretrained(
    members: Sequence[TensorParallel], path: str | Path, max_shard_size: int | str, timeout: float
) -> None:
    """Write the model whose ranks in this process are `members`."""
    from huggingface_hub import split_torch_state_dict_into_shards

    first = members[0]
    where = Path(os.path.abspath(path))
    names = {name_to_save(n, first.skeleton): k for k, n in tied(first.skeleton).items()}
    locals_ = [dict(member.state_dict()) for member in members]
    shapes = {name: _blank(first, key, locals_[0][name]) for name, key in names.items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)
    value = f"to {where} in files of {max_shard_size}"
    with together(first.group, f"saving {where.name}", value, timeout) as peers:
        whole = _Whole(members, names, locals_, peers)
        with _errors(where), _directory(where, first.rank) as folder:
            for file, inside in split.filename_to_tensors.items():
                some = {name: shapes[name] for name in inside}
                if folder is None:
                    for name in in_order(some):
                        whole(name)
                else:
                    write(folder / file, some, whole)
            if folder is not None:
                _write_rest(first, folder, split)


class _Whole:
    """Whole tensors by name, on rank 0; the other ranks send their parts."""

    def __init__(
        self,
        members: Sequence[TensorParallel],
        names: Mapping[str, str],
        locals_: Sequence[Mapping[str, Tensor]],
        peers: Peers,
    ) -> None:
        self._members, self._names, self._locals, self._peers = members, names, locals_, peers
        self._plan = members[0].plan

    def __call__(self, name: str) -> Tensor:
        mine, key = self._locals[0][name].detach(), self._names[name]
        if not self._plan.is_sharded(key):
            return mine.cpu()
        if self._members[0].rank:
            self._peers.send(mine)
            return mine
        ranges = [self._plan.ranges(key, rank) for rank in range(self._plan.tp)]
        whole = torch.empty(self._plan.by_name[key].shape, dtype=mine.dtype, device="cpu")
        for rank, held in enumerate(ranges):
            put(whole, self._part(name, rank, held, mine), held)
        return whole

    def _part(self, name: str, rank: int, held: Sequence[Ranges], like: Tensor) -> Tensor:
        if rank < len(self._locals):
            return self._locals[rank][name].detach()
        part = torch.empty(part_shape(held), dtype=like.dtype, device="cpu")
        self._peers.receive(part, rank)
        return part


def _blank(member: TensorParallel, key: str, like: Tensor) -> Tensor:
    return torch.empty(member.plan.by_name[key].shape, dtype=like.dtype, device="meta")


@contextmanager
def _directory(path: Path, rank: int) -> Iterator[Path | None]:
    """Where rank 0 writes; None on other ranks."""
    if rank:
        yield None
        return
    with replaced(path, lambda name: _OURS.fullmatch(name) is not None) as folder:
        yield folder


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            message(
                f"cannot write the checkpoint {path}",
                values=f"{type(error).__name__}: {error}",
                because="the system refused; what was there before is as it was",
                try_="a directory that rank 0 can write to, on a disk with room for the model",
            )
        ) from error


def _write_rest(model: TensorParallel, folder: Path, split: Any) -> None:
    """The index, and the configuration if the model has one."""
    if split.is_sharded:
        total = sum(
            torch.Size(t.shape).numel() for t in model.plan.tensors if t.kind == "parameter"
        )
        data = {
            "metadata": {"total_parameters": total, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(data, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")
    original: Any = model.skeleton
    config: Any = getattr(original, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)  # saving must not change the model
    config.architectures = [type(original).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
