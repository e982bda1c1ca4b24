"""TensorParallel: the rank's model. The original's hierarchy, names, call forms and output
classes."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.checkpoint.whole import MARK, Whole, localize, mark
from autotp.errors import AutoTPError, message
from autotp.examples import normal_call
from autotp.huggingface import recomputes
from autotp.options import Options
from autotp.planning import Plan
from autotp.runtime.block import Block, Compiler
from autotp.runtime.calls import Call, described, difference, holds, read
from autotp.runtime.captured import Capture
from autotp.runtime.face import Face
from autotp.runtime.group import Group
from autotp.runtime.heads import own_heads
from autotp.runtime.inputs import same_inputs
from autotp.runtime.outputs import LocalOutput, ShardedOutput
from autotp.runtime.sharded import plain

log = logging.getLogger("autotp")


Builder = Callable[["TensorParallel", Call], Capture]
_NOT_COMPILED = (
    "autotp captures a call form when it first comes, which torch.compile cannot trace: "
    "call the model in this form once before it is compiled, or leave fullgraph=True out"
)


class TensorParallel(Whole, Face, Block):
    """A model that computes, together with its peers, what the original computed.

    Call it as the original. A call form that was not captured yet (other arguments given, training
    or evaluation, another dtype) is captured when it first comes and shares the parameters.
    """

    def __new__(cls, skeleton: nn.Module, *_: Any) -> TensorParallel:
        return super().__new__(_with_signature(cls, type(skeleton)))

    def __init__(
        self, skeleton: nn.Module, plan: Plan, group: Group, builder: Builder, options: Options
    ) -> None:
        super().__init__(type(skeleton).__name__)
        self.plan = plan
        self.rank = group.rank
        self._tp_group = group
        self.options = options
        self.max_captures = 64
        self.debug = os.environ.get("AUTOTP_DEBUG", "") not in ("", "0")
        self.compiler = Compiler()
        self.training = skeleton.training
        self._skeleton = (skeleton,)  # in a tuple: it is no submodule
        self._builder = torch.compiler.disable(_timed(builder), reason=_NOT_COMPILED)
        self._signatures: dict[str, inspect.Signature] = {}
        self._captures: dict[Any, list[tuple[Callable[[Any], bool], Capture]]] = {}
        self._face: tuple[Any] | None = None
        self.recomputes = recomputes(skeleton)
        self.cache_layout: dict[str, LocalOutput] = {}  # how the tensors of caches are split

    @property
    def skeleton(self) -> nn.Module:
        """The original without storage: what further call forms are captured from."""
        return self._skeleton[0]

    @property
    def group(self) -> Group:
        """The ranks that share the model."""
        assert self._tp_group is not None
        return self._tp_group

    @property
    def tp_size(self) -> int:
        """Number of ranks."""
        return self.plan.tp

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The call forms that were captured so far, in order."""
        found = [capture for captures in self._captures.values() for _, capture in captures]
        return tuple(sorted(found, key=lambda capture: capture.number))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward."""
        return self.call("", args, kwargs)

    def call(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The forward of the original's submodule at a path; "" is the model itself."""
        capture, call = self.capture_for(args, kwargs, entry)
        if self.debug:
            names = capture.signature.inputs
            same_inputs(self.group, dict(zip(names, call.leaves, strict=True)))
        with plain():
            results = list(self._tp_codes[capture.number].function(self, *call.leaves))
        for index, where in capture.outputs.items():
            if not where.cache:
                results[index] = ShardedOutput(results[index], where, self.group)
        return capture.assemble(results, call.caches)

    def read(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call in its normal form, with this rank's part of caches."""
        signature = self._signatures.get(entry)
        if signature is None:
            signature = inspect.signature(self.skeleton.get_submodule(entry).forward)
            self._signatures[entry] = signature
        call = read(entry, *normal_call(signature, args, kwargs))
        if call.places and self.tp_size > 1:
            own_heads(call, self.cache_layout, self.rank)
        return call

    def capture_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], entry: str = ""
    ) -> tuple[Capture, Call]:
        """The capture that serves a call (made now if there is none), and the call's leaves."""
        call = self.read(entry, args, kwargs)
        for serves, capture in self._captures.get(self._key(call), ()):
            if serves(call.leaves):
                return capture, call
        self._limit_captures()
        capture, seconds = self._builder(self, call)
        if call.places:
            call = self.read(entry, args, kwargs)  # the capture says how its caches are split
        capture = self.register(call, capture, seconds)
        if self.rank == 0:
            log.info("captured a further call form of %s: %s", self._kind, capture)
        return capture, call

    def _limit_captures(self) -> None:
        """Raise AutoTPError, on all ranks alike, if there are too many call forms."""
        made = self.captures
        if len(made) < self.max_captures:
            return
        raise AutoTPError(
            message(
                f"{len(made)} call forms of {self._kind} were captured, and another one came",
                values="; ".join(str(capture) for capture in made[-4:]),
                because="each takes seconds and memory: something that differs in every call is "
                "captured as a constant",
                try_="tensors instead of numbers, or raise tp_model.max_captures",
            )
        )

    def register(self, call: Call, capture: Capture, seconds: float = 0.0) -> Capture:
        """Have a capture serve calls of this form."""
        check = holds(capture.signature.guards)
        if not check(call.leaves):
            raise AutoTPError(
                message(
                    "a capture does not serve the call that it was made from",
                    values=str(capture.signature.guards),
                    because="this is a bug in autotp",
                )
            )
        training, _, autocast, _ = self._mode()
        mode = "training" if training else "evaluation"
        mode += " under autocast" if autocast else ""
        form = described(call, capture.signature.inputs, mode)
        reason = difference(form, [other.form for other in self.captures])
        capture = replace(capture, form=form, reason=reason, seconds=seconds)
        self._captures.setdefault(self._key(call), []).append((check, capture))
        return capture

    def _key(self, call: Call) -> tuple[Any, ...]:
        return (self._mode(), call.key)

    def _mode(self) -> tuple[bool, torch.dtype | None, bool, bool]:
        """What besides a call decides which graph serves it: training, dtype, autocast, and
        activation checkpointing."""
        again = self.training and self.recomputes
        with plain():
            one = next((p for p in self.parameters() if p.is_floating_point()), None)
            if one is None:
                return self.training, None, False, again
            kind, dtype = one.device.type, one.dtype
        autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # meta has none
        return self.training, dtype, autocast, again

    def as_dtensors(self, mesh: DeviceMesh) -> TensorParallel:
        """Make every parameter a DTensor over `mesh` (the tp ranks), so that FSDP2 can shard it
        over other ranks too; see runtime/dtensors.py. Returns the module itself.

        Save and load before this.
        """
        from autotp.runtime.dtensors import convert

        convert(self, mesh)
        return self

    def _tp_members(self) -> Sequence[TensorParallel]:
        return [self]

    # nn.Module's own places to override what a module saves and loads; wrappers call them too.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        getattr(destination, "_metadata", {}).get(prefix[:-1], {})[MARK] = mark(self)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        localize(self, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

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
            if name == "_face":
                continue
            shared = name in ("_skeleton", "_signatures", "_builder", "plan", "compiler", "group")
            twin.__dict__[name] = value if shared else copy.deepcopy(value, memo)
        twin._face = None  # the copy's own is made when it is asked for
        return twin


def _timed(builder: Builder) -> Callable[[TensorParallel, Call], tuple[Capture, float]]:
    """Also how many seconds a capture took."""

    def build(model: TensorParallel, call: Call) -> tuple[Capture, float]:
        begun = time.perf_counter()
        return builder(model, call), time.perf_counter() - begun

    return build


def _with_signature(kind: type[TensorParallel], original: type[nn.Module]) -> type[TensorParallel]:
    """A class whose `forward` tells the original's parameters: trainers pick inputs by them."""
    plain_forward = kind.forward

    @functools.wraps(plain_forward)
    def forward(self: TensorParallel, *args: Any, **kwargs: Any) -> Any:
        return plain_forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
