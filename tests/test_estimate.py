"""autotp estimate: memory against the formulas of Korthikanti et al. 2022, messages, exit codes."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import record_function
from transformers import GPT2Config, GPT2LMHeadModel

import autotp
from autotp.commands import main
from autotp.estimating.dryrun import Step, dry_run
from autotp.estimating.estimate import layers_of
from autotp.estimating.machines import MACHINES
from benchmarks.allocations import allocated

BATCH, SEQ, HIDDEN = 4, 128, 192


@cache
def step(layers: int, tp: int, again: bool = False, sliced: bool = False) -> Step:
    with torch.device("meta"):
        sizes = {"n_embd": HIDDEN, "n_head": 4, "n_positions": SEQ, "vocab_size": 500}
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, **sizes)).to(torch.bfloat16)
        ids = torch.ones(BATCH, SEQ, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    made = autotp.plan(model, tp, example_inputs=call, sequence_parallel=sliced)
    recompute = [f"transformer.h.{i}" for i in range(layers)] if again else []
    return dry_run(model, made, ((), call), recompute=recompute)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_keeps_what_the_formula_says(tp: int) -> None:
    """sbh (10 + 24/t), of which the 10 are whole; the scores (5as^2 b/t) are in one kernel."""
    more = step(2, tp).kept - step(1, tp).kept
    whole = step(2, tp).kept_whole - step(1, tp).kept_whole
    unit = BATCH * SEQ * HIDDEN
    assert more == pytest.approx(unit * (10 + 24 / tp), rel=0.06)
    if tp > 1:
        assert whole == pytest.approx(unit * 10, rel=0.06)


def test_a_checkpointed_layer_keeps_its_input() -> None:
    assert step(2, 2, True).kept - step(1, 2, True).kept == BATCH * SEQ * HIDDEN * 2
    forward = {kind for phase, kind, _ in step(2, 2, True).collectives if phase == "backward"}
    assert forward == {"all-reduce"}
    count = [sum(step(2, 2, again).collectives.values()) for again in (False, True)]
    assert count[1] > count[0]  # messages of the forward are sent again


def test_messages_are_those_of_the_plan() -> None:
    found = step(2, 4).collectives
    size = BATCH * SEQ * HIDDEN * 2
    assert found["forward", "all-reduce", size] == 5  # two a layer, one of the embedding
    assert found["backward", "all-reduce", size] == 5
    assert found["forward", "all-reduce", BATCH * SEQ * 4] == 1  # maxima of the loss


@pytest.mark.parametrize("tp", [2, 4])
def test_with_slices_of_the_sequence_a_layer_keeps_what_the_formula_says(tp: int) -> None:
    """34 sbh / t, but the two gathered inputs of products are kept whole: 4 sbh of the 34."""
    more = step(2, tp, sliced=True).kept - step(1, tp, sliced=True).kept
    assert more == pytest.approx(BATCH * SEQ * HIDDEN * (4 + 30 / tp), rel=0.06)


def test_messages_of_slices_are_the_halves_of_the_all_reduces() -> None:
    plain, sliced = step(2, 4).collectives, step(2, 4, sliced=True).collectives
    size = BATCH * SEQ * HIDDEN * 2
    assert plain["forward", "all-reduce", size] == sliced["forward", "reduce-scatter", size] == 5
    assert sliced["forward", "all-gather", size] == 5
    assert sliced["forward", "all-reduce", size] == 0
    machine = MACHINES["v100"]
    ring, name = machine.all_reduce(8e9, 4)
    assert name == "ring" and 2 * machine.half_ring(8e9, 4)[0] == pytest.approx(ring)


def test_layers_that_are_checkpointed_in_slices_keep_slices() -> None:
    found = step(2, 4, True, True).kept - step(1, 4, True, True).kept
    assert found == BATCH * SEQ * HIDDEN * 2 / 4


@pytest.mark.parametrize("again", [False, True])
def test_a_step_holds_what_the_profiler_saw(again: bool) -> None:
    """One process, float32, no dropout: allocations noted by torch's profiler. Several processes
    are measured by benchmarks/estimate.py."""
    sizes = {"n_embd": HIDDEN, "n_head": 4, "n_positions": SEQ, "vocab_size": 500, "n_layer": 3}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = torch.ones(BATCH, SEQ, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **off)).train()
    blank = copy.deepcopy(model).to("meta")
    blank.tie_weights()
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tp: Any = autotp.parallelize(model, tp=1, example_inputs=call)

    def train() -> None:
        loss = tp(**call).loss
        with record_function("forward is done"):
            pass
        loss.backward()

    train()
    held = allocated(train)

    given = {name: x.to("meta") if name != "use_cache" else x for name, x in call.items()}
    plan = autotp.plan(blank, 1, example_inputs=given)
    found = dry_run(blank, plan, ((), given), recompute=layers_of(blank) if again else ())
    assert found.kept + found.logits == pytest.approx(held["forward is done"], rel=0.01)
    assert found.peak == pytest.approx(held["peak"], rel=0.01)


def test_ring_and_tree() -> None:
    machine = MACHINES["h100"]
    rate = machine.link_bandwidth * machine.link_share
    took, name = machine.all_reduce(8e9, 8)
    assert name == "ring" and took == pytest.approx(2 * 7 / 8 * 8e9 / rate, rel=0.01)
    assert machine.all_reduce(8.0, 8) == (pytest.approx(6 * machine.latency, rel=0.01), "tree")
    assert machine.all_reduce(8e9, 1)[0] == 0


def test_the_command_fits_and_its_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 512, "n_head": 8, "vocab_size": 512}
    path.write_text(json.dumps(small))
    call = ["estimate", str(path), "--seq", "8", "--batch", "1", "--json"]
    memory = ["--memory", "1.04"]  # GiB, of which 1 is reserved
    assert main([*call, "--fit", *memory]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tp"] == 2 and [one["tp"] for one in found["tried"]] == [1, 2]
    assert found["assumptions"] and found["chosen"] == "plain"
    assert main([*call, "--tp", "2", "--sequence-parallel", *memory]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] == "sequence parallel" and "reduce-scatter" in {
        row[1] for row in found["messages"]
    }
    assert main([*call, "--tp", "1", *memory]) == 1
    assert not json.loads(capsys.readouterr().out)["fits"]
    assert main(["estimate", str(path)]) == 2
    assert "--tp or --fit is needed" in capsys.readouterr().err


def layers(count: int, experts: int = 0) -> nn.Module:
    def layer() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(experts))})

    return nn.ModuleDict({"h": nn.ModuleList(layer() for _ in range(count))})


def test_layers_are_the_items_of_outermost_lists() -> None:
    assert layers_of(layers(2)) == layers_of(layers(2, experts=3)) == ["h.0", "h.1"]
    assert layers_of(layers(1)) == layers_of(layers(1, experts=3)) == ["h.0"]
    assert layers_of(nn.Sequential(nn.Linear(2, 2))) == layers_of(layers(0)) == []
    beside = nn.ModuleDict({"one": layers(1), "two": layers(2)})
    assert layers_of(beside) == ["two.h.0", "two.h.1"]


def test_a_model_of_one_layer_is_checkpointed(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["gpt2", "--set", "n_layer=1", "--tp", "2", "--batch", "1", "--seq", "8", "--json"]
    assert main(["estimate", *call, "--checkpointing"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == "checkpointed"
