"""`autotp graph`: the graph of a module or of the model, before, after, and of every rank."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from autotp.commands.files import write_text
from autotp.commands.output import printable, working
from autotp.commands.plan import made
from autotp.errors import InputError, PlanError, message
from autotp.graphs import dot, text
from autotp.graphs.page import page
from autotp.graphs.select import Part, call_text, part
from autotp.graphs.values import Value, View, local_shape, view
from autotp.planning import Plan

_SUFFIXES = {".dot": "dot", ".gv": "dot", ".svg": "svg", ".graphml": "graphml", ".html": "html"}


def run(arguments: Namespace) -> int:
    """Print or write the graph, or the difference of two."""
    _must_agree(arguments)
    kind = "json" if arguments.json else arguments.format or _by_name(arguments.output)
    plan = made(arguments)
    try:
        draw = _difference if arguments.diff else _drawn
        found = draw(plan, arguments, kind)
    except PlanError as error:
        raise InputError(str(error)) from error
    if arguments.output is not None:
        write_text(arguments.output, found)
        print(f"wrote {arguments.output}, {len(found):,} characters", file=sys.stderr)
    else:
        found = printable(found)
        print(found, end="" if found.endswith("\n") or not found else "\n")
    return 0


def _must_agree(arguments: Namespace) -> None:
    """A format that would be passed over is an error."""
    wants = f"--format {arguments.format}"
    if arguments.format and arguments.json:
        raise InputError(
            message(
                f"{wants} and --json are two formats",
                values=f"{wants} --json",
                because="one is written",
                try_="one of them",
            )
        )
    if arguments.diff and arguments.format not in (None, "text"):
        raise InputError(
            message(
                "a difference is text",
                values=f"--diff {' '.join(arguments.diff)} {wants}",
                because="lines of two graphs are compared",
                try_="--format text, or --json",
            )
        )


def _by_name(output: str | None) -> str:
    return _SUFFIXES.get(Path(output).suffix, "text") if output else "text"


def _drawn(plan: Plan, arguments: Namespace, kind: str) -> str:
    if kind == "html":
        with working(arguments, "making the page"):
            return page(plan)
    chosen = part(view(plan, arguments.view), arguments.module)
    if kind == "json":
        return json.dumps(_data(plan, chosen, arguments.view), indent=1)
    if kind == "text":
        return text.python_text(chosen)
    draw = {"dot": dot.dot_text, "svg": dot.svg_text, "graphml": dot.graphml_text}[kind]
    with working(arguments, f"drawing {len(chosen.values)} values"):
        return draw(chosen)


def _difference(plan: Plan, arguments: Namespace, kind: str) -> str:
    parts = []
    views: dict[str, View] = {}
    for named in arguments.diff:
        module, at, which = named.rpartition("@")
        which = which or arguments.view
        views[which] = views.get(which) or view(plan, which)
        parts.append(part(views[which], module if at else arguments.module))
    one, other = parts
    found = text.difference(one, other)
    return json.dumps({"difference": found.splitlines()}, indent=1) if kind == "json" else found


def _data(plan: Plan, chosen: Part, which: str) -> dict[str, Any]:
    placed = which != "before"
    return {
        "title": chosen.title,
        "module": chosen.module,
        "inputs": list(chosen.inputs),
        "returned": list(chosen.returned),
        "values": [_value(plan, chosen, value, placed) for value in chosen.values],
    }


def _value(plan: Plan, chosen: Part, value: Value, placed: bool) -> dict[str, Any]:
    data = {key: found for key, found in vars(value).items() if found not in ("", ())}
    data["arguments"] = call_text(value, {}).partition("(")[2][:-1]
    data["dims"] = [str(dim) for dim in value.dims]
    if placed and value.placement == "S":
        data["local"] = [list(local_shape(value, plan, rank)) for rank in range(plan.tp)]
    return data
