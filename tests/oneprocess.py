"""All ranks of a model in one process, and the comparison with the model itself that tests rely
on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotp import pytree
from autotp.build import build
from autotp.examples import call_of
from autotp.pipeline import plan_of
from autotp.planning import Plan
from autotp.runtime.group import Group
from autotp.runtime.lockstep import Lockstep
from autotp.runtime.sharded import local
from autotp.skeleton import skeleton_of
from passes.capture import capture
from passes.normalize import normalize
from tests.models import refill as refill


def parallel(model: nn.Module, tp: int, example: Any) -> Lockstep:
    """Every rank's module, as `autotp.parallelize` makes it, run in lockstep."""
    return parallels(model, (tp,), example)[0]


def parallels(model: nn.Module, tps: Sequence[int], example: Any) -> list[Lockstep]:
    """The same for several tp; the model is captured once, which is what takes the time."""
    skeleton = skeleton_of(model)
    call = call_of(skeleton, example)
    program = normalize(capture(skeleton, *call))
    made = []
    for tp in tps:
        plan = plan_of(program, tp=tp, model=type(model).__name__)
        ranks = [build(model, skeleton, plan, group, call) for group in Group.in_process(tp)]
        made.append(Lockstep(ranks))
    return made


def assert_same(model: nn.Module, lockstep: Lockstep, inputs: Any, tol: float = 1e-9) -> None:
    """Outputs, gradients of inputs, and every parameter's gradient on every rank are the model's.

    Differences are relative to the largest reference value of each tensor. `inputs` is a tuple
    (positional) or a dict (keywords).
    """
    plan: Plan = lockstep.plan
    wanted, wanted_grads = _run(model, inputs)
    found, found_grads = _run(lockstep, inputs)
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        _close(f"output {i}", a, b, tol)
    for i, (a, b) in enumerate(zip(found_grads, wanted_grads, strict=True)):
        _close(f"gradient of input {i}", a, b, tol)
    assert_same_on_all_ranks(lockstep, inputs, tol)
    theirs = [dict(rank.named_parameters()) for rank in lockstep.ranks]
    for name, parameter in model.named_parameters():
        assert all(name in mine for mine in theirs), f"{name} is missing"
        for rank, mine in enumerate(theirs):
            grad = mine[name].grad
            whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            expected = _part(whole, plan, name, rank)
            assert mine[name].shape == expected.shape, f"{name} on rank {rank}"
            _close(
                f"{name} on rank {rank}",
                torch.zeros_like(expected) if grad is None else local(grad),
                expected,
                tol,
                whole,
            )
    _covered(model, plan)


def assert_same_on_all_ranks(lockstep: Lockstep, inputs: Any, tol: float = 1e-9) -> None:
    """Every rank returns the same."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    with torch.no_grad():
        results, _, _ = lockstep.run(args, dict(kwargs))
    for values in zip(*results, strict=True):
        for value in values[1:]:
            if isinstance(value, Tensor):
                _close("a rank's output", value, values[0], tol)


def _run(model: nn.Module, inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of floating inputs, of one forward and backward."""
    model.zero_grad(set_to_none=True)
    leaves: list[Tensor] = []

    def fresh(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        leaves.append(x.detach().clone().requires_grad_())
        return leaves[-1]

    given = pytree.map_tensors(fresh, inputs)
    result = model(**given) if isinstance(given, Mapping) else model(*given)
    outputs = [x for x in pytree.flatten(result)[0] if isinstance(x, Tensor)]
    _total(outputs).backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [x.detach() for x in outputs], grads


def _total(outputs: Sequence[Tensor]) -> Tensor:
    """A number in which every output's every element counts differently."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for x in outputs:
        if x.requires_grad:
            weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            total = total + (x * weight.to(x.dtype)).sum()
    return total


def _part(whole: Tensor, plan: Plan, name: str, rank: int) -> Tensor:
    for dim, held in enumerate(plan.ranges(name, rank)):
        places = [i for start, stop in held for i in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(places, dtype=torch.long))
    return whole


def _covered(model: nn.Module, plan: Plan) -> None:
    """The ranks hold every item of a sharded parameter once, and all of every other one."""
    for name, parameter in model.named_parameters():
        counts = torch.zeros(parameter.shape)
        for rank in range(plan.tp):
            mark = torch.ones(parameter.shape)
            for dim, held in enumerate(plan.ranges(name, rank)):
                keep = torch.zeros(parameter.shape[dim])
                for start, stop in held:
                    keep[start:stop] = 1
                shape = [1] * parameter.dim()
                shape[dim] = -1
                mark = mark * keep.view(shape)
            counts += mark
        times = 1 if plan.is_sharded(name) else plan.tp
        assert bool((counts == times).all()), f"{name} is not held {times} times"


def _close(what: str, a: Tensor, b: Tensor, tol: float, scale_of: Tensor | None = None) -> None:
    assert a.shape == b.shape, f"{what}: {tuple(a.shape)} is not {tuple(b.shape)}"
    if not b.is_floating_point():
        assert torch.equal(a, b), what
        return
    if not b.numel():
        return
    scale = max(float((b if scale_of is None else scale_of).abs().max()), 1e-3)
    error = float((a - b).abs().max()) / scale
    assert error <= tol, f"{what} differs by {error:.1e}, more than {tol:.0e}"
