"""A graph as Python that a person reads, and the difference of two."""

from __future__ import annotations

import difflib

from autotp.graphs.select import Part, call_text
from autotp.graphs.values import NOTES, Value

_WIDTH = 78  # where notes begin, at most


def python_text(chosen: Part) -> str:
    """A function with one line for each value: how it lies, its shape, and what f and g do."""
    tensors = [v for v in chosen.values if v.role in ("parameter", "buffer", "constant")]
    body = [v for v in chosen.values if v not in tensors and v.role not in ("size", "input")]
    inputs = [v for v in chosen.values if v.role == "input"]
    lines = [f"# {chosen.title}"]
    lines += [f"# {chosen.names[v.name]}: {_lies(v)}" for v in tensors]
    given = [*(v.name for v in inputs), *(chosen.names[n] for n in chosen.inputs)]
    lines.append(f"def forward(self{''.join(f', {name}' for name in given)}):")
    calls = [f"    {chosen.names[v.name]} = {call_text(v, chosen.names)}" for v in body]
    width = min(max(map(len, calls), default=0), _WIDTH)
    module = chosen.module
    for value, call in zip(body, calls, strict=True):
        if value.module != module:
            module = value.module
            lines.append(f"    # {_relative(module, chosen.module)}{_class(value)}")
        lines.append(f"{call.ljust(width)}  # {_lies(value)}{_note(value)}")
    returned = ", ".join(chosen.names[name] for name in chosen.returned)
    lines.append(f"    return {returned or None}")
    return "".join(line.replace("\n", "\\n") + "\n" for line in lines)  # names may hold newlines


def difference(one: Part, other: Part) -> str:
    """What must be changed in one text to get the other; empty if they are the same."""
    before, after = (python_text(chosen).splitlines()[1:] for chosen in (one, other))
    lines = difflib.unified_diff(before, after, one.title, other.title, lineterm="", n=2)
    return "".join(f"{line}\n" for line in lines)


def _relative(module: str, root: str) -> str:
    if module == root:
        return "here"
    return module[len(root) + 1 :] if root and module.startswith(root + ".") else module or "root"


def _class(value: Value) -> str:
    return f" ({value.kind})" if value.kind else ""


def _lies(value: Value) -> str:
    shape = f"{value.dtype}[{', '.join(value.shape)}]" if value.dtype else ""
    many = f" x{value.results}" if value.results > 1 else ""
    return f"{placement_text(value)} {shape}{many}".strip()


def placement_text(value: Value) -> str:
    """`S(2: heads0*64)`, or the letter."""
    if value.placement != "S":
        return value.placement
    if value.slice is not None:
        return f"S({value.slice}: sequence)"
    for at, dim in enumerate(value.dims):
        if value.axis and value.axis in str(dim):
            return f"S({at}: {dim})"
    return "S"


def _note(value: Value) -> str:
    if value.role in NOTES:
        return f"  {value.role}: {NOTES[value.role]}"
    return f"  {value.pair} {value.part}-parallel" if value.part and value.placement else ""
