"""`plan.explain` says why a tensor lies as it does, over which values, or what barred it."""

from __future__ import annotations

import re

import pytest
import torch

import autotp
from autotp.commands import main
from autotp.errors import PlanError
from autotp.planning import Plan
from tests import models
from tests.models import WIDTH, linear_norm_linear, tiny_gpt2

X = (torch.ones(2, 4, WIDTH),)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autotp.plan(tiny_gpt2(), 8)


def test_a_row_parallel_weight_is_explained_by_its_pair_and_the_values_between(plan: Plan) -> None:
    text = plan.explain("transformer.h.1.attn.c_proj.weight")
    assert "is split along dim 0, which is heads1*4" in text
    assert "the ranks hold 2 2 2 2 1 1 1 1, so of the 48 positions 8 8 8 8 4 4 4 4" in text
    assert "It is row-parallel" in text
    assert "transformer.h.1.attn.c_attn makes heads1 (column-parallel)" in text
    chain = text.splitlines()[-1]
    assert re.search(r"addmm_\d+ -> .* -> scaled_dot_product_attention_1 -> .* -> addmm_\d+", chain)


def test_a_column_parallel_weight_and_its_bias_say_what_they_are(plan: Plan) -> None:
    assert "It is column-parallel" in plan.explain("transformer.h.0.mlp.c_fc.weight")
    assert "It meets values that carry the axis" in plan.explain("transformer.h.0.mlp.c_fc.bias")


def test_a_tied_weight_is_explained_under_both_names(plan: Plan) -> None:
    first = plan.explain("transformer.wte.weight")
    assert plan.explain("lm_head.weight").endswith(first)
    assert "is the same tensor as transformer.wte.weight" in plan.explain("lm_head.weight")
    assert "looks up its own rows" in first and "the scores of its own words" in first


def test_a_whole_weight_names_the_operator_that_barred_it_and_the_way_there(plan: Plan) -> None:
    text = plan.explain("transformer.h.0.attn.c_proj.bias")
    assert "is whole on every rank" in text
    assert re.search(
        r"aten.layer_norm normalizes over it \(layer_norm, modeling_gpt2.py:\d+\)", text
    )
    assert re.search(r"c_proj_bias -> addmm_1 -> .* -> layer_norm\.$", text)


def test_a_pair_with_too_few_units_is_named() -> None:
    plan = autotp.plan(models.gqa_attention(), 4, example_inputs=X)
    text = plan.explain("block.k.weight")
    assert "it has 3 units, fewer than tp=4" in text
    assert "It would have been the attention pair of block.q and block.k and block.v" in text
    assert "takes its whole input in parts" in plan.explain("block.q.weight")


def test_a_norm_between_two_products_is_the_reason() -> None:
    text = autotp.plan(linear_norm_linear(), 3, example_inputs=X).explain("0.bias")
    assert "aten.layer_norm normalizes over it" in text


def test_a_plan_from_json_explains_what_it_knows(plan: Plan) -> None:
    read = Plan.from_json(plan.to_json())
    for name in ("transformer.h.0.attn.c_proj.weight", "transformer.h.0.attn.c_proj.bias"):
        assert plan.explain(name).startswith(read.explain(name))


def test_on_one_rank_nothing_is_split() -> None:
    assert "nothing is split" in autotp.plan(models.mlp(), 1, example_inputs=X).explain("norm.bias")


def test_a_buffer_and_an_unused_parameter_are_explained() -> None:
    model = models.mlp()
    model.register_buffer("table", torch.ones(3))
    model.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))
    made = autotp.plan(model, 2, example_inputs=X)
    assert "(buffer, float32[3]) is whole" in made.explain("table")
    assert "does not use it" in made.explain("table") and "does not use it" in made.explain("spare")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("transformer.h.0.attn", "transformer.h.0.attn.c_attn.weight"),
        ("c_fc.weight", "transformer.h.1.mlp.c_fc.weight"),
        ("transfomer.wte.weight", "transformer.wte.weight"),
        ("<script>", "a name from model.named_parameters()"),
    ],
)
def test_an_unknown_name_is_an_error_with_near_names(plan: Plan, name: str, near: str) -> None:
    with pytest.raises(PlanError, match=re.escape(near)):
        plan.explain(name)


def test_the_command_explains(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["plan", "tests.models:mlp", "--input", "2,4,12", "--tp", "3", "--explain"]
    assert main([*call, "block.0.weight"]) == 0
    assert "It is column-parallel" in capsys.readouterr().out
    assert main([*call, "block.0.wait"]) == 2
    assert "try      block.0.weight" in capsys.readouterr().err
