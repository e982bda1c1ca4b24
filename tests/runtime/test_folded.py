"""f and g with a neighbour against f and g alone: values, gradients of both orders, messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autotp.runtime.collectives import copy_to_region, reduce_from_region
from autotp.runtime.folded import column_product, copy_each_to_region, reduce_with_bias
from autotp.runtime.group import Group
from tests.spawn import run

aten = torch.ops.aten
IN, OUT = 5, 4


class Noting(Group):
    """A group that counts its sums, and starts those that may be waited for as on a GPU."""

    summed = started = 0

    def all_reduce_(self, x: Tensor, op: str = "sum") -> Tensor:
        self.summed += 1
        return super().all_reduce_(x, op)

    def start_all_reduce_(self, x: Tensor) -> Callable[[], Any]:
        self.started += 1
        work = dist.all_reduce(x, group=self._peers, async_op=True)
        assert work is not None
        return work.wait

    def counts(self) -> tuple[int, int]:
        found, self.summed, self.started = (self.summed, self.started), 0, 0
        return found


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def apart_product(x: Tensor, w: Tensor, b: Tensor | None, transposed: bool, group: Group) -> Tensor:
    return torch.nn.functional.linear(copy_to_region(x, group), w.t() if transposed else w, b)


def apart_each(x: Tensor, count: int, group: Group) -> tuple[Tensor, ...]:
    return (copy_to_region(x, group),) * count


def apart_bias(x: Tensor, bias: Tensor, group: Group) -> Tensor:
    return reduce_from_region(x, group) + bias


def both_orders(
    call: Callable[..., Tensor], leaves: list[Tensor], group: Group, split: bool = False
) -> list[Tensor]:
    """A result, its gradients, and the gradients of their squares. `split` says that all leaves but
    the first are other ones on each rank."""
    leaves = [x.clone().requires_grad_(x.requires_grad) for x in leaves]
    asked = [x for x in leaves if x.requires_grad]
    result = call(*leaves)
    loss = reduce_from_region(result.pow(3).sum(), group)
    first = torch.autograd.grad(loss, asked, create_graph=True)
    found = [result, *first]
    squares = [g.pow(2).sum() for g in first]
    if split:
        begin = int(leaves[0].requires_grad)
        squares[begin:] = [reduce_from_region(square, group) for square in squares[begin:]]
    again = torch.autograd.grad(torch.stack(squares).sum(), asked, allow_unused=True)
    found += [x for x in again if x is not None]
    plain = torch.autograd.grad(
        reduce_from_region(call(*leaves).pow(3).sum(), group), asked, retain_graph=False
    )
    return [x.detach() for x in (*found, *plain)]


# name: shape of x, transposed, bias, which of x, weight and bias need a gradient
PRODUCTS: dict[str, tuple[tuple[int, ...], bool, bool, tuple[bool, bool, bool]]] = {
    "linear": ((2, 3, IN), False, True, (True, True, True)),
    "without a bias": ((2, 3, IN), False, False, (True, True, False)),
    "rows": ((6, IN), False, True, (True, True, True)),
    "transposed": ((6, IN), True, True, (True, True, True)),
    "transposed, without a bias": ((2, 3, IN), True, False, (True, True, False)),
    "frozen weight": ((2, 3, IN), False, True, (True, False, True)),
    "frozen product": ((6, IN), True, True, (True, False, False)),
    "input without gradient": ((2, 3, IN), False, True, (False, True, True)),
    "no tokens": ((0, 3, IN), False, True, (True, True, True)),
}


def product_leaves(rank: int, name: str, outs: int = OUT) -> list[Tensor]:
    shape, transposed, bias, grads = PRODUCTS[name]
    weight = (IN, outs) if transposed else (outs, IN)
    found = [values(*shape), values(*weight, seed=rank + 1), values(outs, seed=rank + 5)]
    return [x.requires_grad_(g) for x, g in zip(found[: 2 + bias], grads, strict=False)]


def products(rank: int, group: Noting) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    cases = {name: (name, OUT) for name in PRODUCTS}
    cases["one rank has no outputs"] = ("linear", OUT * (1 - rank))
    for key, (name, outs) in cases.items():
        transposed, bias = PRODUCTS[name][1:3]

        def call(
            *leaves: Tensor, of: Any, transposed: bool = transposed, bias: bool = bias
        ) -> Tensor:
            return of(*leaves, *(() if bias else (None,)), transposed, group)

        leaves = product_leaves(rank, name, outs)
        pair = [
            both_orders(lambda *x, of=of, call=call: call(*x, of=of), leaves, group, split=True)
            for of in (column_product, apart_product)
        ]
        seen[key] = pair
    return seen


def steps(rank: int, group: Noting) -> dict[str, Any]:
    """What one forward and backward send, and what they leave alone."""
    seen: dict[str, Any] = {}
    x, w, b = (t.detach().requires_grad_() for t in product_leaves(rank, "linear"))
    group.counts()
    y = column_product(x, w, b, False, group)
    seen["product, forward"] = group.counts()
    incoming = values(*y.shape, seed=rank + 9)
    kept = incoming.clone()
    y.backward(incoming, retain_graph=True)
    seen["product, backward"] = group.counts()
    once = [t.grad.clone() for t in (x, w, b) if t.grad is not None]
    y.backward(incoming)
    twice = [t.grad for t in (x, w, b) if t.grad is not None]
    seen["product, twice"] = list(zip([2 * t for t in once], twice, strict=True))
    seen["product leaves the gradient"] = torch.equal(kept, incoming)
    with torch.no_grad():
        group.counts()
        seen["no gradients"] = [
            (column_product(x, w, b, False, group), torch.nn.functional.linear(x, w, b)),
            *((x, same) for same in copy_each_to_region(x, 2, group)),
            (reduce_with_bias(x, values(IN), group), 2 * x + values(IN)),
        ]
        seen["without gradients"] = group.counts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        floats = [t.detach().float().requires_grad_() for t in (x, w, b)]
        low = column_product(*floats, False, group)
        seen["cast"] = low.dtype, reduce_with_bias(low, floats[2], group).dtype
        low.sum().backward()
        seen["cast gradients"] = [t.grad is not None and t.grad.dtype for t in floats]

    for count, used in ((2, [0, 1]), (3, [0, 1, 2]), (3, [0, 2]), (3, [1])):
        x = values(2, IN).requires_grad_()
        group.counts()
        copies = copy_each_to_region(x, count, group)
        seen[f"each of {count}, forward"] = group.counts()
        hooked: list[tuple[Tensor, Tensor]] = []
        for copy in copies:
            copy.register_hook(
                lambda g, to=hooked: to.append((g, g.clone())) if g is not None else None
            )
        factors = [values(IN, 2, seed=10 * rank + i).t() for i in used]  # gradients in columns
        torch.autograd.backward([copies[i] for i in used], factors)
        seen[f"each of {count}, {used}"] = x.grad, group.counts()
        assert len(hooked) == len(used)
        seen[f"each of {count}, {used}, hooks"] = all(torch.equal(*pair) for pair in hooked)
    return seen


def selective(rank: int, group: Noting) -> dict[str, Any]:
    """Recomputed with every result kept that a copy or sum could be made of."""
    kept = [aten.mm.default, aten.addmm.default, aten.add.Tensor, aten.clone.default]
    tensors = [values(3, IN), values(IN, OUT, seed=rank + 1), values(OUT, IN, seed=rank + 3)]

    def mlp(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        one, other = copy_each_to_region(x, 2, group)
        hidden = column_product(x, up, None, True, group).tanh() + (one * other) @ up
        return reduce_with_bias(hidden @ down, bias, group) + reduce_from_region(
            hidden @ down, group
        )

    found = {}
    for name in ("plain", "kept"):
        leaves = [t.clone().requires_grad_() for t in (*tensors, values(IN, seed=7))]
        if name == "kept":
            y = checkpoint(
                mlp,
                *leaves,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(kept),
            )
        else:
            y = mlp(*leaves)
        y.pow(2).sum().backward()
        found[name] = [y.detach(), *(leaf.grad for leaf in leaves)]
    return found


def biases(rank: int, group: Noting) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    x, bias = values(2, 3, IN, seed=rank), values(IN, seed=7)
    for name, own in {"contiguous": x, "in columns": x.transpose(0, 1).contiguous().mT}.items():
        size = own.shape[-1]
        for frozen in ((True, True), (True, False), (False, True)):
            leaves = [own, values(size, seed=7)]
            leaves = [t.detach().requires_grad_(g) for t, g in zip(leaves, frozen, strict=True)]
            seen[f"{name} {frozen}"] = [
                both_orders(lambda a, b, of=of: of(a, b, group), leaves, group)
                for of in (reduce_with_bias, apart_bias)
            ]
    kept = x.clone()
    group.counts()
    y = reduce_with_bias(x, bias, group)
    seen["sent"] = group.counts()
    seen["left alone"] = torch.equal(x, kept)
    seen["sum"] = y, values(2, 3, IN, seed=0) + values(2, 3, IN, seed=1) + bias
    return seen


def two_ranks(rank: int, _: int) -> dict[str, Any]:
    group = Noting(dist.group.WORLD)
    return {
        "products": products(rank, group),
        "steps": steps(rank, group),
        "biases": biases(rank, group),
        "selective": selective(rank, group),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run(two_ranks, 2)


def close(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.dist
@pytest.mark.parametrize("name", [*PRODUCTS, "one rank has no outputs"])
def test_a_column_product_is_f_and_a_product(two: list[dict[str, Any]], name: str) -> None:
    for seen in two:
        close(*seen["products"][name])


@pytest.mark.dist
def test_its_sum_is_started_once_in_the_backward(two: list[dict[str, Any]]) -> None:
    for seen in (one["steps"] for one in two):
        assert (seen["product, forward"], seen["product, backward"]) == ((0, 0), (0, 1))
        assert seen["product leaves the gradient"]
        for pair in seen["product, twice"]:
            torch.testing.assert_close(*pair)


@pytest.mark.dist
def test_without_gradients_g_alone_sends(two: list[dict[str, Any]]) -> None:
    for seen in (one["steps"] for one in two):
        assert seen["without gradients"] == (1, 0)
        for pair in seen["no gradients"]:
            torch.testing.assert_close(*pair)


@pytest.mark.dist
def test_products_cast_under_autocast(two: list[dict[str, Any]]) -> None:
    for seen in (one["steps"] for one in two):
        assert seen["cast"] == (torch.bfloat16, torch.float32)
        assert seen["cast gradients"] == [torch.float32] * 3


@pytest.mark.dist
@pytest.mark.parametrize(("count", "used"), [(2, [0, 1]), (3, [0, 1, 2]), (3, [0, 2]), (3, [1])])
def test_f_of_several_readers_sums_once(
    two: list[dict[str, Any]], count: int, used: list[int]
) -> None:
    wanted = sum(values(IN, 2, seed=10 * rank + i).t() for rank in range(2) for i in used)
    for seen in (one["steps"] for one in two):
        assert seen[f"each of {count}, forward"] == (0, 0)
        found, sent = seen[f"each of {count}, {used}"]
        torch.testing.assert_close(found, wanted)
        assert sent == (1, 0)
        assert seen[f"each of {count}, {used}, hooks"], "what hooks keep is not written to"


@pytest.mark.dist
def test_a_bias_is_added_once(two: list[dict[str, Any]]) -> None:
    for seen in (one["biases"] for one in two):
        assert seen["sent"] == (1, 0)
        assert seen["left alone"]
        torch.testing.assert_close(*seen["sum"])
        for name, pair in seen.items():
            if name.startswith(("contiguous", "in columns")):
                close(*pair)


@pytest.mark.dist
def test_what_selective_checkpointing_keeps_is_not_written_to(two: list[dict[str, Any]]) -> None:
    for seen in (one["selective"] for one in two):
        close(seen["kept"], seen["plain"])


def test_a_single_rank_sends_nothing() -> None:
    x, w, b = product_leaves(0, "linear")
    alone = Group()
    assert all(y is x for y in copy_each_to_region(x, 2, alone))
    assert torch.equal(column_product(x, w, b, False, alone), torch.nn.functional.linear(x, w, b))
    assert torch.equal(reduce_with_bias(x, x[0, 0], alone), x + x[0, 0])
