"""The part of a graph that lies in one module, with names of its own."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from autotp.errors import PlanError, message
from autotp.explaining import nearest
from autotp.graphs.arguments import Operand
from autotp.graphs.values import Value, View


@dataclass(frozen=True)
class Part:
    """The values of a module. `inputs` come from outside, `returned` are read there; `names` are
    short: of parameters relative to the module, of the rest counted from the module's start."""

    title: str
    module: str
    values: tuple[Value, ...]
    inputs: tuple[str, ...]
    returned: tuple[str, ...]
    names: dict[str, str]


def part(view: View, module: str = "") -> Part:
    """The values of a module and of all below it; of the whole graph without a module."""
    inside = [value for value in view.values if is_below(value.module, module)]
    if not any(value.role not in ("parameter", "size") for value in inside):
        raise _unknown(module, sorted({value.module for value in view.values}))
    here = {value.name for value in inside}
    inputs: dict[str, None] = {}
    for value in inside:
        inputs.update(dict.fromkeys(name for name in value.operands if name not in here))
    sizes = {value.name for value in view.values if value.role == "size"}
    outside = {n for value in view.values if value.name not in here for n in value.operands}
    outside |= set(view.returned)
    returned = tuple(v.name for v in inside if v.name in outside and v.role != "size")
    names = _names(inside, module)
    for name in inputs:
        names.setdefault(name, name)
    title = f"{module or 'the model'}: {view.title}"
    given = tuple(name for name in inputs if name not in sizes)
    return Part(title, module, tuple(inside), given, returned, names)


def is_below(path: str, module: str) -> bool:
    """Whether a module path is a module's or that of one inside it."""
    return not module or path == module or path.startswith(module + ".")


def call_text(value: Value, names: dict[str, str]) -> str:
    """The call that makes a value, with its operands by these names."""
    pieces = [names.get(p.name, p.name) if isinstance(p, Operand) else p for p in value.arguments]
    if value.operator == "getitem" and len(pieces) == 2:
        return f"{pieces[0]}[{pieces[1].removeprefix(', ')}]"
    return f"{value.operator}({''.join(pieces)})"


def _names(values: list[Value], module: str) -> dict[str, str]:
    counts: Counter[str] = Counter()
    found = {}
    for value in values:
        if value.role in ("parameter", "buffer", "constant"):
            path = value.operator
            found[value.name] = (
                path[len(module) + 1 :] if is_below(path, module) and module else path
            )
        elif value.role in ("size", "input") or not module:
            found[value.name] = value.name
        else:
            base = re.sub(r"(_\d+)+$", "", value.name)
            counts[base] += 1
            found[value.name] = f"{base}_{counts[base] - 1}" if counts[base] > 1 else base
    return found


def _unknown(module: str, modules: list[str]) -> PlanError:
    return PlanError(
        message(
            f"there is no module {module!r} in the graph",
            values=f"{len(modules)} modules compute something",
            because="none has this path",
            try_=", ".join(nearest(module, modules)) or "a path from model.named_modules()",
        )
    )
