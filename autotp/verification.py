"""verify: a model and all ranks of its parallel form, side by side in one process.

The proof that a user runs: outputs and every parameter's gradient against the original's, on
weights where faults show (zero biases hide a bias that is added twice), on a laptop. When
something differs the graphs are run again node by node and the first value that is wrong is named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node, map_arg

from autotp import axes as ax
from autotp import pytree
from autotp.caches import pack_all
from autotp.errors import CheckError
from autotp.placement import locate
from autotp.planning import Plan
from autotp.program import Program
from autotp.runtime.lockstep import Lockstep
from autotp.runtime.sharded import local
from autotp.runtime.weights import unshard


@dataclass(frozen=True)
class Row:
    """One comparison. `error` is relative to the largest value of the original's tensor."""

    name: str
    what: str  # output, gradient or replicas
    error: float
    ok: bool


@dataclass(frozen=True)
class Report:
    """The result of `verify`. Prints as a table, worst first."""

    plan: Plan
    rows: tuple[Row, ...]
    limit: float
    notes: tuple[str, ...]
    first_wrong: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every comparison held."""
        return all(row.ok for row in self.rows)

    def raise_if_failed(self) -> None:
        """Raise CheckError with the report's text unless all is equal."""
        if not self.ok:
            raise CheckError(str(self))

    def __str__(self) -> str:
        wrong = [row for row in self.rows if not row.ok]
        shown = wrong or sorted(self.rows, key=lambda row: -row.error)[:8]
        width = max((len(row.name) for row in shown), default=0)
        lines = [
            f"verify {self.plan.model} at tp={self.plan.tp}: "
            + (
                f"OK, {len(self.rows)} tensors equal" if self.ok else f"{len(wrong)} tensors differ"
            ),
            *(f"  {note}" for note in self.notes),
            f"  {'worst' if self.ok else 'wrong'} relative errors (limit {self.limit:g}):",
        ]
        lines += [
            f"    {row.name.ljust(width)}  {row.what:<9} {row.error:.2e}" for row in shown[:20]
        ]
        if len(shown) > 20:
            lines.append(f"    and {len(shown) - 20} more")
        if self.first_wrong:
            lines.append(f"  first wrong value: {self.first_wrong}")
        return "\n".join(lines)


def prepared(
    model: nn.Module, dtype: torch.dtype | None, dropout: bool = False
) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy of the model on CPU, in training mode to drop, with constant parameters refilled."""
    twin = copy.deepcopy(model).cpu().train(dropout)
    if dtype is not None:
        twin.to(dtype)
    generator = torch.Generator().manual_seed(0)
    refilled = 0
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.add_(noise.to(parameter.dtype))
                refilled += 1
    notes = ["training mode, ranks draw as the model" if dropout else "dropout is off (eval mode)"]
    if refilled:
        notes.append(f"{refilled} constant parameters (zero biases, norms) were refilled on a copy")
    return twin, tuple(notes)


def compare(
    model: nn.Module,
    lockstep: Lockstep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    backward: bool,
    limit: float,
    notes: tuple[str, ...],
) -> Report:
    """Run both and compare; both are left with gradients."""
    plan: Plan = lockstep.plan
    with seeded():
        expected, _ = pytree.flatten(pack_all(model(*args, **kwargs)))
    with seeded():
        every, _, _ = lockstep.run(args, kwargs)
    rows = []
    for index, want in enumerate(expected):
        if isinstance(want, Tensor) and want.is_floating_point():
            parts = [values[index] for values in every]
            rows.append(_row(f"output {index}", "output", want, parts, limit))
    if backward:
        total_of(expected).backward()
        with seeded():
            joined = lockstep(*args, **kwargs)
        total_of(pytree.flatten(pack_all(joined))[0]).backward()
        rows += _gradients(model, lockstep, limit)
    report = Report(plan, tuple(rows), limit, notes)
    if report.ok:
        return report
    where = first_wrong(model, lockstep, args, kwargs, limit)
    return Report(plan, tuple(rows), limit, notes, where)


@contextmanager
def seeded() -> Iterator[None]:
    """Random numbers that begin at the same place each time; the caller's go on as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def total_of(leaves: Sequence[Any]) -> Tensor:
    """A number that depends on every output in another way."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            weights = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
            total = total + (leaf.double() * weights).sum()
    return total


def _gradients(model: nn.Module, lockstep: Lockstep, limit: float) -> list[Row]:
    plan: Plan = lockstep.plan
    ranks = [dict(rank.named_parameters()) for rank in lockstep.ranks]
    rows = []
    # a gradient that is zero in truth (of a key bias) is noise: measure it by the others' size
    sizes = [float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None]
    floor = 1e-3 * max(sizes, default=0.0)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        grads = [rank[name].grad for rank in ranks]
        grads = [
            local(torch.zeros_like(rank[name]) if g is None else g)
            for g, rank in zip(grads, ranks, strict=True)
        ]
        if plan.is_sharded(name):
            ranges = [plan.ranges(name, rank) for rank in range(plan.tp)]
            grads = [unshard([g for g in grads if g is not None], ranges)]
        rows.append(_row(name, "gradient", parameter.grad, grads, limit, floor))
    return rows


def _row(
    name: str, what: str, want: Tensor, found: Sequence[Any], limit: float, floor: float = 1e-6
) -> Row:
    error = max(relative_error(want, part, floor) for part in found)
    return Row(name, what, error, error <= limit)


def relative_error(want: Tensor, found: Tensor, floor: float = 1e-6) -> float:
    """The largest difference relative to the largest value; infinite for other shapes or NaN."""
    if want.shape != found.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    want, found = want.detach().double(), found.detach().double()
    if not torch.equal(want.isfinite(), found.isfinite()):
        return float("inf")
    want, found = want.nan_to_num(), found.nan_to_num()
    scale = max(float(want.abs().max()), floor, 1e-30)
    return float((want - found).abs().max()) / scale


def first_wrong(
    model: nn.Module,
    lockstep: Lockstep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit: float,
) -> str | None:
    """The first value of the parallel run that differs from the captured original's."""
    capture, call = lockstep.ranks[0].capture_for(args, kwargs)  # type: ignore[operator]
    plan: Plan = capture.plan
    found: list[str] = []
    with torch.no_grad():
        with seeded():
            reference = _values(plan.stages[0][1], model, call.leaves)

        def watch(block: Any, node: Node, values: list[Any]) -> None:
            want = reference.get(node.meta.get("source", ""))
            if found or not isinstance(want, Tensor) or not isinstance(values[0], Tensor):
                return
            try:
                parts = _assembled(node, values, plan)
                error = max((relative_error(want, part) for part in parts), default=0.0)
            except RuntimeError as failure:  # parts that do not fit together
                error = float("inf")
                found.append(f"{failure}")
            if error > limit:
                calls = node.meta.get("calls") or ()
                where = f" in {calls[-1][0]}" if calls else ""
                found[:] = [f"{node.meta['source']}{where} ({locate(node)}), error {error:.2e}"]

        lockstep.watch = watch
        try:
            with seeded():
                lockstep.run(args, kwargs)
        finally:
            lockstep.watch = None
    return found[0] if found else None


def _values(program: Program, model: nn.Module, leaves: Sequence[Any]) -> dict[str, Any]:
    """Every value of the captured original, by name."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    env: dict[Node, Any] = {}
    inputs = iter(leaves)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(inputs)
        elif node.op == "get_attr":
            value = program.tensors[str(node.target)].value
            env[node] = tensors[str(node.target)] if value is None else value
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: env[n])
            env[node] = _operator(node.target)(*args, **kwargs)
    return {node.name: value for node, value in env.items()}


def _operator(target: Any) -> Callable[..., Any]:
    assert callable(target)
    found: Callable[..., Any] = target
    return found


def _assembled(node: Node, values: list[Any], plan: Plan) -> list[Any]:
    """What the ranks hold together: parts put in place, summands added, or each rank's own."""
    placement, dims = node.meta.get("placement", "I"), node.meta.get("dims") or ()
    if placement == "P":
        return []
    for at, dim in enumerate(dims):
        if (
            placement.startswith("S")
            and ax.is_sharded(dim, plan.shares)
            and ax.size(dim) is not None
        ):
            held = [ax.ranges(dim, plan.shares, rank) for rank in range(plan.tp)]
            full = [
                [((0, v.shape[i]),) if i != at else held[r] for i in range(v.dim())]
                for r, v in enumerate(values)
            ]
            return [unshard(values, full)]
    return [] if placement.startswith("S") else values
