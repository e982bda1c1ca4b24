"""From a plan to a running module: the module tree, its shards, and code for each call form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from autotp import caches
from autotp.checkpoint.loading import Source, from_memory
from autotp.errors import PlanError, message
from autotp.options import DEFAULTS, Options
from autotp.pipeline import emit_rank, make_plan
from autotp.planning import Plan
from autotp.program import Program, Signature
from autotp.runtime.block import Block, BlockList
from autotp.runtime.calls import Call
from autotp.runtime.captured import Capture
from autotp.runtime.group import Group
from autotp.runtime.heads import whole_caches
from autotp.runtime.module import TensorParallel
from autotp.runtime.originals import remember
from autotp.runtime.outputs import LocalOutput
from autotp.runtime.replicas import watch
from autotp.runtime.results import assembler
from autotp.runtime.sharded import Shard, sharded
from autotp.runtime.weights import shard

Planner: TypeAlias = Callable[[TensorParallel, Call], Plan]


def build(
    model: nn.Module,
    skeleton: nn.Module,
    plan: Plan,
    group: Group,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    options: Options = DEFAULTS,
    planner: Planner | None = None,
    source: Source = from_memory,
) -> TensorParallel:
    """The module of one rank, with copies of its shards of the model's tensors.

    `source` gives the rank's part of each: of the model's own, unless it reads a checkpoint.
    """
    further = planner or plan_further

    def capture(root: TensorParallel, call: Call) -> Capture:
        return attach(root, further(root, call))

    name = type(skeleton).__name__  # what pipelines and trainers look at
    kind = type(name, (TensorParallel,), {"__doc__": f"{name}, tensor-parallel."})
    root: TensorParallel = kind(skeleton, plan, group, capture, options)
    _grow(root, skeleton, group, plan)
    _fill(root, model, plan, group.rank, source)
    remember(model)
    watch()
    first = attach(root, plan)
    root.register(root.read("", *call), first)
    return root


def attach(root: TensorParallel, plan: Plan) -> Capture:
    """Compile the plan's graphs for this rank onto the modules."""
    blocks = {name: m for name, m in root.named_modules() if isinstance(m, Block)}
    homes = {id(m): name for name, m in blocks.items()}
    every = root.named_modules(remove_duplicate=False)
    same = {name: homes[id(m)] for name, m in every if id(m) in homes}
    counts = {name: len(m._tp_codes) for name, m in blocks.items()}
    program = plan.program()
    again = {same.get(path, path) for path in program.recomputed}
    emitted = emit_rank(plan, root.rank, counts, same)
    for path, graphs in emitted.graphs.items():
        for graph in graphs:
            code = root.compiler(graph, path)
            code.recompute = path in again
            blocks[path]._tp_codes.append(code)
    _fill_constants(root, plan)
    signature = _local_signature(program, root.rank)
    root.cache_layout.update(_cache_layout(program))
    number = len(root._tp_codes) - 1
    assemble = assembler(signature.out_spec)
    return Capture(number, signature, 0.0, plan, program.outputs, assemble)


def _cache_layout(program: Program) -> dict[str, LocalOutput]:
    """How each tensor of a cache is split, by its path, of caches that come and that leave."""
    signature, found = program.signature, dict[str, LocalOutput]()
    for index, path in caches.paths_in(signature.in_spec):
        if signature.inputs[index] in program.inputs:
            found[path] = program.inputs[signature.inputs[index]]
    for index, path in caches.paths_in(signature.out_spec):
        if index in program.outputs:
            found[path] = program.outputs[index]
    return found


def _local_signature(program: Program, rank: int) -> Signature:
    """The signature with the sizes that inputs have on this rank: caches come split."""
    signature = program.signature
    sizes, conditions = list(signature.guards.sizes), list(signature.guards.conditions)
    for name, where in program.inputs.items():
        index = signature.inputs.index(name)
        dims = list(sizes[index] or ())
        dims[where.dim] = where.local_size(rank)
        sizes[index] = tuple(dims)
        read = f"sizes[{index}][{where.dim}]"
        conditions = [condition.replace(read, str(where.size)) for condition in conditions]
    guards = replace(signature.guards, sizes=tuple(sizes), conditions=tuple(conditions))
    return replace(signature, guards=guards)


def plan_further(root: TensorParallel, call: Call) -> Plan:
    """The plan of another call form, under which every parameter lies as it does already."""
    skeleton = root.skeleton
    skeleton.train(root.training)
    mine = dict(root.named_parameters()) | dict(root.named_buffers())
    with torch.no_grad():
        for name, tensor in (*skeleton.named_parameters(), *skeleton.named_buffers()):
            if name in mine and tensor.dtype != mine[name].dtype:
                tensor.data = tensor.data.to(mine[name].dtype)
    args, kwargs = whole_caches(root.cache_layout, call.args, call.kwargs)
    return make_plan(
        skeleton,
        args,
        kwargs,
        tp=root.tp_size,
        layout=root.plan,
        options=root.options,
        entry=call.entry,
    )


def shared_planner() -> Planner:
    """Plans once for all ranks of one process, which ask for the same call forms in turn."""
    plans: dict[int, Plan] = {}

    def planner(root: TensorParallel, call: Call) -> Plan:
        number = len(root.captures)
        if number not in plans:
            plans[number] = plan_further(root, call)
        return plans[number]

    return planner


def _grow(root: TensorParallel, skeleton: nn.Module, group: Group, plan: Plan) -> None:
    """The original's module tree in blocks; lists and dicts of modules stay what they are."""
    made: dict[int, nn.Module] = {id(skeleton): root}
    blocks: dict[str, nn.Module] = {"": root}
    for path, module in skeleton.named_modules(remove_duplicate=False):
        if path:
            twin = made.get(id(module))
            if twin is None:
                twin = _twin(module, path, plan)
                made[id(module)] = twin
            blocks[path] = twin
            parent, _, name = path.rpartition(".")
            if not parent and hasattr(root, name) and name not in root._modules:
                raise _taken(name, plan)
            blocks[parent].add_module(name, twin)
        if isinstance(blocks[path], Block):
            blocks[path]._tp_group = group  # type: ignore[assignment]


def _taken(name: str, plan: Plan) -> PlanError:
    return PlanError(
        message(
            f"a submodule of the model is named {name!r}",
            values=f"{plan.model}.{name}",
            because="the parallel model has an attribute of this name itself",
            try_="rename the submodule, or wrap the model in another module",
        )
    )


def _twin(module: nn.Module, path: str, plan: Plan) -> nn.Module:
    if type(module) is nn.ModuleList:
        return nn.ModuleList()
    if type(module) is nn.ModuleDict:
        return nn.ModuleDict()
    notes = []
    for name, _ in module.named_parameters(recurse=False):
        full = f"{path}.{name}"
        if full in plan.by_name and plan.is_sharded(full):
            notes.append(f"{name} [{', '.join(str(dim) for dim in plan.by_name[full].dims)}]")
    kind = BlockList if isinstance(module, nn.Sequential) else Block
    return kind(type(module).__name__, "; ".join(notes))


def _fill(root: TensorParallel, model: nn.Module, plan: Plan, rank: int, source: Source) -> None:
    """Register shards of every parameter and buffer; a tied tensor is one object again."""
    kept = set(model.state_dict(keep_vars=True))
    done: dict[int, Any] = {}
    targets = dict(root.named_modules(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        target = targets[path]
        for name, parameter in module._parameters.items():
            if parameter is None:
                target.register_parameter(name, None)
                continue
            if id(parameter) not in done:
                full = f"{path}.{name}" if path else name
                part = source(full, parameter, plan.ranges(full, rank))
                done[id(parameter)] = _parameter(part, parameter, full, plan, root.group)
            target.register_parameter(name, done[id(parameter)])
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            if buffer is not None and id(buffer) not in done:
                done[id(buffer)] = source(full, buffer, plan.ranges(full, rank))
            made = None if buffer is None else done[id(buffer)]
            target.register_buffer(name, made, persistent=full in kept)


def _parameter(
    part: torch.Tensor, whole: nn.Parameter, name: str, plan: Plan, group: Group
) -> nn.Parameter:
    if plan.is_sharded(name):
        return sharded(part, whole.requires_grad, Shard(name, tuple(whole.shape), group))
    return nn.Parameter(part, whole.requires_grad)


def _fill_constants(root: TensorParallel, plan: Plan) -> None:
    """Tensors that the model made while it was captured become buffers that are not saved."""
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    for name, spec in plan.stages[0][1].tensors.items():
        if spec.value is not None:
            path, _, attribute = name.rpartition(".")
            block = root.get_submodule(path)
            if not hasattr(block, attribute):
                part = shard(spec.value, plan.ranges(name, root.rank)).to(device)
                block.register_buffer(attribute, part, persistent=False)
