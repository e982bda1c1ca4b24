"""Writing a safetensors file tensor by tensor, so that one tensor is in memory at a time.

The format (https://github.com/huggingface/safetensors): the length of the header in 8 bytes, the
header as JSON (dtype, shape and place of each tensor), the tensors' bytes in that order.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor


def write(file: Path, shapes: Mapping[str, Tensor], whole: Callable[[str], Tensor]) -> None:
    """Write the tensors that `whole` gives by name; `shapes` are tensors like them, on meta."""
    names = in_order(shapes)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        like = shapes[name]
        start, end = end, end + like.numel() * like.element_size()
        entries[name] = {
            "dtype": _dtype(like.dtype),
            "shape": list(like.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            tensor = whole(name)
            assert tensor.shape == shapes[name].shape and tensor.dtype == shapes[name].dtype, name
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            out.write(data.numpy().data)
            del tensor, data  # before the next one is made


def in_order(shapes: Mapping[str, Tensor]) -> list[str]:
    """The order in a file: wide dtypes first, so that each tensor is aligned to its own."""
    return sorted(shapes, key=lambda name: (-shapes[name].element_size(), name))


@functools.lru_cache
def _dtype(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype: read from a header of its own."""
    from safetensors.torch import save

    data = save({"x": torch.empty(0, dtype=dtype)})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return str(header["x"]["dtype"])
