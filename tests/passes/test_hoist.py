"""One f above the norms of parallel branches: gradients are the model's, and others stay below."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.runtime.collectives import copy_all_to_region, copy_to_region
from tests.models import Function, refill
from tests.oneprocess import assert_same

WIDTH, INNER = 12, 10


def branches(forward: Any) -> nn.Module:
    """Two MLPs of norms of one value, and a norm before that bars the width."""
    parts: dict[str, nn.Module] = {name: nn.Linear(WIDTH, INNER) for name in ("up1", "up2")}
    parts |= {name: nn.Linear(INNER, WIDTH) for name in ("down1", "down2")}
    parts |= {name: nn.LayerNorm(WIDTH) for name in ("norm", "norm1", "norm2")}
    parts |= {"scale": nn.RMSNorm(WIDTH, eps=1e-6), "gate": nn.Linear(WIDTH, 1)}
    parts["plain"] = nn.LayerNorm(WIDTH, elementwise_affine=False)
    whole = Function(lambda m, x: m.norm(x + forward(m, m.norm(x))), **parts)
    return refill(whole.double())


def first(m: Any, x: Tensor) -> Tensor:
    return m.down1(torch.tanh(m.up1(x)))  # type: ignore[no-any-return]


def second(m: Any, x: Tensor) -> Tensor:
    return m.down2(torch.tanh(m.up2(x)))  # type: ignore[no-any-return]


def read_whole(m: Any, x: Tensor) -> Tensor:
    a = m.norm1(x)
    return first(m, a) + second(m, m.norm2(x)) + a


def written(m: Any, x: Tensor) -> Tensor:
    mine = x.clone()
    y = first(m, mine.neg())
    mine.mul_(2.0)
    return y + second(m, mine * 3.0)


def seen_elsewhere(m: Any, x: Tensor) -> Tensor:
    mine = x.clone()
    view = mine.view(2, -1, WIDTH)
    y = first(m, view.neg())
    mine.mul_(2.0)
    return y + second(m, view * 3.0)


def twice(m: Any, x: Tensor) -> Tensor:
    """A norm of two layers: its parameters are read before the f of the second one."""
    y = x + first(m, m.norm1(x)) + second(m, m.norm2(x))
    return y + first(m, m.norm1(y)) + second(m, m.norm2(y))


def random(m: Any, x: Tensor) -> Tensor:
    dropped = nn.functional.dropout(x, 0.5, training=m.training)
    return first(m, m.norm1(x)) + second(m, dropped)


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = first(m, m.norm1(x))
    return gate * x + second(m, m.norm2(x))


def without_gradient_below(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = first(m, x)
    return gate + second(m, x)


def through_a_list(m: Any, x: Tensor) -> Tensor:
    mine = x.neg()
    y = first(m, mine.neg())
    torch._foreach_mul_([mine], 2.0)
    return y + second(m, mine + 1.0)


# How often activations and parameters of norms are reduced in the backward.
CASES: dict[str, tuple[Any, int, int]] = {
    "two norms": (lambda m, x: first(m, m.norm1(x)) + second(m, m.norm2(x)), 1, 1),
    "a norm and the value": (lambda m, x: first(m, m.norm1(x)) + second(m, x), 1, 1),
    "the value and a norm": (lambda m, x: first(m, x) + second(m, m.norm1(x)), 1, 1),
    "two kinds": (lambda m, x: first(m, m.scale(x)) + second(m, m.norm2(x)), 1, 1),
    "no parameters": (lambda m, x: first(m, m.plain(x)) + second(m, x), 1, 0),
    "functions": (lambda m, x: first(m, x.sin()) + second(m, x.cos()), 1, 0),
    "in two layers": (twice, 2, 2),
    "one norm": (lambda m, x: first(m, m.norm1(x)) + second(m, m.norm1(x)), 1, 1),
    "two values": (lambda m, x: first(m, m.gate(x) * x) + second(m, m.norm2(x)), 2, 0),
    "read whole": (read_whole, 2, 0),
    "another shape": (lambda m, x: first(m, x[:, :1]) + second(m, m.norm2(x)), 2, 0),
    "written between": (written, 2, 0),
    "written between in a view": (seen_elsewhere, 2, 0),
    "written in a list": (through_a_list, 2, 0),
    "without gradient": (without_gradient, 1, 0),
    "without gradient, no norm": (without_gradient_below, 1, 0),
    "behind each other": (lambda m, x: second(m, m.norm2(x + first(m, m.norm1(x)))), 2, 0),
    "draws": (random, 2, 0),
}


def values() -> Tensor:
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def f_in(plan: autotp.Plan) -> tuple[int, int]:
    nodes = plan.program().graph.nodes
    return tuple(sum(n.target is f for n in nodes) for f in (copy_to_region, copy_all_to_region))  # type: ignore[return-value]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tp", [2, 3])
def test_branches_share_f_where_that_is_the_same(name: str, tp: int) -> None:
    forward, large, small = CASES[name]
    model, x = branches(forward), values()
    if name == "draws":  # what is drawn is compared elsewhere
        counts = autotp.plan(model, tp, example_inputs=(x,)).collectives
        assert (counts.backward, counts.parameters) == (large, small)
        return
    lockstep = autotp.parallelize(model, devices=["cpu"] * tp, example_inputs=(x,))
    counts = lockstep.plan.collectives
    silent = name == "without gradient, no norm"  # an f whose readers get none
    assert (counts.backward, counts.parameters) == (large, small)
    assert f_in(lockstep.plan) == (large + silent, small)
    assert_same(model, lockstep, (x.requires_grad_(),))


@pytest.mark.parametrize("frozen", [["norm1.weight"], ["norm1", "norm2"]])
def test_frozen_parameters_are_not_reduced(frozen: list[str]) -> None:
    model = branches(CASES["two norms"][0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(part) for part in frozen))
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3, example_inputs=(values(),))
    assert lockstep.plan.collectives.parameters == (len(frozen) == 1)
    assert_same(model, lockstep, (values(),))


def test_parameters_of_each_dtype_are_reduced_together() -> None:
    model = branches(lambda m, x: first(m, m.norm1(x)) + second(m, x * m.single))
    model.single = nn.Parameter(torch.linspace(0.5, 2.0, WIDTH))  # the others are float64
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3, example_inputs=(values(),))
    counts = lockstep.plan.collectives
    assert f_in(lockstep.plan) == (1, 2) and (counts.backward, counts.parameters) == (1, 2)
    assert_same(model, lockstep, (values(),), 1e-6)


def test_large_parameters_and_other_dtypes_stay_above_f() -> None:
    model = branches(lambda m, x: first(m, x * m.table) + second(m, m.norm2(x)))
    model.table = nn.Parameter(torch.linspace(0.5, 2.0, 5 * WIDTH).double().view(5, WIDTH))
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3, example_inputs=(values(),))
    assert f_in(lockstep.plan) == (2, 0)
    assert_same(model, lockstep, (values(),))

    model = branches(lambda m, x: first(m, x.float()).double() + second(m, x))
    model.up1.float(), model.down1.float()
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3, example_inputs=(values(),))
    assert f_in(lockstep.plan) == (2, 0)
    assert_same(model, lockstep, (values(),), 1e-6)


def test_sequence_parallelism_keeps_the_norms_on_slices() -> None:
    model = branches(CASES["two norms"][0])
    plan = autotp.plan(model, 2, example_inputs=(values(),), sequence_parallel=True)
    assert plan.collectives.reduce_scatters == 1
    assert f_in(plan)[1] == plan.collectives.parameters == 0


def test_models_with_a_norm_for_each_branch_reduce_once_a_layer() -> None:
    from transformers import FalconConfig, FalconForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

    neox = GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=64,
    )
    falcon = FalconConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_kv_heads=4,
        new_decoder_architecture=True,
        vocab_size=64,
    )
    words = torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(0))
    step = {"input_ids": words, "labels": words, "use_cache": False}
    for model in (GPTNeoXForCausalLM(neox), FalconForCausalLM(falcon)):
        lockstep = autotp.parallelize(refill(model), devices=["cpu"] * 3, example_inputs=step)
        counts = lockstep.plan.collectives
        assert (counts.forward, counts.backward, counts.parameters) == (4, 4, 3)
        assert_same(model, lockstep, step, 1e-5)


class Branch(nn.Module):
    """A branch that does something before its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(()))
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor, norm: Any = None) -> Tensor:
        factor = self.scale.exp()
        norm = self.norm if norm is None else norm
        return factor * self.down(torch.tanh(self.up(norm(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("deep", "large"), [(True, 2), (False, 1)])
def test_calls_of_modules_stay_whole(deep: bool, large: int) -> None:
    """f is not put into the middle of a module's call, nor are its parameters read from afar, which
    may be gathered there only."""
    parts = {"a": Branch(), "b": Branch()}
    if not deep:
        parts["a"].norm = parts["b"].norm = nn.Identity()  # type: ignore[assignment]
    plain = nn.LayerNorm(WIDTH, elementwise_affine=False)
    how = {} if deep else {"norm": plain}
    parts["before"] = nn.LayerNorm(WIDTH)

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.before(x)
        return x + m.a(x, **how) + m.b(x, **how)  # type: ignore[no-any-return]

    model = Function(forward, **parts)
    lockstep = autotp.parallelize(
        refill(model.double()), devices=["cpu"] * 3, example_inputs=(values(),)
    )
    assert lockstep.plan.collectives.backward == large
    for name in ("a", "b"):
        at = lockstep.ranks[0].get_submodule(name)
        assert len(at._tp_codes) == 1, "a module's call has code of its own"  # type: ignore[arg-type]
    assert_same(model, lockstep, (values(),))


def test_an_f_in_a_region_without_gradients_serves_no_reader_behind_it() -> None:
    """The proof refuses a graph that hoist would make if it looked at no regions."""
    from autotp.errors import CheckError
    from passes.check import check
    from passes.localize import localize

    model = branches(without_gradient_below)
    plan = autotp.plan(model, 2, example_inputs=(values(),))
    program = localize(plan.program(), plan, rank=0)
    check(program, plan, rank=0)
    inner, outer = [n for n in program.graph.nodes if n.target is copy_to_region]
    outer.replace_all_uses_with(inner)
    program.graph.erase_node(outer)
    with pytest.raises(CheckError, match="the gradient is lost"):
        check(program, plan, rank=0)
