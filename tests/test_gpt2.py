"""GPT-2 from two sources, over ranks that divide its heads and ranks that do not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autotp
from tests.models import tiny_gpt2
from tests.oneprocess import assert_same, parallels, refill

RANKS = (2, 3, 5, 8, 12)


def nanogpt() -> Any:
    """The module `examples/nanogpt.py`."""
    path = Path(__file__).parent.parent / "examples" / "nanogpt.py"
    spec = importlib.util.spec_from_file_location("nanogpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = module
    spec.loader.exec_module(module)
    return module


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(257, shape, generator=torch.Generator().manual_seed(seed))


def test_gpt2_is_exact_in_float64() -> None:
    model = refill(tiny_gpt2()).double()
    example = {"input_ids": tokens(3, 5), "use_cache": False}
    for lockstep in parallels(model, RANKS, example):
        call = {"input_ids": tokens(2, 9, seed=1), "use_cache": False}
        assert_same(model, lockstep, call, tol=1e-12)


def test_gpt2_with_its_own_loss_is_exact() -> None:
    model = refill(tiny_gpt2())
    labels = tokens(3, 5)
    labels[0, :2] = -100
    example = {"input_ids": tokens(3, 5), "labels": labels, "use_cache": False}
    for lockstep in parallels(model, RANKS, example):
        assert_same(model, lockstep, example, tol=1e-5)
        counts = lockstep.plan.collectives
        assert (counts.forward, counts.backward, counts.loss) == (2 * 2 + 1, 2 * 2 + 1, 2)


def test_a_gpt2_in_plain_pytorch_is_exact_in_float64() -> None:
    module = nanogpt()
    model = refill(module.GPT(module.GPTConfig(heads=12))).double()
    example = (tokens(3, 5), tokens(3, 5, seed=1))
    for lockstep in parallels(model, RANKS, example):
        assert_same(model, lockstep, (tokens(2, 9), tokens(2, 9, seed=2)), tol=1e-12)


def test_verify_names_the_first_value_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotp import rules

    # a rule that lies: layer_norm over a split dim
    monkeypatch.setitem(rules.RULES, "aten.softmax", lambda ctx, node: ctx.dims(node.args[0]))

    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(6, 9), torch.nn.Linear(9, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.softmax(torch.tanh(self.up(x)), -1) * 2)

    monkeypatch.setattr("autotp.pipeline.check", lambda *args, **kwargs: None)
    report = autotp.verify(Gate(), 3, example_inputs=(torch.randn(4, 6),))
    assert not report.ok and report.first_wrong is not None
    assert report.first_wrong.startswith("softmax")
    with pytest.raises(autotp.CheckError, match="first wrong value: softmax"):
        report.raise_if_failed()


def test_the_checker_refuses_what_a_lying_rule_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotp import rules

    monkeypatch.setitem(rules.RULES, "aten.softmax", lambda ctx, node: ctx.dims(node.args[0]))
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Softmax(-1), torch.nn.Linear(9, 6))
    with pytest.raises(autotp.CheckError):
        autotp.plan(model, 3, example_inputs=(torch.randn(4, 6),)).graph(0)
