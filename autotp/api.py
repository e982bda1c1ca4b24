"""The calls that a user makes: plan, parallelize."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autotp.build import build, shared_planner
from autotp.checkpoint.loading import Checkpoint, Source, from_memory
from autotp.checkpoint.names import tensors_of
from autotp.errors import PlanError, message
from autotp.examples import Call, call_of
from autotp.options import Options
from autotp.pipeline import make_plan
from autotp.planning import Plan
from autotp.runtime.group import Group, resolve_group
from autotp.runtime.launch import ARRIVAL
from autotp.runtime.lockstep import Lockstep
from autotp.runtime.module import TensorParallel
from autotp.runtime.weights import same_weights
from autotp.skeleton import skeleton_of
from autotp.verification import Report, compare, prepared


def plan(
    model: nn.Module,
    tp: int | None = None,
    *,
    example_inputs: Any = None,
    plan: Plan | None = None,
    logits: str = "auto",
    random: str = "own",
    sequence_parallel: bool = False,
) -> Plan:
    """What `parallelize` would do for `tp` ranks, and why. Reads no weight, needs no process group.

    `example_inputs` show one call: a tuple (positional), a dict (keywords) or (args, kwargs); of
    tensors only shape and dtype count. Hugging Face models need none. With `plan` (read from JSON)
    its decisions are kept and the graphs are made for them.

    Raises PlanError for a bad tp or missing inputs, CaptureError if the model cannot be captured.
    """
    _check_model(model)
    options = Options(logits, random, sequence_parallel)
    size = plan.tp if tp is None and plan is not None else tp
    _check_size(size)
    assert size is not None
    skeleton = skeleton_of(model)
    args, kwargs = call_of(skeleton, example_inputs)
    return make_plan(skeleton, args, kwargs, tp=size, layout=plan, options=options)


def parallelize(
    model: nn.Module,
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    example_inputs: Any = None,
    plan: Plan | None = None,
    devices: Sequence[str | torch.device] | None = None,
    logits: str = "auto",
    random: str = "own",
    sequence_parallel: bool = False,
    checkpoint: str | Path | None = None,
) -> TensorParallel | Lockstep:
    """This rank's part of a model, which computes with its peers what the model computes.

    Call it on every rank (under torchrun). Parameters are this rank's shards, under the original
    names. `tp` is taken from `mesh`, `group` or the world if it is not given; ranks beyond `tp`
    form further groups of consecutive ranks. The model itself is not changed and can be deleted.

    With `devices`, one for each rank (`["cpu"] * 8`), all ranks run in this process in lockstep,
    with collectives in memory: no process group, no torchrun.

    `logits` says what happens to results that are split along the vocabulary: "gather" returns them
    whole, "local" as a `ShardedOutput` with this rank's part and a `gather()`, "auto" is "local" in
    training with a loss (where the gather would cost more than the loss) and "gather" otherwise.

    `random` says which numbers dropout draws. "own": each rank its own for the part that it holds,
    and all ranks the same for what they all hold. "whole": those that the model would draw on the
    group's first rank, for comparisons; parts are gathered for it. Both follow `torch.manual_seed`
    on the group's first rank, however the others are seeded.

    With `sequence_parallel` norms, dropout and residuals outside of regions work on a slice of the
    sequence on each rank, which saves their memory (Korthikanti et al. 2022); calls that are given
    caches do without.

    With `checkpoint` (a directory with model.safetensors or its index, or a .safetensors file) the
    model's own weights are not read and can be on meta: each rank reads the slices that it holds,
    in the model's dtype.

    Raises, on every rank alike: PlanError (also a ValueError) for sizes that do not fit, GroupError
    if there is no process group or the ranks disagree, CaptureError if the model cannot be
    captured, CheckpointError if the checkpoint cannot be read or does not fit.
    """
    _check_model(model)
    options = Options(logits, random, sequence_parallel)
    if devices is not None:
        return _in_process(model, tp, example_inputs, plan, devices, options, checkpoint)
    ranks = resolve_group(tp, mesh, group)
    try:
        skeleton = skeleton_of(model)
        args, kwargs = call_of(skeleton, example_inputs)
        made = make_plan(skeleton, args, kwargs, tp=ranks.size, layout=plan, options=options)
    except Exception as error:  # of any kind: the peers must not wait for this rank
        _agree(ranks, f"error: {type(error).__name__}: {error}")
        raise
    _agree(ranks, f"{made.fingerprint} of {made.model}, torch {torch.__version__}")
    if checkpoint is not None:
        return _from_checkpoint(checkpoint, model, skeleton, made, ranks, (args, kwargs), options)
    same_weights(tensors_of(model), ranks)
    return build(model, skeleton, made, ranks, (args, kwargs), options=options)


def verify(
    model: nn.Module,
    tp: int,
    *,
    example_inputs: Any = None,
    backward: bool = True,
    dropout: bool = False,
    sequence_parallel: bool = False,
    dtype: torch.dtype | None = None,
    limit: float | None = None,
) -> Report:
    """Whether the parallel model computes what the model computes: outputs and every gradient.

    Runs the model and all its ranks in this process, on CPU, on a copy whose constant parameters
    are refilled (zero biases hide faults). Dropout is off; with `dropout` both are in training
    mode, and the ranks draw what the model draws. Errors are relative to each tensor's largest
    value; `limit` is 1e-5 in float32 unless given. `dtype` converts the copy first.
    Returns a report that prints as a table; `report.ok`, `report.raise_if_failed()`.
    """
    _check_model(model)
    twin, notes = prepared(model, dtype, dropout)
    args, kwargs = call_of(twin, example_inputs)
    options = Options("gather", "whole" if dropout else "own", sequence_parallel)
    lockstep = _in_process(twin, tp, (args, kwargs), None, ["cpu"] * tp, options)
    kind = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.float32)
    bound = limit or (1e-5 if kind.itemsize >= 4 else 0.05)
    return compare(twin, lockstep, args, kwargs, backward=backward, limit=bound, notes=notes)


def _from_checkpoint(
    path: str | Path,
    model: nn.Module,
    skeleton: nn.Module,
    made: Plan,
    ranks: Group,
    call: Call,
    options: Options,
) -> TensorParallel:
    """This rank's module with weights from files, or the same error on every rank."""
    what = f"the checkpoint {path}"
    try:
        source = Checkpoint(path, model)
        root = build(model, skeleton, made, ranks, call, options=options, source=source)
    except Exception as error:
        ranks.agree(what, f"error: {type(error).__name__}: {error}", ARRIVAL)
        raise
    ranks.agree(what, f"tensors {source.fingerprint}", ARRIVAL)
    same_weights(((n, t) for n, t in tensors_of(root) if not _is_split(made, n)), ranks)
    return root


def _is_split(made: Plan, name: str) -> bool:
    return name not in made.by_name or made.is_sharded(name)  # a tied tensor's first name is known


def _in_process(
    model: nn.Module,
    tp: int | None,
    example_inputs: Any,
    given: Plan | None,
    devices: Sequence[str | torch.device],
    options: Options,
    checkpoint: str | Path | None = None,
) -> Lockstep:
    size = len(devices) if tp is None else tp
    if size != len(devices):
        raise PlanError(
            message(
                f"cannot put tp={tp} ranks on {len(devices)} devices",
                values=f"tp={tp}, devices={[str(d) for d in devices]}",
                because="there is one device for each rank; a device may be listed again",
                try_=f"tp={len(devices)}, or devices=['cpu'] * {tp}",
            )
        )
    _check_size(size)
    skeleton = skeleton_of(model)
    call = call_of(skeleton, example_inputs)
    made = make_plan(skeleton, *call, tp=size, layout=given, options=options)
    source: Source = from_memory if checkpoint is None else Checkpoint(checkpoint, model)
    groups = Group.in_process(size)
    planner = shared_planner()
    ranks = [
        build(model, skeleton, made, group, call, options=options, planner=planner, source=source)
        for group in groups
    ]
    return Lockstep([rank.to(device) for rank, device in zip(ranks, devices, strict=True)])


def _agree(ranks: Group, value: str) -> None:
    ranks.agree("the plan", value)


def _check_size(tp: object) -> None:
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise PlanError(
            message(
                f"cannot plan for tp={tp!r}",
                values=f"tp={tp!r}",
                because="tp is the number of ranks",
                try_="a positive integer",
            )
        )


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
