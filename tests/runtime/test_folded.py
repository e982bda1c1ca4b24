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
from autotp.runtime.folded import column_product, copy_each_to_region, row_product
from autotp.runtime.group import Group
from tests.spawn import run

aten = torch.ops.aten
IN, OUT = 5, 4


class Noting(Group):
    """A group that counts its sums, and starts those that may be waited for as on a GPU."""

    summed = started = 0

    def all_reduce(self, x: Tensor, op: str = "sum", own: bool = False) -> Tensor:
        self.summed += 1
        return super().all_reduce(x, op, own)

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        self.started += 1
        work = dist.all_reduce(x, group=self._peers, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return x

        return wait

    def counts(self) -> tuple[int, int]:
        found, self.summed, self.started = (self.summed, self.started), 0, 0
        return found


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def apart_product(x: Tensor, w: Tensor, b: Tensor | None, transposed: bool, group: Group) -> Tensor:
    return torch.nn.functional.linear(copy_to_region(x, group), w.t() if transposed else w, b)


def apart_each(x: Tensor, count: int, group: Group) -> tuple[Tensor, ...]:
    return (copy_to_region(x, group),) * count


def apart_row(x: Tensor, w: Tensor, b: Tensor | None, transposed: bool, group: Group) -> Tensor:
    total = reduce_from_region(torch.nn.functional.linear(x, w.t() if transposed else w), group)
    return total if b is None else total + b


def both_orders(
    of: Any, leaves: list[Tensor], transposed: bool, kind: str, group: Group
) -> list[Tensor]:
    """A result, its gradients, and the gradients of their squares."""
    leaves = [x.clone().requires_grad_(x.requires_grad) for x in leaves]
    asked = {i: x for i, x in enumerate(leaves) if x.requires_grad}
    whole = {0} if kind == "column" else {2}  # what is the same on every rank

    def loss() -> Tensor:
        cubes = of(*leaves[:2], leaves[2] if len(leaves) > 2 else None, transposed, group).pow(3)
        return cubes.sum() if kind == "row" else reduce_from_region(cubes.sum(), group)

    first = torch.autograd.grad(loss(), [*asked.values()], create_graph=True)
    squares = {i: g.pow(2).sum() for i, g in zip(asked, first, strict=True)}
    summed = [
        square if i in whole else reduce_from_region(square, group) for i, square in squares.items()
    ]
    total = torch.stack(summed).sum()
    second = torch.autograd.grad(total, [*asked.values()], allow_unused=True)
    plain = torch.autograd.grad(loss(), [*asked.values()])
    return [x.detach() for x in (*first, *second, *plain) if x is not None]


class Stop(torch.autograd.Function):
    """No gradient comes out of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


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


def product_leaves(rank: int, name: str, held: int = OUT, row: bool = False) -> list[Tensor]:
    """x, weight and perhaps bias; `held` is what this rank holds of the split dim."""
    shape, transposed, bias, grads = PRODUCTS[name]
    (ins, outs), seed = ((held, OUT), rank) if row else ((IN, held), 0)
    weight = (ins, outs) if transposed else (outs, ins)
    found = [
        values(*shape[:-1], ins, seed=seed),
        values(*weight, seed=rank + 1),
        values(outs, seed=7 if row else rank + 5),
    ]
    return [x.requires_grad_(g) for x, g in zip(found[: 2 + bias], grads, strict=False)]


def products(rank: int, group: Noting) -> dict[str, Any]:
    """A product of either kind and what it stands for. Of a column-parallel one the input is the
    same on every rank, of a row-parallel one the bias."""
    seen: dict[str, Any] = {}
    cases = {name: (name, OUT) for name in PRODUCTS}
    cases["one rank has nothing"] = ("linear", OUT * (1 - rank))
    for key, (name, held) in cases.items():
        for kind, one, other in (
            ("column", column_product, apart_product),
            ("row", row_product, apart_row),
        ):
            leaves = product_leaves(rank, name, held, kind == "row")
            seen[f"{kind}, {key}"] = [
                both_orders(of, leaves, PRODUCTS[name][1], kind, group) for of in (one, other)
            ]
    return seen


def steps(rank: int, group: Noting) -> dict[str, Any]:
    """What one forward and backward send, and what they leave alone."""
    seen: dict[str, Any] = {}
    x, w, b = (t.detach().requires_grad_() for t in product_leaves(rank, "linear"))
    c = values(OUT, seed=7)
    group.counts()
    y = column_product(x, w, b, False, group).relu_()  # as an activation in place
    seen["product, forward"] = group.counts()
    incoming = values(*y.shape, seed=rank + 9)
    kept = incoming.clone()
    y.backward(incoming, retain_graph=True)
    seen["product, backward"] = group.counts()
    once = [t.grad.clone() for t in (x, w, b) if t.grad is not None]
    y.backward(incoming)
    twice = [t.grad.clone() for t in (x, w, b) if t.grad is not None]
    seen["product, twice"] = list(zip([2 * t for t in once], twice, strict=True))
    seen["product leaves the gradient"] = torch.equal(kept, incoming)
    group.counts()
    y = row_product(x, w, c.requires_grad_(), False, group)
    seen["row, forward"] = group.counts()
    y.add_(1.0)  # as a residual that is written in place
    y.backward(incoming)
    seen["row, backward"] = group.counts()
    seen["row leaves the gradient"] = torch.equal(kept, incoming)
    with torch.no_grad():
        group.counts()
        seen["no gradients"] = [
            (column_product(x, w, b, False, group), torch.nn.functional.linear(x, w, b)),
            *((x, same) for same in copy_each_to_region(x, 2, group)),
            (row_product(x, w, c, False, group), apart_row(x, w, c, False, group)),
        ]
        seen["without gradients"] = group.counts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        floats = [t.detach().float().requires_grad_() for t in (x, w, b)]
        low = column_product(floats[0], floats[1], floats[2], False, group)
        floats += [values(IN, OUT).float().requires_grad_(), values(IN).float().requires_grad_()]
        low = row_product(low, floats[3], floats[4], False, group)
        seen["cast"] = low.dtype
        low.sum().backward()
        seen["cast gradients"] = [t.grad is not None and t.grad.dtype for t in floats]

    seen["complex"] = []
    for of, other in ((column_product, apart_product), (row_product, apart_row)):
        for transposed in (False, True):
            made = []
            for function in (of, other):
                a, m = (torch.complex(t, t.flip(0).sin()).detach() for t in (x, w))
                m = (m.t() if transposed else m).clone().requires_grad_()
                a.requires_grad_()
                y = function(a, m, None, transposed, group)
                (y * y.conj()).real.sum().backward()
                made.append([y.detach(), a.grad, m.grad])
            seen["complex"].append(made)

    x = values(2, IN).requires_grad_()
    stopped = [Stop.apply(copy) for copy in copy_each_to_region(x, 2, group)]
    seen["stopped"] = torch.autograd.grad(sum(y.sum() for y in stopped), x, allow_unused=True)

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


POLICIES: dict[str, Callable[[Any], bool]] = {
    "nothing": lambda op: False,
    "products": lambda op: op in (aten.mm.default, aten.addmm.default),
    "products of any form": lambda op: getattr(op, "overloadpacket", op) in (aten.mm, aten.addmm),
    "copies": lambda op: op is aten.clone.default,
    "products and copies": lambda op: op in (aten.mm.default, aten.clone.default),
    "all but collectives": lambda op: op.namespace == "aten",
    "all": lambda op: True,
}


def selective(rank: int, group: Noting) -> dict[str, Any]:
    """Recomputed, with some results kept: they must be what the operators made."""
    tensors = [values(3, IN), values(IN, OUT, seed=rank + 1), values(OUT, IN, seed=rank + 3)]

    def mlp(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        one, other = copy_each_to_region(x, 2, group)
        hidden = column_product(x, up, None, True, group).tanh() + (one * other) @ up
        row, alone = row_product(hidden, down, bias, True, group), hidden.sin() @ down
        return row.tanh() + reduce_from_region(alone, group).tanh() * alone

    def run_with(keep: Callable[[Any], bool] | None) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_() for t in (*tensors, values(IN, seed=7))]
        if keep is None:
            y = mlp(*leaves)
        else:
            contexts = create_selective_checkpoint_contexts(lambda _, op, *a, **k: keep(op))
            y = checkpoint(mlp, *leaves, use_reentrant=False, context_fn=lambda: contexts)
        y.pow(2).sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    found = {name: run_with(keep) for name, keep in POLICIES.items()}
    return {**found, "plain": run_with(None)}


def two_ranks(rank: int, _: int) -> dict[str, Any]:
    group = Noting(dist.group.WORLD)
    return {
        "products": products(rank, group),
        "steps": steps(rank, group),
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
@pytest.mark.parametrize("name", [*PRODUCTS, "one rank has nothing"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_products_are_what_they_stand_for(two: list[dict[str, Any]], kind: str, name: str) -> None:
    for seen in two:
        close(*seen["products"][f"{kind}, {name}"])


@pytest.mark.dist
def test_each_sums_once(two: list[dict[str, Any]]) -> None:
    for seen in (one["steps"] for one in two):
        assert (seen["product, forward"], seen["product, backward"]) == ((0, 0), (0, 1))
        assert (seen["row, forward"], seen["row, backward"]) == ((1, 0), (0, 0))
        assert seen["product leaves the gradient"]
        assert seen["row leaves the gradient"]
        for pair in seen["product, twice"]:
            torch.testing.assert_close(*pair)


@pytest.mark.dist
def test_without_gradients_g_alone_sends(two: list[dict[str, Any]]) -> None:
    for seen in (one["steps"] for one in two):
        assert seen["without gradients"] == (2, 0), "of a row product, and of what it stands for"
        for pair in seen["no gradients"]:
            torch.testing.assert_close(*pair)


@pytest.mark.dist
def test_gradients_of_complex_products(two: list[dict[str, Any]]) -> None:
    for seen in (one["steps"] for one in two):
        for pair in seen["complex"]:
            close(*pair)


@pytest.mark.dist
def test_no_gradient_is_none(two: list[dict[str, Any]]) -> None:
    assert all(one["steps"]["stopped"] == (None,) for one in two)


@pytest.mark.dist
def test_products_cast_under_autocast(two: list[dict[str, Any]]) -> None:
    for seen in (one["steps"] for one in two):
        assert seen["cast"] == torch.float32, "of a product in bfloat16 and a bias in float32"
        assert seen["cast gradients"] == [torch.float32] * 5


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
@pytest.mark.parametrize("name", POLICIES)
def test_selective_checkpointing_keeps_what_it_likes(two: list[dict[str, Any]], name: str) -> None:
    for seen in (one["selective"] for one in two):
        close(seen[name], seen["plain"])


def test_a_single_rank_sends_nothing() -> None:
    x, w, b = product_leaves(0, "linear")
    alone = Group()
    assert all(y is x for y in copy_each_to_region(x, 2, alone))
    assert torch.equal(column_product(x, w, b, False, alone), torch.nn.functional.linear(x, w, b))
    assert torch.equal(row_product(x, w, None, False, alone), torch.nn.functional.linear(x, w))
    assert torch.equal(row_product(x, w, b, False, alone), torch.nn.functional.linear(x, w) + b)
