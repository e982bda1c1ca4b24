"""What is computed twice is computed once, where that is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests.models import refill
from tests.oneprocess import assert_same

WIDTH, INNER = 6, 10


class Layer(nn.Module):
    """An MLP that scales its inner values with what the model gives to every layer."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.step = step

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = torch.relu(self.up(x)) * self.step(scale)
        return x + self.down(h)  # type: ignore[no-any-return]


class Layers(nn.Module):
    """Layers that all do the same with one value."""

    def __init__(self, step: Callable[[Tensor], Tensor], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(step) for _ in range(count))
        self.into = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tanh(self.into(x)).squeeze(-1)
        for layer in self.layers:
            x = layer(x, scale)
        return x


def wide(scale: Tensor) -> Tensor:
    return torch.cos(scale.unsqueeze(-1) * 2.0)


def twice(scale: Tensor) -> Tensor:
    return torch.sin(scale.unsqueeze(-1)) * torch.sin(scale.unsqueeze(-1))


def in_vain(scale: Tensor) -> Tensor:
    return ((scale.unsqueeze(-1) * 1.0) / 1) * 1.0


def zero(scale: Tensor) -> Tensor:
    return 1.0 + (scale + 0).unsqueeze(-1)


def written(scale: Tensor) -> Tensor:
    mine = scale.clone().unsqueeze(-1)
    before = mine.exp()
    mine.mul_(0.5)
    return before + mine.exp()


def numbers(scale: Tensor) -> Tensor:
    wide = scale.unsqueeze(-1)
    return torch.where(wide > 0, torch.full_like(wide, 2), torch.full_like(wide, 2.0)) * wide


def signs(scale: Tensor) -> Tensor:
    wide = scale.unsqueeze(-1)
    return torch.atan2(wide.square() * 0.0, wide) + torch.atan2(wide.square() * -0.0, wide)


def regions(scale: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = scale.exp()
    return (fixed * scale.exp()).unsqueeze(-1)


def values() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=generator)


def counts(model: nn.Module) -> dict[str, int]:
    """How often each operator stands in the graph of a parallel model that is proved right."""
    model = refill(model.double())
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3, example_inputs=(values(),))
    assert_same(model, lockstep, (values(),))
    found: dict[str, int] = {}
    for node in lockstep.plan.program().graph.nodes:
        name = str(node.target).removeprefix("aten.").split(".")[0]
        found[name] = found.get(name, 0) + 1
    return found


def test_what_every_layer_computes_from_the_same_value_is_computed_once() -> None:
    found = counts(Layers(wide))
    assert (found["unsqueeze"], found["cos"], found["relu"]) == (1, 1, 3)
    found = counts(Layers(twice))
    assert (found["unsqueeze"], found["sin"]) == (1, 1)


def test_layers_that_share_a_value_still_share_their_code() -> None:
    model = refill(Layers(wide).double())
    lockstep = autotp.parallelize(model, devices=["cpu"] * 2, example_inputs=(values(),))
    codes = [layer._tp_codes[0] for layer in lockstep.ranks[0].layers]
    assert len({id(code.function) for code in codes}) == 1
    assert not any(str(n.target).startswith("aten.cos") for n in codes[0].graph.nodes)


def test_steps_that_change_nothing_go() -> None:
    found = counts(Layers(in_vain))
    assert "div" not in found and found["mul"] == 3


def test_a_value_is_not_lifted_out_of_a_region() -> None:
    calls: list[int] = []

    def first_without_gradient(scale: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) % 3 != 1:
            return scale.exp().unsqueeze(-1)
        with torch.no_grad():
            fixed = scale.sin()
        return (fixed + scale.exp()).unsqueeze(-1)

    assert counts(Layers(first_without_gradient))["exp"] == 2


@pytest.mark.parametrize(("step", "name", "wanted"), [(written, "exp", 6), (regions, "exp", 6)])
def test_values_that_change_or_have_no_gradient_are_computed_again(
    step: Any, name: str, wanted: int
) -> None:
    assert counts(Layers(step))[name] == wanted


def test_adding_zero_to_a_float_stays() -> None:  # -0.0 + 0 is 0.0
    assert counts(Layers(zero))["add"] >= 2 + 3


def test_numbers_of_another_type_are_other_operands() -> None:
    assert counts(Layers(numbers))["full_like"] == 2


def test_the_sign_of_zero_makes_another_operand() -> None:
    assert counts(Layers(signs))["atan2"] == 2


def test_the_caller_gets_each_result_in_memory_of_its_own() -> None:
    class Two(Layers):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y.exp(), y.exp(), y.exp().sum()

    model = refill(Two(wide).double())
    lockstep = autotp.parallelize(model, devices=["cpu"] * 2, example_inputs=(values(),))
    one, two, total = lockstep(values())
    kept = two.detach().clone()
    one.detach().zero_()
    assert torch.equal(two, kept)
    total.backward()


def test_each_dropout_draws_for_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            drop = nn.functional.dropout
            return self.down(drop(h, 0.5, True) + drop(h, 0.5, True))  # type: ignore[no-any-return]

    plan = autotp.plan(Twice().double(), 2, example_inputs=(values(),))
    names = [getattr(n.target, "__name__", "") for n in plan.program().graph.nodes]
    assert names.count("draw") == 2


def test_a_value_is_not_lifted_above_the_block_that_makes_its_operand() -> None:
    class Second(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return x * torch.cos(h)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.up(x)
            return torch.cos(h), h

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.layer = First(), Second(), Layer(wide)

        def forward(self, x: Tensor) -> Tensor:
            y, h = self.first(x)
            return self.layer(self.second(y, h), h[..., 0])  # type: ignore[no-any-return]

    assert counts(Both())["cos"] == 3
