"""Models whose f's and g's are folded, in real processes: what lockstep cannot show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.runtime.sharded import local
from tests.distributed.cases import error, part
from tests.models import refill
from tests.spawn import run

WIDTH, INNER = 8, 10


class Fn(nn.Module):
    """A function of an up and a down product."""

    def __init__(self, function: Callable[..., Tensor], bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias), nn.Linear(INNER, WIDTH, bias)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.up, self.down)


def relu_in_place(x: Tensor, up: Any, down: Any) -> Tensor:
    return down(torch.relu_(up(x)))  # type: ignore[no-any-return]


def added_in_place(x: Tensor, up: Any, down: Any) -> Tensor:
    hidden = up(x)
    hidden += 1.0
    out = down(hidden.tanh())
    out += x
    return out  # type: ignore[no-any-return]


def view_in_place(x: Tensor, up: Any, down: Any) -> Tensor:
    hidden = up(x)
    hidden.view(-1).mul_(2.0)
    out = down(hidden.tanh())
    out.view(-1).mul_(2.0)
    return out.tanh()  # type: ignore[no-any-return]


def with_residual(x: Tensor, up: Any, down: Any) -> Tensor:
    return (x + down(torch.tanh(up(x)))).tanh()  # type: ignore[no-any-return]


class Parallel(nn.Module):
    """Two branches of one norm, each of several products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one, self.other = Gated(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.one(y) + self.other(y)  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).sigmoid() * self.up(x))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "activation in place": lambda: Fn(relu_in_place),
    "sums in place": lambda: Fn(added_in_place),
    "a view in place": lambda: Fn(view_in_place),
    "no bias": lambda: Fn(with_residual, bias=False),
    "parallel branches": Parallel,
    "complex": lambda: Fn(with_residual).to(torch.complex128),
}
Hook = Callable[[Any], Any]
HOOKS: dict[str, Hook] = {
    "inputs": lambda m: m.one.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "outputs": lambda m: m.one.up.register_forward_hook(lambda _, args, out: out.mul_(1.5)),
    "no gradient": lambda m: m.other.register_full_backward_hook(lambda _, given, out: (None,)),
}


class Counted:
    """A hook that counts what a module is given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen.append(len(args))


def differences(model: nn.Module, tp: Any, dtype: torch.dtype, again: bool) -> dict[str, float]:
    """Of outputs, gradients, and perhaps gradients of gradients of the input."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, WIDTH, dtype=dtype, generator=generator)
    found = []
    for each in (model, tp):
        each.zero_grad()
        given = x.clone().requires_grad_()
        y = each(given)
        loss = (y * y.conj()).real.sum()
        first = torch.autograd.grad(loss, given, create_graph=again, retain_graph=True)[0]
        results = [y.detach(), first.detach()]
        if again:
            results += torch.autograd.grad(first.pow(2).sum(), given, retain_graph=True)
        loss.backward()
        grads = {n: local(p.grad) for n, p in each.named_parameters() if p.grad is not None}
        found.append((results, grads))
    (one, wanted), (other, got) = found
    seen = {str(i): error(b, a) for i, (a, b) in enumerate(zip(one, other, strict=True))}
    for name, whole in wanted.items():
        seen[name] = error(got[name], part(whole, tp.plan, name, tp.rank), whole)
    return seen


def on_ranks(rank: int, world: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, make in MODELS.items():
        model: Any = refill(make())
        dtype = torch.complex128 if "complex" in name else torch.float64
        model = model.to(dtype)
        if dtype.is_complex:  # values that are not their own conjugates
            for parameter in model.parameters():
                parameter.data *= 0.6 + 0.8j
        example = torch.zeros(2, 5, WIDTH, dtype=dtype)
        tp: Any = autotp.parallelize(model, tp=world, example_inputs=(example,))
        assert tp.plan.shares, name
        seen[name] = differences(model, tp, dtype, again="complex" not in name)
    for name, hook in HOOKS.items():
        model = refill(Parallel().double())
        example = torch.zeros(2, 5, WIDTH, dtype=torch.float64)
        tp = autotp.parallelize(model, tp=world, example_inputs=(example,))
        counted = Counted()
        for each in (model, tp):
            hook(each)
            each.other.register_forward_pre_hook(counted)
        seen[f"hook: {name}"] = differences(model, tp, torch.float64, again=False)
        assert set(counted.seen) == {1}, "a module is given one value"
    return seen


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run(on_ranks, request.param)


@pytest.mark.dist
@pytest.mark.parametrize("name", [*MODELS, *(f"hook: {name}" for name in HOOKS)])
def test_a_model_computes_the_same(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in ranks:
        assert max(seen[name].values()) < 1e-9, seen[name]
