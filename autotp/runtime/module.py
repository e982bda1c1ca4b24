"""TensorParallel: the rank's model. The original's hierarchy, names, call forms and output classes."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autotp import pytree
from autotp.errors import AutoTPError, message
from autotp.examples import normal_call
from autotp.planning import Plan
from autotp.program import Guards, Signature
from autotp.runtime.block import Block, Compiler
from autotp.runtime.group import Group
from autotp.runtime.outputs import LocalOutput, ShardedOutput

log = logging.getLogger("autotp")


@dataclass(frozen=True)
class Capture:
    """One captured call form: its number among the root's graphs, and what it serves."""

    number: int
    signature: Signature
    training: bool
    seconds: float
    plan: Plan
    outputs: Mapping[int, LocalOutput]

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluation"
        names = (name.removeprefix("kwargs_") for name in self.signature.inputs)
        return f"{mode}, {', '.join(names)}: {self.seconds:.1f} s"

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        return self


Builder = Callable[["TensorParallel", tuple[Any, ...], dict[str, Any]], Capture]


class TensorParallel(Block):
    """A model that computes, together with its peers, what the original computed.

    Call it as the original. A call form that was not captured yet (other arguments given, training
    or evaluation, another dtype) is captured when it first comes and shares the parameters.
    """

    def __init__(
        self, skeleton: nn.Module, plan: Plan, group: Group, builder: Builder, logits: str
    ) -> None:
        super().__init__(type(skeleton).__name__)
        self.plan = plan
        self.rank = group.rank
        self.group = group
        self.logits = logits
        self.compiler = Compiler()
        self.training = skeleton.training
        self._skeleton = (skeleton,)  # in a tuple: it is no submodule
        self._signature = inspect.signature(skeleton.forward)
        self._builder = builder
        self._captures: dict[Any, list[Capture]] = {}

    @property
    def skeleton(self) -> nn.Module:
        """The original without storage: what further call forms are captured from."""
        return self._skeleton[0]

    @property
    def tp_size(self) -> int:
        """Number of ranks."""
        return self.plan.tp

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The call forms that were captured so far, in order."""
        found = [capture for captures in self._captures.values() for capture in captures]
        return tuple(sorted(found, key=lambda capture: capture.number))

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The original's forward."""
        capture, leaves = self.capture_for(args, kwargs)
        results = list(self.codes[capture.number].function(self, *leaves))
        for index, where in capture.outputs.items():
            if not where.cache:
                assert self.group is not None
                results[index] = ShardedOutput(results[index], where, self.group)
        return pytree.unflatten(results, capture.signature.out_spec)

    def capture_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Capture, list[Any]]:
        """The capture that serves a call (made now if there is none), and the call's leaves."""
        given, named = normal_call(self._signature, args, kwargs)
        leaves, spec = pytree.flatten((given, named))
        for capture in self._captures.get(self._form(leaves, spec), ()):
            if _holds(capture.signature.guards, leaves, given, named):
                return capture, leaves
        begun = time.perf_counter()
        capture = self._builder(self, given, named)
        capture = replace(capture, seconds=time.perf_counter() - begun)
        log.info("captured a further call form: %s", capture)
        return self.register(given, named, capture), leaves

    def register(self, args: Any, kwargs: Any, capture: Capture) -> Capture:
        """Have a capture serve calls of this form."""
        leaves, spec = pytree.flatten((args, kwargs))
        if not _holds(capture.signature.guards, leaves, args, kwargs):
            raise AutoTPError(
                message(
                    "a capture does not serve the call that it was made from",
                    values=str(capture.signature.guards),
                    because="this is a bug in autotp",
                )
            )
        self._captures.setdefault(self._form(leaves, spec), []).append(capture)
        return capture

    def _form(self, leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
        return (str(spec), self.training, self._dtype(), *map(_key, leaves))

    def _dtype(self) -> torch.dtype | None:
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), None)

    def __getstate__(self) -> dict[str, Any]:
        raise AutoTPError(
            message(
                "a tensor-parallel model cannot be pickled",
                values=f"{self._kind}, rank {self.rank} of {self.plan.tp}",
                because="it holds compiled code and a process group",
                try_="save state_dict(), or copy.deepcopy in the same process",
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        import copy

        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            shared = name in ("_skeleton", "_signature", "_builder", "plan", "compiler", "group")
            twin.__dict__[name] = value if shared else copy.deepcopy(value, memo)
        return twin


def _key(leaf: Any) -> Any:
    """What of a leaf decides whether a graph serves it: of tensors all but sizes above 1."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, *(size if size < 2 else -1 for size in leaf.shape))
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else repr(leaf)


def _holds(guards: Guards, leaves: Sequence[Any], args: Any, kwargs: Any) -> bool:
    """Whether the sizes of a call are those that the graph was captured for."""
    known: dict[str, int] = {}
    for leaf, dims in zip(leaves, guards.sizes, strict=True):
        if dims is None:
            continue
        for size, wanted in zip(leaf.shape, dims, strict=True):
            if isinstance(wanted, int):
                if size != wanted:
                    return False
            elif known.setdefault(wanted, size) != size:
                return False
    for symbol, (low, high) in guards.ranges.items():
        if symbol in known and not low <= known[symbol] <= high:
            return False
    scope = {"L": {"args": args, "kwargs": kwargs}}
    return all(eval(condition, scope) for condition in guards.conditions)
