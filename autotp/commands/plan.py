"""`autotp plan`: what is split over the ranks, how, and why the rest is not."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from autotp.commands.files import read_text, reason, write_text
from autotp.commands.models import Source, load
from autotp.commands.output import show, working
from autotp.errors import InputError, PlanError, message
from autotp.planning import Plan

_OF_MODEL = ("sequence_parallel", "set", "input", "eval", "dump")  # they change or need graphs


def run(arguments: Namespace) -> int:
    """Print the plan, and write what is asked for."""
    plan = _saved(arguments) if arguments.plan is not None else made(arguments)
    if arguments.save is not None:
        write_text(arguments.save, plan.to_json() + "\n")
    if arguments.dump is not None:
        with working(arguments, f"writing {arguments.dump}"):
            _dump(plan, arguments.dump)
    if arguments.explain:
        found = {name: _explained(plan, name) for name in arguments.explain}
        show(arguments, "\n\n".join(found.values()), found)
    else:
        show(arguments, str(plan), plan.data())
    return 0


def _explained(plan: Plan, name: str) -> str:
    try:
        return plan.explain(name)
    except PlanError as error:
        raise InputError(str(error)) from error


def made(arguments: Namespace) -> Plan:
    """The plan of the command line's model, made on meta."""
    if arguments.tp is None:
        raise InputError(
            message(
                "--tp is needed",
                values="--tp not given",
                because="a plan is for a number of ranks",
                try_="--tp 8",
            )
        )
    return planned(arguments, built(arguments))


def _saved(arguments: Namespace) -> Plan:
    """A saved plan; if a model is given, its decisions with the graphs of the model."""
    saved = read_plan(arguments.plan)
    if arguments.tp not in (None, saved.tp):
        raise InputError(
            message(
                f"the plan in {arguments.plan} is not for tp={arguments.tp}",
                values=f"--tp {arguments.tp}, the plan is for tp={saved.tp}",
                because="a kept plan holds for its own number of ranks",
                try_=f"--tp {saved.tp}, or without --plan",
            )
        )
    if arguments.model is not None or arguments.config is not None:
        return planned(arguments, built(arguments), saved)
    useless = [name for name in _OF_MODEL if getattr(arguments, name)]
    if useless:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in useless)
        raise InputError(
            message(
                f"{options} cannot be had without a model",
                values=f"--plan {arguments.plan}, no MODEL",
                because="a plan's file holds decisions, and graphs are made from a model",
                try_=f"autotp plan MODEL --plan {arguments.plan}",
            )
        )
    return saved


def built(arguments: Namespace) -> Source:
    """The model of a command line, on meta."""
    with working(arguments, "building on meta"):
        return load(arguments)


def planned(arguments: Namespace, source: Source, saved: Plan | None = None) -> Plan:
    """The plan of a model as the command line wants it; with `saved` by that plan's decisions."""
    from autotp.api import plan

    with working(arguments, "capturing and planning"):
        return plan(
            source.model,
            arguments.tp,
            example_inputs=source.example_inputs,
            plan=saved,
            sequence_parallel=arguments.sequence_parallel,
        )


def read_plan(path: str) -> Plan:
    """A plan from a file; InputError says what is wrong with it, and where."""
    try:
        return Plan.from_json(read_text(path))
    except PlanError as error:
        raise InputError(f"{path}: {error}") from error


def _dump(plan: Plan, directory: str) -> None:
    try:
        plan.dump(Path(directory))
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise InputError(
            message("cannot write", values=directory, because=reason(error))
        ) from error
