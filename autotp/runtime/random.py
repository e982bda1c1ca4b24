"""Random operators of a transformed model draw from streams that the ranks agree on.

before  %dropout : dropout(%x, 0.1, True)
after   %seed : next_seed(group)
        %dropout : draw(dropout, "sharded", %seed, 1, %x, 0.1, True, group)

Outside sharded regions a value is the same on all ranks, so its mask is too (stream "replicated");
inside, each rank holds another part and needs another mask (stream "sharded"). A draw depends on
the seed of the call and on its own number alone, not on what was drawn before. So a part of the
model that is run again (activation checkpointing) draws the same again. Of the caller's generators
only the CPU's moves, by one number a call, which is the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # group.py imports mix
    from autotp.runtime.group import Group

_WORD = 0xFFFFFFFFFFFFFFFF


def mix(*values: int) -> int:
    """A hash of integers in 63 bits, each of them random-like (splitmix64, chained)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


def generators(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of this process's generators: the CPU's, and that of a device of another type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type not in ("cpu", "meta"):
        states[device.type] = torch.get_device_module(device.type).get_rng_state(device)
    return states


def set_generators(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    """Set those generators whose states are given."""
    for kind, state in states.items():
        if kind == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(kind).set_rng_state(state, device)


def next_seed(group: Group) -> int:
    """The seed of one call of the model: the same on every rank, another for every call.

    The first rank's generator draws it, so `torch.manual_seed` there decides all that follows, and
    activation checkpointing, which sets generators back, finds it again.
    """
    return group.first_of(ticket())


def ticket() -> int:
    """62 random bits of the caller's generator."""
    return int(torch.randint(2**62, (), device="cpu"))


def draw(
    op: Callable[..., Any],
    stream: str,
    seed: int,
    index: int,
    *args: Any,
    group: Group,
    **kwargs: Any,
) -> Any:
    """Run a random operator with the generator seeded for this one draw.

    `index` is the operator's number in the graph. `stream` is "replicated" (the same on all ranks)
    or "sharded" (another on each rank); "whole" takes no seed, but draws from the caller's
    generator, as the model would, what the first rank's gives.
    """
    assert stream in ("replicated", "sharded", "whole"), f"not a random stream: {stream!r}"
    device = _device(args, kwargs)
    if stream == "whole":
        generator = _default_generator(device)
        generator.set_state(group.broadcast_object(generator.get_state()))
        return op(*args, **kwargs)
    own = (group.rank + 1,) if stream == "sharded" else ()
    with _seeded(device, mix(seed, index, *own)):
        return op(*args, **kwargs)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    generator = _default_generator(device)
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where an operator draws: at its first tensor; if it has none, where it makes one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type in ("cpu", "meta"):  # nothing is drawn on meta
        return torch.default_generator
    module = torch.get_device_module(device.type)
    index = module.current_device() if device.index is None else device.index
    generator = module.default_generators[index]
    assert isinstance(generator, torch.Generator)
    return generator
