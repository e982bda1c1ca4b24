"""estimate: memory, messages and time of a training step of one rank on a described machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autotp.errors import InputError, message
from autotp.estimating.dryrun import Step, dry_run
from autotp.estimating.machines import GIB, Machine
from autotp.planning import Plan

# bytes for each parameter: of gradients, and of what the optimizer holds (Adam)
PRECISIONS = {
    "float32": (4, 8, "float32 weights and gradients, two float32 moments"),
    "mixed": (2, 12, "16-bit weights and gradients; float32 master weights and two moments"),
    "half": (2, 4, "16-bit weights, gradients and two moments"),
}

# the columns of memory: (layers computed again?, slices of the sequence?)
VARIANTS = {
    (False, False): "plain",
    (False, True): "sequence parallel",
    (True, False): "checkpointed",
    (True, True): "both",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of the largest rank. Activations and logits are what the forward pass keeps;
    `workspace` is what the step needs at its peak beyond them."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Estimate:
    """One training step for one number of ranks. Memory by variant, seconds by what takes them."""

    model: str
    tp: int
    rank: int
    memory: Mapping[str, Memory]
    chosen: str  # the variant that counts for fitting and for the time
    messages: tuple[tuple[str, str, int, int], ...]  # phase, kind, how many, bytes of all
    flops: float  # of one rank's products, without recomputation
    seconds: Mapping[str, float]
    algorithm: str  # of most messages
    usable: float  # bytes of a device

    @property
    def fits(self) -> bool:
        """Whether the chosen variant fits on a device."""
        return self.memory[self.chosen].total <= self.usable

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return sum(self.seconds.values())

    def data(self) -> dict[str, Any]:
        """Plain numbers, as JSON has them."""
        memory = {name: {**vars(m), "total": m.total} for name, m in self.memory.items()}
        fields = {**vars(self), "memory": memory, "fits": self.fits, "step_seconds": self.step}
        return {**fields, "messages": [list(row) for row in self.messages]}


def estimate(
    model: nn.Module,
    plan: Plan,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    machine: Machine,
    *,
    precision: str = "mixed",
    sliced: Plan | None = None,
    checkpointing: bool = False,
    sequence_parallel: bool = False,
) -> Estimate:
    """The estimate of a plan and of the call that it was made for; the model is on meta.

    `sliced` is the plan with sequence parallelism; without it, its columns are left out. The last
    two arguments say which of the columns counts. InputError if the model has no layers to
    checkpoint.
    """
    rank = max(range(plan.tp), key=plan.parameter_bytes)
    layers = layers_of(model)
    if checkpointing and not layers:
        raise InputError(
            message(
                "there are no layers to checkpoint",
                values=plan.model,
                because="layers are the items of the outermost ModuleLists, and it has none",
                try_="without --checkpointing",
            )
        )
    steps: dict[str, Step] = {}
    for (again, slices), name in VARIANTS.items():
        made = sliced if slices else plan
        if made is not None and (layers or not again):
            recompute = layers if again else ()
            steps[name] = dry_run(model, made, call, rank=rank, recompute=recompute)
    static = _static(plan, rank, precision)
    memory = {name: _memory(static, step) for name, step in steps.items()}
    chosen = VARIANTS[checkpointing, sequence_parallel and sliced is not None]
    step = steps[chosen]
    seconds, algorithm = _seconds(step, machine, plan.tp, sum(static))
    return Estimate(
        plan.model,
        plan.tp,
        rank,
        memory,
        chosen,
        _messages(step),
        sum(flops * n for (_, _, flops, _), n in steps["plain"].work.items()),
        seconds,
        algorithm,
        machine.memory - machine.reserve,
    )


def layers_of(model: nn.Module) -> list[str]:
    """The paths of the layers: the items of lists of modules that are in no other such list.

    Lists of one item count only where no outermost list is longer: then the model has one layer.
    """
    sizes = {n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = _outermost([name for name, size in sizes.items() if size])
    if any(sizes[name] > 1 for name in outer):
        outer = _outermost([name for name, size in sizes.items() if size > 1])
    return [f"{n}.{at}" for n in outer for at, _ in model.get_submodule(n).named_children()]


def _outermost(names: list[str]) -> list[str]:
    return [n for n in names if not any(n.startswith(f"{other}.") for other in names)]


def needs_at_least(plan: Plan, precision: str) -> int:
    """Bytes of parameters, gradients and optimizer on the largest rank."""
    return sum(_static(plan, max(range(plan.tp), key=plan.parameter_bytes), precision))


def _static(plan: Plan, rank: int, precision: str) -> tuple[int, int, int]:
    gradients, optimizer, _ = PRECISIONS[precision]
    count = plan.parameters(rank)
    return plan.parameter_bytes(rank), count * gradients, count * optimizer


def _memory(static: tuple[int, int, int], step: Step) -> Memory:
    return Memory(*static, step.kept, step.logits, step.peak - step.kept - step.logits)


def _messages(step: Step) -> tuple[tuple[str, str, int, int], ...]:
    count: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for (phase, kind, size), times in step.collectives.items():
        count[phase, kind] += times
        sizes[phase, kind] += size * times
    return tuple((*key, count[key], sizes[key]) for key in count)


def _seconds(step: Step, machine: Machine, tp: int, static: int) -> tuple[dict[str, float], str]:
    seconds = {"products": 0.0, "other operators": 0.0, "messages": 0.0}
    rate = machine.memory_bandwidth * machine.memory_share
    for (dtype, kind, flops, size), times in step.work.items():
        name = "products" if kind == "product" else "other operators"
        one = max(flops / machine.gemm(dtype), size / rate, machine.launch)
        seconds[name] += times * one
    names: Counter[str] = Counter()
    for (_, kind, size), times in step.collectives.items():
        send = machine.all_reduce if kind == "all-reduce" else machine.half_ring
        one, algorithm = send(size, tp)
        seconds["messages"] += times * one
        names[algorithm] += times
    seconds["optimizer"] = 2 * static / rate
    return seconds, names.most_common(1)[0][0] if names else "none"


def text(found: Estimate, machine: Machine) -> str:
    """What `autotp estimate` prints of one number of ranks."""
    lines = [f"one training step of {found.model}, tp={found.tp}, rank {found.rank} (the largest)"]
    names = list(vars(found.memory["plain"]))
    head = "".join(f"{name:>19}" for name in found.memory)
    lines.append(f"  {'GiB':<14}{head}")
    for name in names:
        values = "".join(f"{getattr(m, name) / GIB:19.2f}" for m in found.memory.values())
        lines.append(f"  {name:<14}{values}")
    totals = "".join(f"{m.total / GIB:19.2f}" for m in found.memory.values())
    lines.append(f"  {'total':<14}{totals}")
    word = "fits" if found.fits else "does not fit"
    lines.append(f"{found.chosen}: {word} in {found.usable / GIB:.1f} GiB")
    for phase, kind, count, size in found.messages:
        what = f"{kind}s" if count > 1 else kind
        lines.append(f"{phase}: {count} {what} of {size / 1e6:,.1f} MB in all")
    parts = ", ".join(f"{name} {took * 1e3:.1f}" for name, took in found.seconds.items())
    lines.append(f"step time: {found.step * 1e3:.1f} ms ({parts}); messages: {found.algorithm}")
    return "\n".join([*lines, f"products: {found.flops / found.step / 1e12:.1f} TFLOP/s sustained"])


def assumptions(machine: Machine, precision: str, shape: str) -> list[str]:
    """Every assumption, one a line."""
    peaks = ", ".join(f"{name} {peak / 1e12:g}" for name, peak in machine.flops.items())
    return [
        f"machine: {machine.name}; {machine.source}",
        f"memory: {machine.memory / GIB:.1f} GiB, of which {machine.reserve / GIB:g} is reserved",
        f"products reach {machine.flops_share:.0%} of the peak (TFLOP/s: {peaks}), and no operator",
        f"  more than {machine.memory_share:.0%} of {machine.memory_bandwidth / 1e9:g} GB/s or "
        f"takes less than {machine.launch * 1e6:g} us",
        f"links reach {machine.link_share:.0%} of {machine.link_bandwidth / 1e9:g} GB/s a "
        f"direction, {machine.latency * 1e6:g} us a hop; ring and tree, whichever is faster; "
        "messages hide behind nothing",
        f"precision {precision}: {PRECISIONS[precision][2]}; gradients stay between steps; Adam "
        "reads and writes all of it once",
        f"inputs: {shape}; attention in one kernel, not materialized, unless the model writes it "
        "out; masks of dropout take one byte",
        "checkpointed: every layer is computed again in the backward pass up to the last value it "
        "needs, and its messages are sent again but the last",
        "sequence parallel: norms, dropout and residuals hold slices; all-reduces become "
        "reduce-scatters and all-gathers, each half of a ring's all-reduce",
    ]


def resized(
    call: tuple[tuple[Any, ...], dict[str, Any]], batch: int | None, seq: int | None
) -> Any:
    """The call with other sizes. Dims 0 and 1 of the first tensor with two dims are batch and
    sequence; the other tensors' follow where they are equal."""
    from torch.utils._pytree import tree_leaves, tree_map

    leaves = [t for t in tree_leaves(call) if isinstance(t, torch.Tensor)]
    first = next((t for t in leaves if t.dim() > 1), None)
    if first is None:
        return call
    old = first.shape[:2]

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = list(value.shape)
        for at, new in enumerate((batch, seq)):
            if at < len(shape) and new is not None and shape[at] == old[at]:
                shape[at] = new
        return torch.ones(shape, dtype=value.dtype, device="meta")

    return tree_map(change, call)


def described(call: Any) -> str:
    """`[8, 1024] int64, ...`: the tensors of a call."""
    from torch.utils._pytree import tree_leaves

    leaves = [t for t in tree_leaves(call) if isinstance(t, torch.Tensor)]
    return ", ".join(re.sub(r"torch\.", "", f"{list(t.shape)} {t.dtype}") for t in leaves)
