"""Whether an axis that a rule bars could be sharded all the same, as nothing but shards go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from autotp.axes import Axis, is_sharded, leaves
from autotp.planning import Plan
from tests.rules.harness import Case, localized, plan_of, split
from tests.rules.ranks import positions, run

Place = tuple[int, int, int]  # of an axis: operand, dim of it, leaf of that


def unjustified(cases: Iterable[Case]) -> dict[Place, str]:
    """Barred axes of operands along which shards gave the right results in every one of these cases
    (of the same call with other sizes), over 2 and over 3 ranks; with the reason of the bar."""
    found: dict[Place, str] | None = None
    for case in cases:
        mine = {
            place: case.inferred.bars[axis.name].reason
            for place, axis in barred(case)
            if all(right(case, axis, p) for p in (2, 3) if (axis.size or 0) >= p)
        }
        found = mine if found is None else {k: v for k, v in found.items() if k in mine}
    return found or {}


def barred(case: Case) -> Iterator[tuple[Place, Axis]]:
    """The axes of operands that a rule barred, with their places."""
    for index, node in enumerate(case.inputs):
        for i, dim in enumerate(case.inferred.dims[node]):
            for j, axis in enumerate(leaves(dim)):
                bar = case.inferred.bars.get(axis.name)
                if bar is None or (axis.size or 0) < 2:
                    continue
                if not bar.reason.startswith("there is no rule"):
                    yield (index, i, j), axis


def right(case: Case, axis: Axis, p: int) -> bool:
    """Whether shards along an axis give the whole results."""
    plan = plan_of(axis, p)
    envs, graphs = split(case, plan), localized(case, plan)
    # an operator that refuses shards shows that they will not do
    with contextlib.suppress(RuntimeError, IndexError, ValueError):
        for _ in run(graphs, envs):
            pass
        parts = [[env[node.name] for env in envs] for node in case.results]
        return all(
            any(_equal(made, node.meta["val"]) for made in _guesses(case, plan, node, mine))
            for node, mine in zip(case.results, parts, strict=True)
        )
    return False


def _guesses(case: Case, plan: Plan, node: Node, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """What the whole could be: every rank's part, the sum of them, parts laid end to end in any
    dim, or at the positions that inference says."""
    if all(_equal(part, parts[0]) for part in parts):
        yield parts[0]
    if len({part.shape for part in parts}) == 1:
        yield torch.stack(list(parts)).sum(0)
    for i, dim in enumerate(case.inferred.dims[node]):
        if len({part.shape[:i] + part.shape[i + 1 :] for part in parts}) > 1:
            continue
        yield torch.cat(list(parts), i)
        order = torch.cat([positions(dim, plan.shares, rank) for rank in range(plan.tp)])
        if is_sharded(dim, plan.shares) and len(order) == sum(part.shape[i] for part in parts):
            yield torch.cat(list(parts), i).index_select(i, order.argsort())


def _equal(found: Tensor, want: Tensor) -> bool:
    return (
        found.shape == want.shape
        and found.dtype == want.dtype
        and torch.allclose(found, want, 1e-9, 1e-9, equal_nan=True)
    )
