"""Safetensors files: what is in them, and reading the part of a tensor that a rank holds.

Files are mapped, and only the boxes of a part are copied from them: a rank never has a whole tensor
that is split.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotp.axes import Ranges
from autotp.checkpoint.layout import boxes, part_shape
from autotp.errors import CheckpointError, message

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16, I64


class Files:
    """The safetensors files of a checkpoint: a folder with one file or an index, or one file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[Path, Any] = {}
        self.tensors: dict[str, Stored] = {}
        files, index = _files(self.path)
        for file in files:
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118  (a handle is no mapping)
                found = handle.get_slice(name)
                self.tensors[name] = Stored(file, tuple(found.get_shape()), found.get_dtype())
        for name, file in index.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise _unreadable(
                    self.path / INDEX,
                    f"{name} in {file.name}",
                    "the file does not hold this tensor",
                    "the files and the index must come from one save",
                )

    def read(self, name: str, ranges: Sequence[Ranges], dtype: torch.dtype) -> Tensor:
        """The rank's part of a tensor, converted to `dtype` as it is read."""
        stored = self.tensors[name]
        part = torch.empty(part_shape(ranges), dtype=dtype, device="cpu")
        try:
            if not stored.shape:  # safetensors slices no scalars
                return part.copy_(self._handle(stored.file).get_tensor(name))
            found = self._handle(stored.file).get_slice(name)
            for box in boxes(ranges):
                part[box.part] = found[box.whole]
        except (OSError, RuntimeError, ValueError) as error:
            raise _unreadable(stored.file, name, f"{type(error).__name__}: {error}") from error
        return part

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            except FileNotFoundError as error:
                raise _unreadable(file, file.name, "there is no such file") from error
            except (OSError, SafetensorError, ValueError) as error:
                because = f"{type(error).__name__}: {error}"
                size = f"{file.stat().st_size:,} bytes" if file.exists() else "no file"
                again = "copy or save it again: it may have been cut short"
                raise _unreadable(file, size, because, again) from error
        return self._open[file]


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files of a checkpoint, and where its index says that each tensor is."""
    if path.is_file() and path.name != INDEX:
        return [path], {}
    folder = path.parent if path.name == INDEX else path
    if path.is_dir() and (path / SINGLE).is_file():
        return [path / SINGLE], {}
    if not (folder / INDEX).is_file():
        raise _unreadable(
            path,
            "exists" if path.exists() else "does not exist",
            f"neither {SINGLE} nor {INDEX} is there",
            "the directory that save_pretrained wrote, or one .safetensors file",
        )
    try:
        weights = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): folder / str(file) for name, file in weights.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        because = f"{type(error).__name__}: {error}"
        raise _unreadable(folder / INDEX, "no weight_map", because) from error
    return sorted(set(index.values())), index


def _unreadable(
    file: Path, values: str, because: str, try_: str = "copy or save it again"
) -> CheckpointError:
    return CheckpointError(message(f"cannot read the checkpoint {file}", values, because, try_))
