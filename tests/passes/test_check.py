"""The checker: what it proves of all ranks together, and what its errors say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autotp.errors import CheckError
from autotp.pipeline import rank_program
from autotp.planning import Plan
from autotp.runtime.collectives import reduce_from_region
from passes.check import check, collectives, same_order
from passes.localize import localize
from tests.test_mutations import delete, plan_of, rewritten


def with_bounds(plan: Plan, bounds: tuple[int, ...]) -> Plan:
    """The plan with other borders of its first MLP axis."""
    axes = [replace(axis, bounds=bounds) if axis.kind == "mlp" else axis for axis in plan.axes]
    return replace(plan, axes=tuple(axes))


def test_ranks_issue_the_same_collectives_in_the_same_order() -> None:
    plan = plan_of("training")
    programs = [rank_program(plan, rank) for rank in range(plan.tp)]
    same_order(programs)
    counts = plan.collectives
    issued = [name for name, *_ in collectives(programs[0])]
    assert issued.count("reduce_from_region") == counts.forward
    assert issued.count("copy_to_region") == counts.backward


def test_a_rank_that_misses_a_collective_is_named() -> None:
    plan = plan_of("training")
    programs = [rank_program(plan, rank) for rank in range(plan.tp)]
    nodes = list(programs[2].graph.nodes)
    number = next(i for i, n in enumerate(nodes) if n.target is reduce_from_region)
    broken = rewritten(programs[2], number, delete)
    assert broken is not None
    broken.graph.eliminate_dead_code()
    with pytest.raises(CheckError, match="ranks 0 and 2 issue different collectives"):
        same_order([*programs[:2], broken])


@pytest.mark.parametrize(
    ("bounds", "what"), [((0, 3, 3, 8), ""), ((0, 4, 5, 7), "plain"), ((1, 4, 6, 8), "plain")]
)
def test_every_row_belongs_to_one_rank(bounds: tuple[int, ...], what: str) -> None:
    plan = with_bounds(plan_of("plain"), bounds)
    if not what:  # a partition, if an odd one: a rank may hold nothing
        program = localize(plan.program(), plan, rank=1)
        check(program, plan, rank=1)
        return
    with pytest.raises(CheckError, match="are not a partition"):
        check(localize(plan_of("plain").program(), plan, rank=1), plan, rank=1)


def test_an_error_names_the_node_its_line_and_the_rule() -> None:
    plan = plan_of("plain")
    program = localize(plan.program(), plan, rank=0)
    number = next(i for i, n in enumerate(program.graph.nodes) if n.target is reduce_from_region)
    broken = rewritten(program, number, delete)
    assert broken is not None
    with pytest.raises(CheckError) as caught:
        check(broken, plan, rank=0)
    text = str(caught.value)
    assert "is not proved at add" in text and "small.py:" in text
    assert ("P" in text and "g must come first" in text) or "partial" in text


def test_the_proof_is_cheap() -> None:
    """Counted in operators run, not in seconds: one for each different call of a graph."""
    plan = plan_of("evaluation")
    program = localize(plan.program(), plan, rank=0)
    ran = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal ran
            ran += 1
            return func(*args, **(kwargs or {}))

    with Count():
        check(program, plan, rank=0)
    assert ran <= 6 * len(program.graph.nodes)
