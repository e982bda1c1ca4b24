"""The order of the passes, top to bottom."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from autotp.errors import PlanError, message
from autotp.options import DEFAULTS, Options
from autotp.planning import Plan
from autotp.program import Program
from autotp.shadow import require_own_passes

require_own_passes()  # before the imports below fail without saying why

# ruff: noqa: E402
from passes.capture import capture
from passes.check import check
from passes.choose import choose
from passes.divide import divide
from passes.emit import Emitted, emit
from passes.fold import fold
from passes.fuse import fuse
from passes.group import group
from passes.hoist import hoist
from passes.infer import Inferred, infer
from passes.insert import insert
from passes.localize import localize
from passes.match import match
from passes.merge import merge
from passes.normalize import normalize
from passes.part import part
from passes.sequence import sequence
from passes.share import share
from passes.unmask import unmask


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for cycles: it would go through hundreds of thousands of live objects again and
    again, an eighth of the time, to free 20 MB."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@_uncollected()
def make_plan(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    tp: int,
    layout: Plan | None = None,
    options: Options = DEFAULTS,
    entry: str = "",
) -> Plan:
    """A model without storage and a call become a plan. `layout` fixes how parameters lie, `entry`
    names the submodule that is called, if it is not the model itself."""
    if layout is not None and layout.tp != tp:
        raise PlanError(
            message(
                f"a plan for {layout.tp} ranks cannot be kept on {tp}",
                values=f"plan of {layout.model} for tp={layout.tp}, tp={tp}",
                because="its bounds say what each of its own ranks holds",
                try_=f"tp={layout.tp}, or a new plan for tp={tp}",
            )
        )
    program = captured(skeleton, args, kwargs, entry)
    name = type(skeleton).__name__
    return plan_of(program, tp=tp, model=name, layout=layout, options=options)


def captured(
    skeleton: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], entry: str = ""
) -> Program:
    """The program of a call, from which plans for any number of ranks are made."""
    program = capture(skeleton, args, kwargs, entry, stamp=not _left_out("blocks"))
    return _peephole(unmask, normalize(program))


def plan_of(
    program: Program,
    *,
    tp: int,
    model: str,
    layout: Plan | None = None,
    options: Options = DEFAULTS,
) -> Plan:
    """A captured program becomes a plan. Where much of it would be whole, it is decided again with
    inputs taken in parts."""
    inferred, plan = _decided(program, tp, model, layout)
    parted = part(program, inferred, plan, layout)
    if parted is not program:
        program, first = parted, plan
        inferred, plan = _decided(program, tp, model, layout)
        plan = _with_reasons(plan, first)
    sharded, counts = merge(*insert(program, inferred, plan, options))
    if options.sequence_parallel:
        sharded, counts = sequence(sharded, counts, ranks=tp)
    for change in (share, divide, fuse):
        sharded = _peephole(change, sharded)
    if not options.sequence_parallel:
        sharded, counts = hoist(sharded, counts)
    return plan.with_stages([("captured", program), ("inserted", sharded)], counts)


def _peephole(change: Callable[[Program], Program], program: Program) -> Program:
    """The program after a pass that only saves time, and that AUTOTP_WITHOUT=name,name leaves
    out."""
    return program if _left_out(change.__name__) else change(program)


def _left_out(name: str) -> bool:
    return name in os.environ.get("AUTOTP_WITHOUT", "").split(",")


def _with_reasons(plan: Plan, first: Plan) -> Plan:
    """The reasons of before inputs were taken in parts: too few heads, not the parts of others."""
    before = {kept.name: kept for kept in first.kept}
    kept = tuple(before.get(kept.name, kept) for kept in plan.kept)
    return replace(plan, kept=kept, facts=first.facts)


def _decided(program: Program, tp: int, model: str, layout: Plan | None) -> tuple[Inferred, Plan]:
    inferred = infer(program)
    pairs = match(program, inferred)
    return inferred, choose(program, inferred, pairs, tp=tp, model=model, layout=layout)


def rank_program(plan: Plan, rank: int, *, shapes: bool = False) -> Program:
    """The rank's program, proved."""
    program = _peephole(group, localize(plan.program(), plan, rank=rank))
    check(program, plan, rank=rank)
    if shapes:
        return _peephole(group, localize(plan.program(), plan, rank=rank, shapes=True))
    return program


def rank_graph(plan: Plan, rank: int) -> GraphModule:
    """The rank's program as a GraphModule with parameters of local shape on the meta device."""
    from autotp.printing import graph_module

    return graph_module(rank_program(plan, rank, shapes=True), plan, rank)


def emit_rank(plan: Plan, rank: int, first: Mapping[str, int], same: Mapping[str, str]) -> Emitted:
    """The rank's program as one graph for each module call."""
    program = rank_program(plan, rank)
    if plan.tp > 1:
        program = _peephole(fold, program)
    return emit(program, first=first, same=same)


__all__ = ["captured", "emit_rank", "make_plan", "plan_of", "rank_graph", "rank_program"]
