"""TensorParallel: the rank's model. The original's hierarchy, names, call forms and output
classes."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autotp.caches import Packed, map_caches, pack
from autotp.checkpoint.whole import MARK, Whole, localize, mark
from autotp.errors import AutoTPError, GroupError, message
from autotp.examples import normal_call
from autotp.huggingface import FACTS, Entry, entry_of, face_of, same_draws
from autotp.planning import Plan
from autotp.program import Signature
from autotp.runtime.block import Block, Compiler
from autotp.runtime.calls import Call, described, difference, holds, read
from autotp.runtime.collectives import take
from autotp.runtime.group import Group
from autotp.runtime.outputs import LocalOutput, ShardedOutput

log = logging.getLogger("autotp")


@dataclass(frozen=True)
class Capture:
    """One captured call form: its number among the root's graphs, what it serves, and why it was
    made."""

    number: int
    signature: Signature
    training: bool
    seconds: float
    plan: Plan
    outputs: Mapping[int, LocalOutput]
    assemble: Callable[[Sequence[Any], Sequence[Any]], Any]
    form: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.form.get('mode', '')}, {self.seconds:.1f} s: {self.reason}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        return self


Builder = Callable[["TensorParallel", Call], Capture]


class TensorParallel(Whole, Block):
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
        self._tp_group = group
        self.logits = logits
        self.max_captures = 64
        self.debug = os.environ.get("AUTOTP_DEBUG", "") not in ("", "0")
        self.compiler = Compiler()
        self.training = skeleton.training
        self._skeleton = (skeleton,)  # in a tuple: it is no submodule
        self._builder = builder
        self._signatures: dict[str, inspect.Signature] = {}
        self._captures: dict[Any, list[tuple[Callable[[Any], bool], Capture]]] = {}
        self._face: tuple[Any] | None = None
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

    @property
    def face(self) -> Any:
        """The original's configuration and methods, computing with this module."""
        if self._face is None:
            self._face = (face_of(self.skeleton, self),)
        return self._face[0]

    @property
    def config(self) -> Any:
        """The original's configuration."""
        return self.skeleton.config

    @property
    def generation_config(self) -> Any:
        """How `generate` works unless told otherwise."""
        return self.face.generation_config

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the floating-point parameters."""
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The original's `generate`, with this rank's heads in its cache. Call it on every rank.

        All ranks sample what the first rank's generator draws.
        """
        with same_draws(self.group, self.device):
            return self.face.generate(*args, **kwargs)

    def can_generate(self) -> bool:
        """Whether the original generates."""
        return bool(getattr(self.skeleton, "can_generate", lambda: False)())

    def entry(self, path: str) -> Entry:
        """A submodule of the original that computes what the original's computes when it is called
        by itself. Every rank must call it."""
        return Entry(self, self.skeleton, path)

    def get_input_embeddings(self) -> Any:
        """The embedding of tokens, whole for the caller however it is split."""
        return entry_of(self, self.skeleton, "get_input_embeddings")

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """The encoder of a model that has one."""
        return entry_of(self, self.skeleton, "get_encoder", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in FACTS and "_skeleton" in self.__dict__ and hasattr(self.skeleton, name):
                return getattr(self.face, name)
            raise

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        """Parameters of the whole model."""
        return int(self.skeleton.num_parameters(*args, **kwargs))  # type: ignore[operator]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward."""
        return self.call("", args, kwargs)

    def call(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The forward of the original's submodule at a path; "" is the model itself."""
        capture, call = self.capture_for(args, kwargs, entry)
        if self.debug:
            self.compare_inputs(call.leaves, capture.signature)
        results = list(self._tp_codes[capture.number].function(self, *call.leaves))
        for index, where in capture.outputs.items():
            if not where.cache:
                results[index] = ShardedOutput(results[index], where, self.group)
        return capture.assemble(results, call.caches)

    def whole_caches(self, args: Any, kwargs: Any) -> Any:
        """(args, kwargs) with caches as data on meta, at the size they have with all heads."""

        def whole(cache: Any) -> Packed:
            packed = cache if isinstance(cache, Packed) else pack(cache)
            places = [self.cache_layout.get(path) for path in packed.form.paths]
            leaves = tuple(map(_resized, packed.leaves, places))
            return Packed(leaves, packed.form, tuple(None if p is None else p.dim for p in places))

        return map_caches(whole, (args, kwargs))

    def _own_heads(self, call: Call) -> None:
        """Take this rank's part of whole caches; those that this model returned hold it already."""
        for index, path in call.places:
            where, leaf = self.cache_layout.get(path), call.leaves[index]
            if where is None:
                continue
            held = where.ranges[self.rank]
            size = leaf.shape[where.dim]
            if size == sum(stop - start for start, stop in held):
                continue
            if size != where.size:
                raise AutoTPError(
                    message(
                        "this cache was not made for this model",
                        values=f"{path} has {size} heads, rank {self.rank} of {self.tp_size} has "
                        f"{sum(stop - start for start, stop in held)} of {where.size}",
                        because="a cache holds this rank's heads, or those of the whole model",
                        try_="start with an empty cache, and pass on what the model returned",
                    )
                )
            call.leaves[index] = take(leaf, where.dim, held)

    def read(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call in its normal form, with this rank's part of caches."""
        signature = self._signatures.get(entry)
        if signature is None:
            signature = inspect.signature(self.skeleton.get_submodule(entry).forward)
            self._signatures[entry] = signature
        call = read(entry, *normal_call(signature, args, kwargs))
        if call.places and self.tp_size > 1:
            self._own_heads(call)
        return call

    def capture_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], entry: str = ""
    ) -> tuple[Capture, Call]:
        """The capture that serves a call (made now if there is none), and the call's leaves."""
        call = self.read(entry, args, kwargs)
        for serves, capture in self._captures.get(self._key(call), ()):
            if serves(call.leaves):
                return capture, call
        self._limit_captures(call)
        begun = time.perf_counter()
        capture = self._builder(self, call)
        if call.places:
            call = self.read(entry, args, kwargs)  # the capture says how its caches are split
        capture = self.register(call, capture, time.perf_counter() - begun)
        if self.rank == 0:
            log.info("captured a further call form of %s: %s", self._kind, capture)
        return capture, call

    def _limit_captures(self, call: Call) -> None:
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

    def compare_inputs(self, leaves: Sequence[Any], signature: Signature) -> None:
        """Raise GroupError on every rank if the ranks were given different inputs.

        Done on every call while `debug` is true (set by AUTOTP_DEBUG=1): it costs an exchange.
        """
        if self._tp_group is None or self._tp_group.size == 1:
            return
        every = self._tp_group.all_gather_object([_summary(leaf) for leaf in leaves])
        for index, name in enumerate(signature.inputs):
            found = [summaries[index] if index < len(summaries) else "" for summaries in every]
            if len(set(found)) > 1:
                raise GroupError(
                    message(
                        f"the ranks were given different {name.removeprefix('kwargs_')}",
                        values="; ".join(f"rank {r}: {text}" for r, text in enumerate(found[:8])),
                        because="the ranks of a tensor-parallel group compute one batch together",
                        try_="seed the data loader alike within a group, or broadcast the batch",
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
        mode = "training" if self.training else "evaluation"
        if torch.is_autocast_enabled(self._device_type()):
            mode += " under autocast"
        form = described(call, capture.signature.inputs, mode)
        reason = difference(form, [other.form for other in self.captures])
        capture = replace(capture, form=form, reason=reason, seconds=seconds)
        self._captures.setdefault(self._key(call), []).append((check, capture))
        return capture

    def _key(self, call: Call) -> tuple[Any, ...]:
        one = next((p for p in self.parameters() if p.is_floating_point()), None)
        if one is None:
            return (self.training, *call.key)
        autocast = torch.is_autocast_enabled(one.device.type)
        return (self.training, one.dtype, autocast, *call.key)

    def _device_type(self) -> str:
        return next((p.device.type for p in self.parameters()), "cpu")

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


def _resized(leaf: Any, where: LocalOutput | None) -> Any:
    """A tensor on meta with all heads, if it has this rank's."""
    if where is None:
        return leaf
    sizes = [where.size if i == where.dim else n for i, n in enumerate(leaf.shape)]
    return torch.empty(sizes, dtype=leaf.dtype, device="meta")


def _summary(leaf: Any) -> str:
    """Shape, dtype and a checksum of an input: equal for equal inputs."""
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    data = leaf.detach().cpu().contiguous()
    digest = hashlib.sha256(data.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return f"{[*leaf.shape]} {str(leaf.dtype).removeprefix('torch.')} {digest}"
