"""How torch.distributed.checkpoint writes and reads parts: as boxes of whole tensors.

Its own planners take a tensor, or a DTensor, whose part is one box. A rank's part of a fused matrix
is several, so these planners list them one by one. Every rank writes what it holds to a file of its
own, nothing is gathered, and a file says nothing about the number of ranks: a reader of any layout
asks for its own boxes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autotp.axes import Ranges
from autotp.checkpoint.layout import Box, boxes


@dataclass(frozen=True)
class Held:
    """A rank's part of a tensor."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    ranges: tuple[Ranges, ...]


def whole(name: str, tensor: Tensor) -> Held:
    """A tensor that every rank has all of."""
    shape = tuple(tensor.shape)
    return Held(name, tensor, shape, tuple(((0, size),) for size in shape))


class Writer(DefaultSavePlanner):
    """Writes parts and objects. What several ranks hold, one of them writes."""

    def __init__(self, held: Sequence[Held], objects: Mapping[str, Any]) -> None:
        super().__init__()
        self._held, self._objects = held, objects
        self._boxes: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """An item for each box, and for each object."""
        items = [_bytes_item(name) for name in self._objects]
        for held in self._held:
            data = held.tensor.detach()
            for box in boxes(held.ranges):
                index = MetadataIndex(held.name, torch.Size(box.start))
                if index in self._boxes or 0 in box.sizes:  # ranks of one process hold it twice
                    continue
                self._boxes[index] = data[box.part]
                properties = TensorProperties(dtype=data.dtype)
                about = TensorWriteData(_chunk(box), properties, torch.Size(held.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What an item writes."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return self._boxes[write_item.index]
        data = io.BytesIO()
        torch.save(self._objects[write_item.index.fqn], data)
        return data


class Reader(LoadPlanner):
    """Reads parts in place, and objects of plain values."""

    def __init__(self, held: Sequence[Held], objects: Sequence[str]) -> None:
        self._held, self._wanted = held, objects
        self._targets: dict[tuple[str, int], Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Called first."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """What of which stored box goes to which box held here."""
        assert self.metadata is not None
        items = [_bytes_read(name) for name in self._wanted]
        for held in self._held:
            stored = self.metadata.state_dict_metadata[held.name]
            assert isinstance(stored, TensorStorageMetadata), held.name
            here = list(boxes(held.ranges))
            for item in create_read_items_for_chunk_list(
                held.name, stored, [_chunk(box) for box in here]
            ):
                box = here[item.dest_index.index or 0]
                key = (held.name, len(self._targets))
                self._targets[key] = held.tensor.detach()[box.part]
                found = MetadataIndex(held.name, item.dest_index.offset, key[1])
                items.append(replace(item, dest_index=found))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it was planned."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep an object."""
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a stored piece goes."""
        index = read_item.dest_index
        assert index.index is not None
        box = self._targets[index.fqn, index.index]
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            box = box.narrow(dim, start, length)
        return box

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was read in place."""


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.sizes))


def _bytes_item(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0))


def _bytes_read(name: str) -> ReadItem:
    none, index = torch.Size((0,)), MetadataIndex(name)
    return ReadItem(LoadItemType.BYTE_IO, index, none, index, none, torch.Size((1,)))


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint."""
    return {
        name: found
        for name, found in metadata.state_dict_metadata.items()
        if not isinstance(found, BytesStorageMetadata)
    }
