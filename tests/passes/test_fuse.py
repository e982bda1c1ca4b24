"""Formulas become operators where they are the same to within rounding, and only there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests.models import refill
from tests.oneprocess import assert_same

WIDTH, INNER = 6, 10
C = math.sqrt(2 / math.pi)


def new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))


def fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * C * (1.0 + 0.044715 * x * x)))


def bloom(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(C * x * (1 + 0.044715 * x * x)))


def exact(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def of_a_sum(x: Tensor) -> Tensor:
    return new(x + 0.25) * 3.0


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def read_inside(x: Tensor) -> Tensor:
    cube = torch.pow(x, 3.0)
    return 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * cube))) + 0.01 * cube


def rounded(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.79788456 * (1.0 + 0.044715 * x * x)))


def quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def other_constant(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(C * (x + 0.0447 * torch.pow(x, 3.0))))


def two_values(x: Tensor) -> Tensor:
    return 0.5 * torch.sin(x) * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))


def whole_factor(x: Tensor) -> Tensor:
    return x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))


def changed(x: Tensor) -> Tensor:
    x = x + 1.0
    gate = torch.sigmoid(x)
    x.mul_(0.5)
    return x * gate


def partly_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate


FUSED = {
    "gelu": [new, fast, bloom, exact, of_a_sum, read_inside],
    "silu": [swish],
}
STAYS = [
    *[rounded, quick, other_constant, two_values, whole_factor, changed],
    partly_without_gradient,
]


class Mlp(nn.Module):
    """A function between two products."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))  # type: ignore[no-any-return]


class Norm(nn.Module):
    """An RMS norm before a product."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight, self.into = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        over = 1 if self.form == "other dim" else -1
        square = x * x if self.form == "product" else x.pow(4 if self.form == "fourth" else 2)
        y = x * torch.rsqrt(square.mean(over, keepdim=True) + 1e-6)
        if self.form != "no weight":
            y = self.weight * y if self.form != "one more" else (1.0 + self.weight) * y
        return self.down(torch.relu(self.up(y)))  # type: ignore[no-any-return]


class Gate(Mlp):
    """A formula that looks like GELU, with a parameter in it."""

    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.slope = nn.Parameter(torch.ones(INNER))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(0.5 * x * (1.0 + torch.tanh(x * self.slope)))  # type: ignore[no-any-return]


def operators(plan: autotp.Plan) -> list[str]:
    targets = [str(node.target) for node in plan.program().graph.nodes]
    return [t.split(".")[1] for t in targets if t.startswith("aten.")]


def values(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0), dtype=dtype)


def checked(model: nn.Module) -> list[str]:
    """The operators of a parallel model that computes what the model computes."""
    model = refill(model.double())
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3, example_inputs=(values(),))
    assert_same(model, lockstep, (values(),))
    return operators(lockstep.plan)


@pytest.mark.parametrize("name", FUSED)
def test_activations_that_are_written_out_become_operators(name: str) -> None:
    for function in FUSED[name]:
        found = checked(Mlp(function))
        assert name in found and not {"tanh", "erf", "sigmoid"} & {*found}, function.__name__
        assert ("pow" in found) == (function is read_inside), function.__name__


@pytest.mark.parametrize("function", STAYS)
def test_other_formulas_stay(function: Any) -> None:
    found = checked(Mlp(function))
    assert not {"gelu", "silu"} & {*found}


def test_a_formula_with_a_parameter_in_it_stays() -> None:
    assert "tanh" in checked(Gate())


def test_constants_need_be_right_to_the_rounding_of_the_dtype() -> None:
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        plan = autotp.plan(Mlp(rounded).to(dtype), 2, example_inputs=(values(dtype),))
        assert ("gelu" in operators(plan)) == fused


@pytest.mark.parametrize("form", ["plain", "product", "one more", "no weight"])
def test_rms_norms_become_operators(form: str) -> None:
    found = checked(Norm(form))
    assert "rms_norm" in found and not {"rsqrt", "mean", "pow"} & {*found}
    assert "mul" not in found


def test_a_norm_of_the_models_own_input_becomes_an_operator() -> None:
    class First(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.down.bias
            return super().forward(x)

    assert "rms_norm" in checked(First(torch.relu))


def test_a_norm_in_float32_of_a_model_in_half_precision_keeps_its_dtypes() -> None:
    class Wide(Norm):
        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            y = self.weight * wide.to(x.dtype)
            return self.down(torch.relu(self.up(y)))  # type: ignore[no-any-return]

    model, x = refill(Wide("plain").bfloat16()), values(torch.bfloat16)
    lockstep = autotp.parallelize(model, devices=["cpu"] * 2, example_inputs=(x,))
    found, wanted = lockstep(x), model(x)
    assert {"rms_norm", "to", "mul"} <= {*operators(lockstep.plan)}
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()


@pytest.mark.parametrize("form", ["fourth", "other dim"])
def test_what_is_no_rms_norm_stays(form: str) -> None:
    assert "rms_norm" not in checked(Norm(form))


def test_under_autocast_formulas_stay_as_they_are_written() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = autotp.plan(Mlp(new), 2, example_inputs=(values(torch.float32),))
    assert "gelu" not in operators(plan)


def test_a_pass_that_saves_time_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTP_WITHOUT", "unmask,fuse")
    assert "tanh" in checked(Mlp(new))


def test_operators_have_names_of_their_own() -> None:
    from tests.models import tiny_gpt2

    graph = autotp.plan(tiny_gpt2(n_layer=3), 2).program().graph
    names = [node.name for node in graph.nodes]
    assert [name for name in names if "gelu" in name] == ["gelu", "gelu_1", "gelu_2"]
    assert len(set(names)) == len(names)
