"""What a hand-written tensor-parallel model is made of: f, g, split linears, embedding and loss.

Written as Megatron-LM does it, over `torch.distributed` alone, for benchmarks to compare with: no
autotp, no DTensor, plain tensors, shards of equal sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

COMMUNICATE = True  # without, models compute the wrong numbers in the least possible time


def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """In place, as Megatron's `_reduce`."""
    x = x.contiguous()
    if COMMUNICATE:
        dist.all_reduce(x, op=op)
    return x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


def copy_to_region(x: Tensor) -> Tensor:
    """f."""
    out = _Copy.apply(x)
    assert isinstance(out, Tensor)
    return out


def reduce_from_region(x: Tensor) -> Tensor:
    """g."""
    out = _Reduce.apply(x)
    assert isinstance(out, Tensor)
    return out


def part(x: Tensor, dim: int = 0, pieces: int = 1) -> Tensor:
    """This rank's part of a dim, of each of `pieces` fused matrices that lie in it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [piece.chunk(size, dim)[rank] for piece in x.chunk(pieces, dim)]
    return torch.cat(own, dim).contiguous()


class Column(nn.Module):
    """A linear whose outputs are split. Its input went through f."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pieces: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(part(weight, 0, pieces))
        self.bias = None if bias is None else nn.Parameter(part(bias, 0, pieces))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Row(nn.Module):
    """A linear whose inputs are split: a partial sum, g, and the bias once."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(part(weight, 1))
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        out = reduce_from_region(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class Embedding(nn.Module):
    """A table whose rows are split."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(part(weight))

    def forward(self, tokens: Tensor) -> Tensor:
        start = dist.get_rank() * self.weight.shape[0]
        foreign = (tokens < start) | (tokens >= start + self.weight.shape[0])
        found = F.embedding((tokens - start).masked_fill(foreign, 0), self.weight)
        return reduce_from_region(found.masked_fill(foreign.unsqueeze(-1), 0.0))


class _CrossEntropy(torch.autograd.Function):
    """Per-token losses of logits with split classes: Megatron's, with two sums in one message."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        start = dist.get_rank() * logits.shape[1]
        top = all_reduce(logits.amax(1), dist.ReduceOp.MAX)
        shifted = logits - top.unsqueeze(1)
        foreign = (target < start) | (target >= start + logits.shape[1])
        local = (target - start).masked_fill(foreign, 0).unsqueeze(1)
        picked = shifted.gather(1, local).squeeze(1).masked_fill(foreign, 0.0)
        exp = shifted.exp_()
        sums = all_reduce(torch.stack([exp.sum(1), picked]))
        exp /= sums[0].unsqueeze(1)
        ctx.save_for_backward(exp, local, foreign)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        exp, local, foreign = ctx.saved_tensors
        own = (~foreign).to(exp.dtype).unsqueeze(1)
        exp.scatter_add_(1, local, -own)  # as Megatron, in the memory that was saved
        return exp.mul_(grad.unsqueeze(1)), None


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of predicting the next token, from split logits [batch, length, classes]."""
    target = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    kept = target != -100
    each = _CrossEntropy.apply(logits.flatten(0, 1), target)
    assert isinstance(each, Tensor)
    return each.masked_fill(~kept, 0.0).sum() / kept.sum()


def heads(x: Tensor, size: int) -> Tensor:
    """[batch, length, heads * size] -> [batch, heads, length, size]."""
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The inverse of `heads`."""
    return x.transpose(1, 2).flatten(2)
