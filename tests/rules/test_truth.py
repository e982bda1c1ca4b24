"""Rules proved by execution: an operator on shards, along every axis that its rule allows, gives
the shards of what it gives on the whole, gradients too; and an axis that a rule bars gives
something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotp.rules import RULES
from tests.rules.cases import CASES, Call, Sizes, bits, fixed, ints, x
from tests.rules.harness import Case, one, prove
from tests.rules.naive import unjustified

aten = torch.ops.aten

# Rules without a case, and what proves them.
ELSEWHERE = {
    "arange": "each rank takes its part of the whole: tests/test_small_models.py (SlopedAttention)",
    "linspace": "the same rule as arange",
    "sym_size": "gives a number",
    "_grouped_mm": "not for float64 on a CPU; the same rule as grouped_mm_fallback",
    "grouped_mm_fallback": "tests/rules/test_structures.py",
}

# Barred although shards would do: the reasons that a rule gives, with why it bars.
CONSERVATIVE = {
    ("einsum", "einsum takes a diagonal over it"): "one axis may not split a tensor twice",
    ("gather", "aten.gather looks items up by position"): "no model needs its index dim split",
}

SEVERAL = [(3, 4, 5, 6), (4, 5, 6, 3), (6, 3, 4, 5)]
sizes = st.tuples(*[st.integers(1, 6)] * 4)
few = settings(max_examples=8, deadline=None, derandomize=True, database=None)


def made(call: Call, s: Sizes) -> Case:
    """A call with sizes, inferred."""
    op, *args = call(s)
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    return one(op, *args, **kwargs)


@pytest.mark.parametrize("op", CASES)
@given(sizes)
@few
def test_shards_of_a_call_are_the_call_on_shards(op: str, s: Sizes) -> None:
    for call in CASES[op]:
        prove(made(call, s))


@pytest.mark.parametrize("op", CASES)
def test_an_axis_is_barred_for_a_reason(op: str) -> None:
    found = {
        reason
        for call in CASES[op]
        for reason in unjustified(made(call, s) for s in SEVERAL).values()
    }
    assert found == {reason for name, reason in CONSERVATIVE if name == op}


def test_something_is_sharded_for_every_rule() -> None:
    """A rule that refuses everything would pass the tests above."""
    tried = {op: [prove(made(call, SEVERAL[0])) for call in CASES[op]] for op in CASES}
    idle = {op for op, outcomes in tried.items() if not any(o.sharded for o in outcomes)}
    assert idle == {"scalar_tensor", "histc", "bincount"}


def test_every_rule_has_a_case() -> None:
    names = {name.split(".")[1] for name in RULES}
    assert names == set(CASES) | set(ELSEWHERE)
    assert not set(CASES) & set(ELSEWHERE)
    for op, calls in CASES.items():
        targets = {str(call(SEVERAL[0])[0]) for call in calls}
        assert {target.split(".")[1] for target in targets} == {op}


# ---- operators that torch tags as pointwise need no rule


def tagged() -> Iterator[Any]:
    """Pointwise operators of nothing but tensors: all that torch has."""
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, overload)
            schema = op._schema
            needed = [a for a in schema.arguments if not a.has_default_value()]
            if (
                torch.Tag.pointwise in op.tags
                and torch.Tag.nondeterministic_seeded not in op.tags
                and not schema.is_mutable
                and [str(r.type) for r in schema.returns] == ["Tensor"]
                and needed
                and {str(a.type) for a in needed} == {"Tensor"}
                and not name.endswith("_backward")
                and name not in CASES
            ):
                yield op


@st.composite
def broadcast(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Three shapes that broadcast against each other, of 1 to 4 dims."""
    whole = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    shapes = []
    for _ in range(3):
        kept = draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole)))
        shape = [size if keep else 1 for size, keep in zip(whole, kept, strict=True)]
        shapes.append(tuple(shape[draw(st.integers(0, len(shape))) :]))
    return shapes


def operand(op: Any, shape: tuple[int, ...], seed: int) -> Tensor:
    name = op._schema.name
    if any(word in name for word in ("bitwise", "shift", "gcd", "lcm")):
        return ints(9, *shape)
    if name == "aten::where" and seed == 0:
        return bits(*shape)
    value = x(*shape, seed=seed).abs() + 0.1
    return fixed(value) if any(word in name for word in ("igamma", "zeta")) else value


@pytest.mark.parametrize("op", tagged(), ids=str)
@given(broadcast())
@few
def test_pointwise_operators_need_no_rule(op: Any, shapes: list[tuple[int, ...]]) -> None:
    clamps = op._schema.name in ("aten::clamp", "aten::clip")  # of two defaults one must be given
    given = 1 if clamps else sum(not a.has_default_value() for a in op._schema.arguments)
    operands: list[Any] = [operand(op, shape, i) for i, shape in enumerate(shapes[:given])]
    if clamps and op._overloadname == "Tensor":
        given = 2
        operands += [x(*shapes[1], seed=1)]
    elif clamps:
        operands += [0.5]
    outcome = prove(one(op, *operands))
    longest = [max((s[::-1][i] for s in shapes[:given] if len(s) > i), default=1) for i in range(4)]
    assert outcome.sharded == sum((n >= 2) + (n >= 3) for n in longest)
    assert not outcome.barred
