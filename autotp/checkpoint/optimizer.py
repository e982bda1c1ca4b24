"""The state of an optimizer by the names of parameters, laid out as the parameters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from autotp.checkpoint.layout import part_shape
from autotp.checkpoint.names import some
from autotp.checkpoint.planners import Held, whole
from autotp.errors import CheckpointError, message
from autotp.runtime.sharded import local

if TYPE_CHECKING:
    from autotp.runtime.module import TensorParallel

_PLAIN = (bool, int, float, str, type(None))


class Named:
    """An optimizer whose parameters are known by the rank that holds them and their names."""

    def __init__(self, optimizer: Optimizer, members: Sequence[TensorParallel]) -> None:
        self.optimizer = optimizer
        known = {
            id(p): (member, name) for member in members for name, p in member.named_parameters()
        }
        self.owners: list[tuple[TensorParallel, str]] = []
        self.groups: list[list[str]] = []
        self._counts: list[int] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise _stranger(parameter)
            owners = [known[id(parameter)] for parameter in group["params"]]
            self.owners += owners
            self.groups.append(list(dict.fromkeys(name for _, name in owners)))
            self._counts.append(len(owners))

    def held(self) -> list[Held]:
        """The tensors of the state."""
        found = []
        for (member, name), state in self._states():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    found.append(_held(member, name, key, value))
        return found

    def about(self) -> dict[str, Any]:
        """What besides tensors a checkpoint needs: plain values, the same on every rank."""
        tensors: dict[str, list[str]] = {}
        values: dict[str, dict[str, Any]] = {}
        for (_, name), state in self._states():
            tensors[name] = [key for key, value in state.items() if isinstance(value, Tensor)]
            values[name] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
            for key, value in values[name].items():
                if not isinstance(value, _PLAIN):
                    raise _no_layout(name, key, f"a {type(value).__name__}")
        groups = self.optimizer.state_dict()["param_groups"]
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return {
            "kind": type(self.optimizer).__name__,
            "tensors": tensors,
            "values": values,
            "groups": [
                {"params": names, "options": chosen}
                for names, chosen in zip(self.groups, options, strict=True)
            ],
        }

    def _states(self) -> Any:
        states = self.optimizer.state_dict()["state"]
        plain = [
            {k: local(v) if isinstance(v, Tensor) else v for k, v in states.get(i, {}).items()}
            for i in range(len(self.owners))
        ]
        return [(owner, plain[i]) for i, owner in enumerate(self.owners) if i in states]

    def blank(
        self, about: Mapping[str, Any], stored: Mapping[str, TensorStorageMetadata]
    ) -> tuple[dict[int, dict[str, Any]], list[Held]]:
        """A state to be filled from a checkpoint, and its tensors."""
        state: dict[int, dict[str, Any]] = {}
        held = []
        for index, (member, name) in enumerate(self.owners):
            if name not in about["tensors"]:
                continue
            state[index] = dict(about["values"][name])
            for key in about["tensors"][name]:
                part = _blank(member, name, key, stored[_name(name, key)])
                state[index][key] = part.tensor
                held.append(part)
        return state, held

    def fill(self, about: Mapping[str, Any], state: Mapping[int, dict[str, Any]]) -> None:
        """Give the optimizer a state that was read."""
        saved = {frozenset(group["params"]): group["options"] for group in about["groups"]}
        groups, start = [], 0
        for names, count in zip(self.groups, self._counts, strict=True):
            options = saved[frozenset(names)]
            groups.append({**options, "params": list(range(start, start + count))})
            start += count
        self.optimizer.load_state_dict({"state": dict(state), "param_groups": groups})

    def check(self, about: Mapping[str, Any] | None) -> None:
        """Raise CheckpointError if the state of another optimizer was saved."""
        kind = type(self.optimizer).__name__
        if about is None:
            raise _other("the checkpoint has no optimizer", kind, "none was given to autotp.save")
        if about["kind"] != kind:
            raise _other("the checkpoint is of another optimizer", f"{about['kind']}, here {kind}")
        saved = {frozenset(group["params"]) for group in about["groups"]}
        here = {frozenset(names) for names in self.groups}
        if saved != here:
            names = sorted({name for group in saved ^ here for name in group})
            values = f"{len(saved)} groups, here {len(here)}: {some(names)}"
            raise _other("the optimizer groups its parameters in another way", values)


def _name(name: str, key: str) -> str:
    return f"optimizer.{name}.{key}"


def _held(member: TensorParallel, name: str, key: str, value: Tensor) -> Held:
    plan = member.plan
    shape, ranges = plan.by_name[name].shape, plan.ranges(name, member.rank)
    if not plan.is_sharded(name):
        return whole(_name(name, key), value)
    if tuple(value.shape) == part_shape(ranges):
        return Held(_name(name, key), value, shape, ranges)
    if value.numel() != 1:
        raise _no_layout(name, key, f"shape {list(value.shape)}")
    return whole(_name(name, key), value)


def _blank(member: TensorParallel, name: str, key: str, stored: TensorStorageMetadata) -> Held:
    plan, dtype = member.plan, stored.properties.dtype
    shape, size = plan.by_name[name].shape, tuple(stored.size)
    if plan.is_sharded(name) and size == shape:
        ranges = plan.ranges(name, member.rank)
        return Held(_name(name, key), torch.empty(part_shape(ranges), dtype=dtype), shape, ranges)
    if plan.is_sharded(name) and torch.Size(size).numel() != 1:
        raise _no_layout(name, key, f"shape {list(size)}")
    return whole(_name(name, key), torch.empty(size, dtype=dtype))


def _stranger(parameter: Tensor) -> CheckpointError:
    return CheckpointError(
        message(
            "the optimizer has a parameter that the model does not have",
            values=f"a parameter of shape {list(parameter.shape)}",
            because="its parameters are not those of the parallel model",
            try_="make the optimizer from tp_model.parameters(), after autotp.parallelize",
        )
    )


def _no_layout(name: str, key: str, what: str) -> CheckpointError:
    return CheckpointError(
        message(
            "a part of the optimizer's state has no known layout",
            values=f"{key} of {name}: {what}",
            because="it is neither shaped as the parameter, which is split, nor one number",
            try_="an optimizer with element-wise state (SGD, Adam, AdamW), or save without it",
        )
    )


def _other(what: str, values: str, because: str = "its state belongs to it") -> CheckpointError:
    return CheckpointError(
        message(what, values, because, "the optimizer that was saved, made in the same way")
    )
