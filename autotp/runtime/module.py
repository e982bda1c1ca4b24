"""TensorParallel: the rank's model. The original's hierarchy, names, call forms and output
classes."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autotp import pytree
from autotp.checkpoint.whole import MARK, Whole, localize, mark
from autotp.errors import AutoTPError, GroupError, message
from autotp.examples import normal_call
from autotp.huggingface import face_of, same_draws
from autotp.planning import Plan
from autotp.program import Guards, Signature
from autotp.runtime.block import Block, Compiler
from autotp.runtime.group import Group
from autotp.runtime.outputs import LocalOutput, ShardedOutput, is_cache

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
        self.debug = os.environ.get("AUTOTP_DEBUG", "") not in ("", "0")
        self.compiler = Compiler()
        self.training = skeleton.training
        self._skeleton = (skeleton,)  # in a tuple: it is no submodule
        self._signature = inspect.signature(skeleton.forward)
        self._builder = builder
        self._captures: dict[Any, list[Capture]] = {}
        self._face: tuple[Any] | None = None
        self.cache_layout: tuple[LocalOutput | None, ...] = ()  # of the leaves of a returned cache

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
        found = [capture for captures in self._captures.values() for capture in captures]
        return tuple(sorted(found, key=lambda capture: capture.number))

    @property
    def face(self) -> Any:
        """The original's configuration and methods, computing with this module."""
        if self._face is None:
            self._face = (face_of(self.skeleton, self, self),)
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
        """The original's `generate`, with every rank's heads in its cache. Call it on every rank.

        Ranks sample the same tokens whatever their generators' seeds.
        """
        assert self._tp_group is not None
        with same_draws(self._tp_group):
            return self.face.generate(*args, **kwargs)

    def can_generate(self) -> bool:
        """Whether the original generates."""
        return bool(getattr(self.skeleton, "can_generate", lambda: False)())

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        """Parameters of the whole model."""
        return int(self.skeleton.num_parameters(*args, **kwargs))  # type: ignore[operator]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward."""
        capture, leaves = self.capture_for(args, kwargs)
        if self.debug:
            self.compare_inputs(leaves, capture.signature)
        results = list(self._tp_codes[capture.number].function(self, *leaves))
        for index, where in capture.outputs.items():
            if not where.cache:
                assert self._tp_group is not None
                results[index] = ShardedOutput(results[index], where, self._tp_group)
        output = pytree.unflatten(results, capture.signature.out_spec)
        return same_cache(output, (*args, *kwargs.values()))

    def whole_caches(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call with the leaves of caches on meta at the size they have with all heads."""

        def whole(leaf: Any, where: LocalOutput | None) -> Any:
            if where is None:
                return leaf
            sizes = [where.size if i == where.dim else n for i, n in enumerate(leaf.shape)]
            return torch.empty(sizes, dtype=leaf.dtype, device="meta")

        found: tuple[tuple[Any, ...], dict[str, Any]] = self.map_caches(whole, args, kwargs)
        return found

    def map_caches(
        self, function: Callable[[Any, LocalOutput | None], Any], args: Any, kwargs: Any
    ) -> Any:
        """A call with a function applied to each leaf of a cache and to its place."""
        leaves, spec = pytree.flatten((args, kwargs))
        places = sorted(pytree.leaves_under(spec, is_cache))
        if not places:
            return args, kwargs
        if len(places) != len(self.cache_layout):
            raise AutoTPError(
                message(
                    "this cache was not made by this model",
                    values=f"{len(places)} tensors, the model returns {len(self.cache_layout)}",
                    because="a cache holds this rank's heads only: it comes from an earlier call",
                    try_="start with an empty cache, and pass on what the model returned",
                )
            )
        for index, where in zip(places, self.cache_layout, strict=True):
            leaves[index] = function(leaves[index], where)
        return pytree.unflatten(leaves, spec)

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
            shared = name in ("_skeleton", "_signature", "_builder", "plan", "compiler", "group")
            twin.__dict__[name] = value if shared else copy.deepcopy(value, memo)
        twin._face = None  # the copy's own is made when it is asked for
        return twin


def same_cache(output: Any, given: Sequence[Any]) -> Any:
    """The caller's cache object holds the new keys and values, as after a call of the original."""
    caches = [value for value in given if is_cache(type(value))]
    if len(caches) != 1 or not isinstance(output, (dict, tuple)):
        return output
    items = list(output.items() if isinstance(output, dict) else enumerate(output))
    for key, value in items:
        if is_cache(type(value)):
            caches[0].__dict__.update(value.__dict__)
            if isinstance(output, dict):
                output[key] = caches[0]
            else:
                output = (*output[:key], caches[0], *output[key + 1 :])
    return output


def _summary(leaf: Any) -> str:
    """Shape, dtype and a checksum of an input: equal for equal inputs."""
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    data = leaf.detach().cpu().contiguous()
    digest = hashlib.sha256(data.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return f"{[*leaf.shape]} {str(leaf.dtype).removeprefix('torch.')} {digest}"


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
    sizes = [getattr(leaf, "shape", ()) for leaf in leaves]
    scope = {"L": {"args": args, "kwargs": kwargs}, "sizes": sizes}
    return all(eval(_code(condition), scope) for condition in guards.conditions)


@functools.lru_cache(maxsize=1024)
def _code(condition: str) -> Any:
    return compile(condition, "<guard>", "eval")
