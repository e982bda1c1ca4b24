"""Programs as text a person reads: Python with shapes, and the placement above each value."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from autotp.planning import Plan
from autotp.program import Program


def graph_module(program: Program, plan: Plan, rank: int) -> GraphModule:
    """A GraphModule of a rank's program; its parameters have local shapes and no storage."""
    root: dict[str, Any] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            spec = program.tensors[name]
            shape = plan.local_shape(name, rank)
            blank = torch.empty(shape, dtype=spec.dtype, device="meta")
            is_parameter = spec.kind == "parameter"
            root[name] = nn.Parameter(blank, spec.requires_grad) if is_parameter else blank
    module = _Readable(root, program.graph, f"Rank{rank}")
    module.meta["provenance"] = program.provenance
    return module


class _Readable(GraphModule):
    """A GraphModule whose `print_readable` shows placements unless told otherwise."""

    def print_readable(
        self, *args: Any, additional_meta: Any = ("placement",), **kwargs: Any
    ) -> str:
        return super().print_readable(*args, additional_meta=list(additional_meta), **kwargs)


def program_text(graph: Graph) -> str:
    """One line for each value: name, placement, dims, the operator and its operands."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_operand(node.args[0])}")
            continue
        target = target_text(node.target)
        operands = [_operand(a) for a in node.args]
        operands += [f"{key}={_operand(value)}" for key, value in node.kwargs.items()]
        body = target if node.op == "get_attr" else f"{target}({', '.join(operands)})"
        if node.op == "placeholder":
            body = "input"
        notes = [node.meta["placement"]] if node.meta.get("placement") else []
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            notes.insert(0, f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}")
        calls = node.meta.get("calls") or ()
        where = f"  # {calls[-1][0]}" if calls else ""
        lines.append(f"{node.name}: {' '.join(notes) or 'value'} = {body}{where}")
    return "\n".join(lines) + "\n"


def target_text(target: Any) -> str:
    """A node's operator as text."""
    if isinstance(target, str):
        return target
    return str(target) if hasattr(target, "_schema") else str(getattr(target, "__name__", target))


def _operand(value: Any) -> str:
    text = target_text(value) if callable(value) else str(value)
    return re.sub(r"\b9223372036854775807\b", "end", text)
