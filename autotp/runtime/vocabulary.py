"""Operators on a vocabulary that is split over the ranks: embedding lookup and cross entropy.

As in Megatron (Shoeybi et al. 2019, section 3): a rank looks up the rows that it owns, and the
loss is computed on split logits, so that O(tokens) numbers cross the network instead of O(tokens x
vocabulary).
`rows[r]` is the contiguous range of rank r; ranges may differ in length and are never padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from autotp.runtime.group import Group

Rows: TypeAlias = tuple[tuple[int, int], ...]
NONE, MEAN, SUM = 0, 1, 2


def embedding(
    weight: Tensor, index: Tensor, rows: Rows, padding_idx: int = -1, *, group: Group
) -> Tensor:
    """Rows of a split table: zero where another rank owns the row, so the sum over ranks is the
    result.

    `weight` [rows of this rank, features], `index` [...] of global rows. Raises IndexError on every
    rank for an index outside the table (on CPU, as the unsharded operator).
    """
    start, stop = rows[group.rank]
    foreign = (index < start) | (index >= stop)
    local = (index - start).masked_fill(foreign & _inside(index, rows[-1][1]), 0)
    padding = padding_idx - start if start <= padding_idx < stop else None
    found = F.embedding(local, weight, padding_idx=padding)
    return found.masked_fill(foreign.unsqueeze(-1), 0)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    rows: Rows,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    group: Group,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits whose classes are split; the same on every
    rank.

    `logits` [tokens, local classes], or [batch, local classes, ...]; `target` holds global classes.
    Exchanges the maximum, then the sum of exponentials and the target's logit: one all-reduce of
    tokens and one of 2 x tokens numbers (3 with label smoothing, one more with class weights), in
    float32 for half precision. The backward needs no communication and keeps no copy of the logits.
    Raises IndexError for a target outside the classes (on CPU, as the unsharded operator).
    """
    task = Task.make(logits, target, rows, weight, group.rank, ignore_index, label_smoothing)
    nll, smooth, picked = _Tokens.apply(task.flat(logits), task, group)
    return task.reduced(nll, smooth, picked, reduction).to(logits.dtype)


@dataclass(frozen=True)
class Task:
    """What one rank needs to know of a loss: targets as local classes, and which ones it owns."""

    target: Tensor  # [tokens], global classes
    shape: torch.Size  # of the target
    kept: Tensor  # [tokens], whether the target is not ignored
    mine: Tensor  # [tokens], whether this rank owns the target's class
    local: Tensor  # [tokens], the target as a local class, 0 where it is another rank's
    weight: Tensor | None  # [local classes]
    classes: int
    smoothing: float

    @staticmethod
    def make(
        logits: Tensor,
        target: Tensor,
        rows: Rows,
        weight: Tensor | None,
        rank: int,
        ignore_index: int,
        smoothing: float,
    ) -> Task:
        """Flatten the targets and find this rank's."""
        start, stop = rows[rank]
        flat = target.reshape(-1)
        kept = flat != ignore_index
        wrong = kept & ~_inside(flat, rows[-1][1])
        _check_target(flat, wrong)
        mine = kept & (flat >= start) & (flat < stop)
        local = (flat - start).masked_fill(~(mine | wrong), 0)
        return Task(flat, target.shape, kept, mine, local, weight, rows[-1][1], smoothing)

    def flat(self, logits: Tensor) -> Tensor:
        """Logits as [tokens, local classes]."""
        if logits.dim() == 1:
            return logits.unsqueeze(0)
        return logits.movedim(1, -1).flatten(0, -2)

    def statistics(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's log-sum-exp [tokens], and what is summed over ranks [several, tokens]."""
        picked = logits.gather(1, self.local.unsqueeze(1)).squeeze(1).masked_fill(~self.mine, 0)
        sums = [_float(picked)]
        weight = None if self.weight is None else self.weight.to(sums[0].dtype)
        if self.smoothing:
            dtype = sums[0].dtype
            whole = logits.sum(1, dtype=dtype) if weight is None else _float(logits) @ weight
            sums.append(whole)
        if weight is not None:
            own = weight[self.local].masked_fill(~self.mine, 0)
            sums += [own, weight.sum().expand_as(own)]
        return _log_sum_exp(logits), torch.stack(sums)

    def outputs(self, lse: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Per token: negative log likelihood, its sum over classes, target's weight; total
        weight."""
        ones = torch.ones_like(lse)
        weights, total = (
            (sums[-2], sums[-1]) if self.weight is not None else (ones, ones * self.classes)
        )
        smooth = lse * total - sums[1] if self.smoothing else torch.zeros_like(lse)
        return lse - sums[0], smooth, weights, total

    def gradient(
        self, logits: Tensor, lse: Tensor, total: Tensor, nll: Tensor, smooth: Tensor
    ) -> Tensor:
        """The gradient of the local logits from those of the two outputs."""
        grad = (logits - lse.unsqueeze(1)).exp_()  # of the dtype of lse: float32 for half precision
        grad *= (nll + smooth * total if self.smoothing else nll).unsqueeze(1)
        if self.smoothing:
            each = 1.0 if self.weight is None else self.weight.to(grad.dtype)
            grad -= smooth.unsqueeze(1) * each
        own = torch.where(self.mine, nll, torch.zeros_like(nll)).unsqueeze(1)
        grad.scatter_add_(1, self.local.unsqueeze(1), -own)
        return grad.to(logits.dtype)

    def reduced(self, nll: Tensor, smooth: Tensor, picked: Tensor, reduction: int) -> Tensor:
        """The loss from per-token values, as `aten::cross_entropy_loss` defines it."""
        zero = torch.zeros((), dtype=nll.dtype, device=nll.device)
        nll = torch.where(self.kept, nll * picked, zero)
        smooth = torch.where(self.kept, smooth, zero)
        loss = (1 - self.smoothing) * nll + self.smoothing / self.classes * smooth
        if reduction == NONE:
            return loss.reshape(self.shape)
        if reduction == SUM:
            return loss.sum()
        return loss.sum() / torch.where(self.kept, picked, zero).sum()


class _Tokens(Function):
    """Per-token losses of split logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, task: Task, group: Group) -> tuple[Tensor, ...]:
        local, sums = task.statistics(logits)
        top = group.all_reduce(local, "max")
        shared = group.all_reduce(torch.cat([(local - top).exp().unsqueeze(0), sums]))
        lse = top + shared[0].log()
        nll, smooth, picked, total = task.outputs(lse, shared[1:])
        ctx.save_for_backward(logits, lse, total)
        ctx.task = task
        ctx.mark_non_differentiable(picked)
        return nll, smooth, picked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nll: Tensor, smooth: Tensor, picked: Tensor) -> tuple[Any, ...]:
        logits, lse, total = ctx.saved_tensors
        return ctx.task.gradient(logits, lse, total, nll, smooth), None, None


class _TokensOfAll(Function):
    """The same for all ranks of one process: `values` are logits of rank 0, 1, ..."""

    @staticmethod
    def forward(ctx: Any, tasks: tuple[Task, ...], *values: Tensor) -> tuple[Tensor, ...]:
        found = [task.statistics(x) for task, x in zip(tasks, values, strict=True)]
        home = values[0].device
        local = torch.stack([lse.to(home) for lse, _ in found])
        top = local.amax(0)
        shared = (local - top).exp().sum(0)
        sums = torch.stack([s.to(home) for _, s in found]).sum(0)
        results, saved = [], []
        for task, x in zip(tasks, values, strict=True):
            lse = (top + shared.log()).to(x.device)
            nll, smooth, picked, total = task.outputs(lse, sums.to(x.device))
            results += [nll, smooth, picked]
            saved += [x, lse, total]
        ctx.save_for_backward(*saved)
        ctx.tasks = tasks
        ctx.mark_non_differentiable(*results[2::3])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        return (
            None,
            *(
                task.gradient(*saved[3 * i : 3 * i + 3], grads[3 * i], grads[3 * i + 1])
                for i, task in enumerate(ctx.tasks)
            ),
        )


def cross_entropy_of_all(calls: list[tuple[Any, ...]]) -> list[Tensor]:
    """`cross_entropy` of every rank of one process; `calls[r]` are rank r's arguments."""
    tasks, flat = [], []
    for rank, (logits, target, rows, *rest) in enumerate(calls):
        weight, _, ignore, smoothing = _defaults(rest)
        tasks.append(Task.make(logits, target, rows, weight, rank, ignore, smoothing))
        flat.append(tasks[-1].flat(logits))
    found = _TokensOfAll.apply(tuple(tasks), *flat)
    return [
        task.reduced(found[3 * r], found[3 * r + 1], found[3 * r + 2], _defaults(call[3:])[1]).to(
            call[0].dtype
        )
        for r, (task, call) in enumerate(zip(tasks, calls, strict=True))
    ]


def _defaults(rest: Sequence[Any]) -> tuple[Tensor | None, int, int, float]:
    defaults: list[Any] = [None, MEAN, -100, 0.0]
    weight, reduction, ignore, smoothing = [*rest, *defaults[len(rest) :]]
    return weight, reduction, ignore, smoothing


def _float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _log_sum_exp(x: Tensor) -> Tensor:
    """Of each row, a few rows at a time: exponentials of all logits would be the largest value of a
    step, and a CPU has what is smaller in its cache."""
    numbers = 2**18 if x.device.type == "cpu" else 2**24
    if x.numel() <= numbers or torch.compiler.is_compiling():
        return torch.logsumexp(_float(x), 1)
    rows = x.split(max(1, numbers // x.shape[1]))
    return torch.cat([torch.logsumexp(_float(part), 1) for part in rows])


def _inside(index: Tensor, rows: int) -> Tensor:
    """Which indices are in the table. The others stay out of range, so that the look-up itself
    refuses them, on every rank."""
    return (index >= 0) & (index < rows)


def _check_target(target: Tensor, wrong: Tensor) -> None:
    # on an accelerator, and in compiled code, the look-up of the target's logit refuses it
    if target.device.type == "cpu" and not torch.compiler.is_compiling() and wrong.any():
        raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")
