"""A model taken through the passes one by one, for tests that look between them."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autotp.planning import Collectives, Plan
from autotp.program import Program
from autotp.skeleton import skeleton_of
from passes.capture import capture
from passes.choose import choose
from passes.infer import Inferred, infer
from passes.insert import insert
from passes.localize import localize
from passes.match import GemmPair, match
from tests.small import WIDTH

_CAPTURED: dict[str, Program] = {}


@dataclass(frozen=True)
class Stages:
    """What each pass made."""

    program: Program
    inferred: Inferred
    pairs: tuple[GemmPair, ...]
    plan: Plan
    inserted: Program
    counts: Collectives

    def local(self, rank: int) -> Program:
        return localize(self.inserted, self.plan, rank=rank)


def values(*shape: int) -> torch.Tensor:
    """Example values."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> Program:
    """The program of a model in float64; one stream of values [2, 6, WIDTH] if no example is given.

    Captures of equal models of `tests.small` are kept: capture is what costs time, and passes do
    not change programs.
    """
    given = args if args or kwargs else (values(2, 6, WIDTH),)
    if not type(model).__module__.endswith("tests.small") or kwargs:
        return capture(skeleton_of(model.double()), given, kwargs)
    plain = {name: value for name, value in vars(model).items() if isinstance(value, (bool, str))}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    shapes = [(x.dtype, *x.shape, x.requires_grad) for x in given]
    key = str((type(model), model, plain, frozen, shapes))
    if key not in _CAPTURED:
        _CAPTURED[key] = capture(skeleton_of(model.double()), given, kwargs)
    return _CAPTURED[key]


def stages(model: nn.Module, *args: Any, tp: int = 2, layout: Plan | None = None) -> Stages:
    """All passes up to the collectives."""
    program = captured(model, *args)
    inferred = infer(program)
    pairs = match(program, inferred)
    plan = choose(program, inferred, pairs, tp=tp, model=type(model).__name__, layout=layout)
    return Stages(program, inferred, pairs, plan, *insert(program, inferred, plan))


def nodes(graph: Graph, target: Any) -> list[Node]:
    """Nodes that call an operator, given as function or by name (`aten.view`)."""
    if callable(target):
        return [node for node in graph.nodes if node.target is target]
    return [n for n in graph.nodes if n.op == "call_function" and str(n.target).startswith(target)]


def names(graph: Graph, target: Any) -> list[str]:
    """The names of those nodes."""
    return [node.name for node in nodes(graph, target)]


def written(source: str, near: Callable[..., Any]) -> str:
    """The text of a source line `file.py:12`, of the file that a function is in."""
    file, _, number = source.rpartition(":")
    path = near.__code__.co_filename
    assert path.endswith(file), f"{source} is not a line of {path}"
    return linecache.getline(path, int(number)).strip()


class Fn(nn.Module):
    """A function of values, and of parameters (given as shapes) and modules by name, as a model."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            made = part if isinstance(part, nn.Module) else nn.Parameter(torch.ones(part))
            setattr(self, name, made)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)
