"""Which values of a captured program may get a gradient."""

from __future__ import annotations

import torch
from torch.fx import Node

from autotp.program import Program
from autotp.runtime.regions import enter_grad_mode, leave_grad_mode

aten = torch.ops.aten


def needs_grad(program: Program, any_parameter: bool = False) -> dict[Node, bool]:
    """Which values may get a gradient; with `any_parameter` also if a parameter is frozen now."""
    result: dict[Node, bool] = {}
    blocked: list[bool] = []
    for node in program.graph.nodes:
        if node.target is enter_grad_mode:
            blocked.append(node.args[0] is False)
        elif node.target is leave_grad_mode:
            blocked.pop()
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        floating = any(
            isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())
            for v in values
        )
        if node.op == "get_attr":
            spec = program.tensors[str(node.target)]
            found = spec.kind == "parameter" and (any_parameter or spec.requires_grad)
        elif node.op == "placeholder":
            found = any_parameter or (isinstance(value, torch.Tensor) and value.requires_grad)
        else:
            found = any(result[source] for source in node.all_input_nodes) and not any(blocked)
            found = found and node.target is not aten.detach.default
        result[node] = found and floating
    return result
