"""The split loss and lookup against torch's own: values, gradients, options, errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autotp.axes import balanced
from autotp.runtime import vocabulary
from autotp.runtime.group import Group

SPLITS = (2, 3, 5)


def rows_of(classes: int, ranks: int) -> tuple[tuple[int, int], ...]:
    bounds = balanced(classes, ranks)
    return tuple(itertools.pairwise(bounds))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * 3


def split_loss(logits: Tensor, target: Tensor, ranks: int, **options: Any) -> list[Tensor]:
    """The loss on every rank of one process; `weight` is split as the classes are."""
    rows = rows_of(logits.shape[1] if logits.dim() > 1 else logits.shape[0], ranks)
    weight = options.pop("weight", None)
    dim = 1 if logits.dim() > 1 else 0
    reduction = {"none": 0, "mean": 1, "sum": 2}[options.pop("reduction", "mean")]
    calls = [
        (
            logits.narrow(dim, start, stop - start),
            target,
            rows,
            None if weight is None else weight[start:stop],
            reduction,
            options.get("ignore_index", -100),
            options.get("label_smoothing", 0.0),
        )
        for start, stop in rows
    ]
    return vocabulary.cross_entropy_of_all(calls)


@pytest.mark.parametrize("ranks", SPLITS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(7, 11), (11,), (3, 11, 4), (2, 11, 2, 3)])
def test_the_split_loss_is_cross_entropy(
    ranks: int, reduction: str, smoothing: float, weighted: bool, shape: tuple[int, ...]
) -> None:
    whole = numbers(*shape)
    target_shape = () if len(shape) == 1 else (shape[0], *shape[2:])
    target = torch.randint(11, target_shape, generator=torch.Generator().manual_seed(1))
    if target.dim():
        target.view(-1)[0] = 5  # = ignore_index below
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    options |= {"ignore_index": 5 if target.dim() else -100}
    options |= {"weight": numbers(11, seed=2).abs()} if weighted else {}
    mine, theirs = whole.clone().requires_grad_(), whole.clone().requires_grad_()
    want = F.cross_entropy(theirs, target, **options)
    found = split_loss(mine, target, ranks, **options)
    factors = numbers(*want.shape, seed=3) if want.dim() else torch.tensor(1.7).double()
    for loss in found:
        assert torch.allclose(loss, want, rtol=1e-12, atol=1e-12)
    (want * factors).sum().backward()
    # a rank's own backward gives its classes their gradient: one backward on each
    sum((loss * factors).sum() for loss in found).backward()  # type: ignore[union-attr]
    assert mine.grad is not None and theirs.grad is not None
    assert torch.allclose(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_all_targets_ignored_is_what_torch_gives() -> None:
    logits, target = numbers(4, 9), torch.full((4,), -100)
    assert torch.isnan(F.cross_entropy(logits, target))
    assert all(torch.isnan(loss) for loss in split_loss(logits, target, 3))
    assert all(loss == 0 for loss in split_loss(logits, target, 3, reduction="sum"))


@pytest.mark.parametrize("wrong", [-1, 9, 100])
def test_a_target_outside_the_classes_raises_as_torch_does(wrong: int) -> None:
    logits, target = numbers(4, 9), torch.tensor([0, 8, wrong, 1])
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        F.cross_entropy(logits, target)
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        split_loss(logits, target, 3)


def test_large_logits_do_not_overflow() -> None:
    logits = numbers(5, 9).float() * 1e4
    target = torch.arange(5)
    want = F.cross_entropy(logits, target)
    assert all(torch.allclose(loss, want) for loss in split_loss(logits, target, 4))


def test_half_precision_counts_in_float32() -> None:
    logits, target = numbers(64, 257).bfloat16(), torch.arange(64)
    want = F.cross_entropy(logits.float(), target)
    for loss in split_loss(logits, target, 3):
        assert loss.dtype is torch.bfloat16
        assert abs(loss.float() - want) <= 2**-8 * want.abs()


def test_the_backward_keeps_no_copy_of_the_logits() -> None:
    logits = numbers(6, 10).requires_grad_()
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    parts = [logits.narrow(1, 0, 5).clone(), logits.narrow(1, 5, 5).clone()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        rows = rows_of(10, 2)
        vocabulary.cross_entropy_of_all([(part, torch.arange(6), rows) for part in parts])
    own = {part.untyped_storage().data_ptr() for part in parts}
    large = [t for t in held if t.numel() >= 30 and t.untyped_storage().data_ptr() not in own]
    assert not large


@pytest.mark.parametrize("ranks", SPLITS)
@pytest.mark.parametrize("padding", [-1, 0, 7])
def test_parts_of_a_lookup_add_up_to_it(ranks: int, padding: int) -> None:
    table, index = numbers(11, 4), torch.tensor([[0, 7, 10], [3, 7, 7]])
    factors = numbers(2, 3, 4, seed=4)
    whole = table.clone().requires_grad_()
    want = F.embedding(index, whole, padding_idx=None if padding < 0 else padding)
    (want * factors).sum().backward()
    rows, total, grads = rows_of(11, ranks), torch.zeros(2, 3, 4).double(), []
    for (start, stop), group in zip(rows, Group.in_process(ranks), strict=True):
        part = table[start:stop].clone().requires_grad_()
        found = vocabulary.embedding(part, index, rows, padding, group=group)
        (found * factors).sum().backward()
        total += found.detach()
        assert part.grad is not None
        grads.append(part.grad)
    assert torch.equal(total, want.detach())
    assert whole.grad is not None and torch.allclose(torch.cat(grads), whole.grad)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_index_outside_the_table_raises_on_every_rank(wrong: int) -> None:
    rows = rows_of(11, 3)
    for (start, stop), group in zip(rows, Group.in_process(3), strict=True):
        with pytest.raises(IndexError, match="index out of range in self"):
            vocabulary.embedding(
                numbers(stop - start, 4), torch.tensor([0, wrong]), rows, group=group
            )
