"""Parameters as DTensors over the tp ranks, for tools that shard them once more (FSDP2).

    tp_model = autotp.parallelize(model, mesh=mesh["tp"]).as_dtensors(mesh["tp"])
    for block in tp_model.transformer.h:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(tp_model, mesh=mesh["dp"])

Norms and element-wise optimizers are right on them. A shard that is not a contiguous block of equal
size (fused QKV, uneven heads) is still a shard of the dim to a DTensor, but `full_tensor()` would
put its rows in another order: saving goes through autotp before this, not after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autotp.axes import is_sharded
from autotp.errors import PlanError, message
from autotp.planning import Plan
from autotp.runtime.block import Block, Compiler
from autotp.runtime.sharded import local

if TYPE_CHECKING:
    from autotp.runtime.module import TensorParallel


def convert(root: TensorParallel, mesh: DeviceMesh) -> None:
    """Replace every parameter by a DTensor of its whole shape; blocks compute on the local part."""
    if mesh.ndim != 1 or mesh.size() != root.tp_size or mesh.get_local_rank() != root.rank:
        raise PlanError(
            message(
                "the mesh is not that of the ranks that share the model",
                values=f"{mesh}; rank {root.rank} of {root.tp_size}",
                because="each parameter becomes a DTensor over these ranks",
                try_='the mesh that parallelize was given: mesh["tp"]',
            )
        )
    done: dict[int, nn.Parameter] = {}
    for path, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in done:
                full = f"{path}.{name}" if path else name
                done[id(parameter)] = _dtensor(parameter, full, root.plan, mesh)
            module._parameters[name] = done[id(parameter)]
    root.compiler = Compiler(_local)
    for path, module in root.named_modules():
        if isinstance(module, Block):
            for code in module._tp_codes:
                code.function = root.compiler(code.graph, path).function


def _dtensor(parameter: nn.Parameter, name: str, plan: Plan, mesh: DeviceMesh) -> nn.Parameter:
    dims = plan.by_name[name].dims
    at = [i for i, dim in enumerate(dims) if is_sharded(dim, plan.shares)]
    shape = torch.Size(plan.by_name[name].shape)
    made = DTensor.from_local(
        local(parameter).detach(),
        mesh,
        [Shard(at[0]) if at else Replicate()],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return nn.Parameter(made, parameter.requires_grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of what FSDP2 has gathered."""
    return _ToLocal.apply(tensor) if isinstance(tensor, DTensor) else tensor


class _ToLocal(torch.autograd.Function):
    """As DTensor.to_local, whose backward expects parts of equal sizes if strides differ."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.like = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return tensor.to_local()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        mesh, placements, shape, stride = ctx.like
        grad = grad.contiguous()
        return DTensor.from_local(
            grad, mesh, placements, run_check=False, shape=shape, stride=stride
        )
