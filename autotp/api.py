"""The calls that a user makes: plan, parallelize."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autotp.errors import AutoTPError, PlanError, message
from autotp.examples import Call, example_call, normal_call
from autotp.pipeline import make_plan
from autotp.planning import Plan
from autotp.build import build
from autotp.runtime.group import Group, resolve_group
from autotp.runtime.module import TensorParallel
from autotp.skeleton import skeleton_of


def plan(
    model: nn.Module, tp: int | None = None, *, example_inputs: Any = None, plan: Plan | None = None
) -> Plan:
    """What `parallelize` would do for `tp` ranks, and why. Reads no weight, needs no process group.

    `example_inputs` show one call: a tuple (positional), a dict (keywords) or (args, kwargs); of
    tensors only shape and dtype count. Hugging Face models need none. With `plan` (read from JSON) its
    decisions are kept and the graphs are made for them.

    Raises PlanError for a bad tp or missing inputs, CaptureError if the model cannot be captured.
    """
    _check_model(model)
    size = plan.tp if tp is None and plan is not None else tp
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise PlanError(
            message(
                f"cannot plan for tp={tp!r}",
                values=f"tp={tp!r}",
                because="tp is the number of ranks",
                try_="a positive integer",
            )
        )
    skeleton = skeleton_of(model)
    args, kwargs = _call(skeleton, example_inputs)
    return make_plan(skeleton, args, kwargs, tp=size, layout=plan)


def parallelize(
    model: nn.Module,
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    example_inputs: Any = None,
    plan: Plan | None = None,
) -> TensorParallel:
    """This rank's part of a model, which computes with its peers what the model computes.

    Call it on every rank (under torchrun). Parameters are this rank's shards, under the original
    names. `tp` is taken from `mesh`, `group` or the world if it is not given; ranks beyond `tp` form
    further groups of consecutive ranks. The model itself is not changed and can be deleted.

    Raises, on every rank alike: PlanError (also a ValueError) for sizes that do not fit, GroupError
    if there is no process group or the ranks disagree, CaptureError if the model cannot be captured.
    """
    _check_model(model)
    ranks = resolve_group(tp, mesh, group)
    try:
        skeleton = skeleton_of(model)
        args, kwargs = _call(skeleton, example_inputs)
        made = make_plan(skeleton, args, kwargs, tp=ranks.size, layout=plan)
    except AutoTPError as error:
        _agree(ranks, f"error: {error}")
        raise
    _agree(ranks, f"{made.fingerprint} of {made.model}, torch {torch.__version__}")
    return build(model, skeleton, made, ranks, (args, kwargs))


def _call(skeleton: nn.Module, example_inputs: Any) -> Call:
    return normal_call(inspect.signature(skeleton.forward), *example_call(skeleton, example_inputs))


def _agree(ranks: Group, value: str) -> None:
    ranks.agree("the plan", value)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise PlanError(
            message(
                "this is not a model",
                values=type(model).__name__,
                because="autotp takes a torch.nn.Module",
            )
        )
    kind = type(model).__name__
    if isinstance(model, TensorParallel):
        raise PlanError(
            message(
                "the model is tensor-parallel already",
                values=f"{kind}, tp={model.tp_size}",
                because="its parameters are shards",
                try_="parallelize the original model",
            )
        )
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel") or hasattr(
        model, "_get_fsdp_state"
    ):
        raise PlanError(
            message(
                f"the model is wrapped in {kind}",
                values=kind,
                because="data parallelism goes around tensor parallelism",
                try_="parallelize(model) first, then wrap the result",
            )
        )
