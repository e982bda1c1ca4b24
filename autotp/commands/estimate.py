"""`autotp estimate`: memory, messages and time of a training step on a described machine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autotp.commands.models import load
from autotp.commands.output import show, working
from autotp.errors import InputError, message
from autotp.estimating.estimate import (
    Estimate,
    assumptions,
    described,
    estimate,
    needs_at_least,
    resized,
    text,
)
from autotp.estimating.machines import GIB, MACHINES, Machine


def run(arguments: Namespace) -> int:
    """Print the estimate; 1 if it does not fit."""
    if (arguments.tp is None) and not arguments.fit:
        raise InputError(
            message(
                "--tp or --fit is needed",
                values="neither is given",
                because="an estimate is for a number of ranks",
                try_="--tp 8, or --fit for the smallest number that fits",
            )
        )
    machine = _machine(arguments)
    with working(arguments, "building on meta"):
        source = load(arguments)
    if arguments.precision != "float32":
        source.model.to(getattr(torch, machine.half))
    call = _call(source.model, source.example_inputs, arguments)
    found = list(_tried(arguments, source.model, call, machine))
    assumed = assumptions(machine, arguments.precision, described(call))
    best = found[-1]
    shown = [_line(one) for one in found[:-1]]
    if isinstance(best, Estimate):
        shown.append(text(best, machine))
    else:
        shown.append(_line(best))
    fits = isinstance(best, Estimate) and best.fits
    if arguments.fit:
        shown.append(
            f"smallest tp that fits: {_size(best)[0]}" if fits else "none that was tried fits"
        )
    data = best.data() if isinstance(best, Estimate) else {"fits": False}
    tried = [{"tp": _size(one)[0], "bytes": _size(one)[1]} for one in found]
    show(
        arguments,
        "\n".join([*shown, "assumed:", *(f"  {line}" for line in assumed)]),
        {**data, "machine": vars(machine), "assumptions": assumed, "tried": tried},
    )
    return 0 if fits else 1


Tried = Estimate | tuple[int, int]  # tp and the bytes that it needs at least


def _tried(arguments: Namespace, model: Any, call: Any, machine: Machine) -> Iterator[Tried]:
    """Estimates up to the first that fits, of one capture. Ranks on which not even weights fit are
    passed over."""
    from autotp.options import Options
    from autotp.pipeline import captured, plan_of
    from autotp.skeleton import skeleton_of

    with working(arguments, "capturing"):
        program = captured(skeleton_of(model), *call)
    make = partial(plan_of, program, model=type(model).__name__)
    sizes = _sizes(arguments, machine) if arguments.fit else [arguments.tp]
    for tp in sizes:
        with working(arguments, f"planning tp={tp}"):
            made = make(tp=tp)
        least = needs_at_least(made, arguments.precision)
        if arguments.fit and least > machine.memory - machine.reserve:
            yield tp, least
            continue
        sliced = None
        if tp > 1:
            with working(arguments, f"planning tp={tp} with sequence parallelism"):
                sliced = make(tp=tp, options=Options(sequence_parallel=True))
        with working(arguments, f"steps of tp={tp} on meta"):
            found = estimate(
                model,
                made,
                call,
                machine,
                precision=arguments.precision,
                sliced=sliced,
                checkpointing=arguments.checkpointing,
                sequence_parallel=arguments.sequence_parallel,
            )
        yield found
        if found.fits:
            return


def _sizes(arguments: Namespace, machine: Machine) -> list[int]:
    most = arguments.tp or machine.devices
    if arguments.every:
        return list(range(1, most + 1))
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _size(one: Tried) -> tuple[int, int]:
    return (one.tp, one.memory[one.chosen].total) if isinstance(one, Estimate) else one


def _line(one: Tried) -> str:
    tp, needed = _size(one)
    least = "" if isinstance(one, Estimate) else "weights, gradients and optimizer alone "
    return f"tp={tp}: {least}{needed / GIB:.2f} GiB, does not fit"


def _call(model: Any, given: Any, arguments: Namespace) -> Any:
    from autotp.examples import call_of

    call = call_of(model, given)
    sizes = (arguments.batch, arguments.seq)
    if given is None:  # what the model shows of itself is a few tokens
        sizes = (arguments.batch or 8, arguments.seq or 1024)
    return resized(call, *sizes)


def _machine(arguments: Namespace) -> Machine:
    machine = MACHINES[arguments.machine]
    given = {
        "memory": arguments.memory and arguments.memory * GIB,
        "flops_share": arguments.flops_share,
        "link_share": arguments.link_share,
    }
    return replace(machine, **{key: value for key, value in given.items() if value})
