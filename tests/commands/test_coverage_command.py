"""`autotp coverage`: shares of several models, and what is not captured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor, nn

from autotp.commands import main

pytest.importorskip("transformers")
HERE = Path(__file__)
FEW = ["--set", "num_hidden_layers=1"]


class Branch(nn.Module):
    """What no graph can hold: a choice by values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def branch(num_hidden_layers: int = 1) -> tuple[nn.Module, tuple[Tensor]]:
    import torch

    return Branch(), (torch.ones(2, 4),)


def test_types_by_their_own_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "gpt2", "llama", "--tp", "4", "--json", *FEW]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["class"] for row in rows] == ["GPT2LMHeadModel", "LlamaForCausalLM"]
    for row in rows:
        assert row["captured"] and row["work_split"] == 1.0 and row["why"] == []
        assert row["parameters_split"] > 0.98


def test_sequence_parallelism_is_planned_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from autotp import api

    seen, make = [], api.plan
    monkeypatch.setattr(api, "plan", lambda *a, **k: seen.append(make(*a, **k)) or seen[-1])
    assert main(["coverage", "gpt2", "--sequence-parallel", *FEW]) == 0
    assert seen[0].collectives.reduce_scatters == 3


def test_a_model_that_is_not_captured_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", f"{HERE}:branch", "llama", *FEW]) == 1
    head, first, *why, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "work", "split", "parameters", "split"]
    assert "not captured" in first and f"{HERE.name}:26" in "".join(why)
    assert last.startswith("llama") and "100.0%" in last


def test_an_unknown_model_is_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "no_such.json"]) == 2
    assert "no_such.json" in capsys.readouterr().err
