"""The plan: its text, its JSON, its fingerprint, its graphs, and the sizes that people ask for."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp import Plan, PlanError
from autotp.examples import example_call
from autotp.program import Program
from autotp.skeleton import skeleton_of
from passes.capture import capture
from passes.choose import choose
from passes.infer import Inferred, infer
from passes.insert import insert
from passes.match import match
from tests import small
from tests.models import tiny_gpt2


@functools.cache
def captured_gpt2(**config: Any) -> tuple[Program, Inferred]:
    with torch.device("meta"):
        model = tiny_gpt2(**config)
    skeleton = skeleton_of(model)
    program = capture(skeleton, *example_call(skeleton, None))
    return program, infer(program)


@functools.cache
def gpt2(tp: int, **config: Any) -> Plan:
    """What `autotp.plan` makes of a GPT-2, captured once for all tp."""
    program, inferred = captured_gpt2(**config)
    pairs = match(program, inferred)
    plan = choose(program, inferred, pairs, tp=tp, model="GPT2LMHeadModel")
    inserted, counts = insert(program, inferred, plan)
    return plan.with_stages([("captured", program), ("inserted", inserted)], counts)


@functools.cache
def transformer(tp: int, layers: int = 2) -> Plan:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    return autotp.plan(small.Transformer(layers), tp=tp, example_inputs=(tokens,))


def widths(plan: Plan, kind: str) -> list[tuple[int, ...]]:
    return [axis.widths for axis in plan.axes if axis.kind == kind]


def unnumbered(text: str) -> str:
    """A plan's text without the lines of files that other releases of a library move."""
    return re.sub(r"(\w+\.py):\d+", r"\1:N", text)


# ---- text


def test_the_text_of_a_gpt2_plan_is_the_golden_one(golden: Callable[[str, str], None]) -> None:
    golden("gpt2_plan", unnumbered(str(gpt2(4))))


def test_the_text_names_modules_widths_collectives_parameters_and_reasons() -> None:
    plan = transformer(3)
    text = str(plan)
    assert text.splitlines()[0] == "plan of Transformer for tp=3"
    assert re.search(r"heads0\.\.heads1 +5 +2 2 1 +attention +blocks\.\{0\.\.2\}\.block\.qkv", text)
    assert re.search(r"ffn0\.\.ffn1 +8 +3 3 2 +mlp", text)
    counts = plan.collectives
    assert f"{counts.forward} forward (g), {counts.backward} backward (f)" in text
    total = sum(p.numel() for p in small.Transformer().parameters())
    mine = " ".join(f"{plan.parameters(rank):,}" for rank in range(3))
    assert f"parameters per rank: {mine} of {total:,}" in text
    assert re.search(r"aten\.layer_norm normalizes over it \(layer_norm\w*, small\.py:\d+\)", text)


def test_the_text_says_when_nothing_is_split() -> None:
    plan = autotp.plan(small.NormBetween(), tp=2, example_inputs=(torch.ones(2, 5, small.WIDTH),))
    assert "  nothing is split" in str(plan).splitlines()


def test_a_plan_for_one_rank_splits_nothing() -> None:
    plan = transformer(1)
    assert plan.axes == () and plan.collectives == type(plan.collectives)()


def test_more_layers_make_no_longer_text() -> None:
    assert len(str(transformer(3)).splitlines()) == len(str(transformer(3, 4)).splitlines())


# ---- JSON and fingerprint


@pytest.mark.parametrize("make", [lambda: gpt2(4), lambda: transformer(3), lambda: transformer(1)])
def test_a_plan_is_the_same_after_json(make: Callable[[], Plan]) -> None:
    plan = make()
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert str(again) == str(plan)
    assert again.fingerprint == plan.fingerprint
    assert [again.ranges(t.name, 0) for t in again.tensors] == [
        plan.ranges(t.name, 0) for t in plan.tensors
    ]


def test_a_plan_from_json_has_no_graph_and_says_how_to_get_one() -> None:
    plan = Plan.from_json(transformer(3).to_json())
    with pytest.raises(PlanError, match=r"autotp\.plan\(model, plan=plan\)"):
        plan.graph(0)


def test_a_plan_from_json_gets_its_graphs_from_the_model() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    read = Plan.from_json(transformer(3).to_json())
    plan = autotp.plan(small.Transformer(), example_inputs=(tokens,), plan=read)
    assert plan == transformer(3)
    assert len(list(plan.graph(2).graph.nodes)) == len(list(transformer(3).graph(2).graph.nodes))


def broken() -> list[str]:
    texts = ["", "{", "{}", "[]", "null", "7", '"plan"']
    whole = json.loads(transformer(3).to_json())
    for path in ([key] for key in whole):
        texts.append(json.dumps({key: value for key, value in whole.items() if key not in path}))
    for group in ("axes", "tensors", "kept"):
        for key in whole[group][0]:
            data = copy.deepcopy(whole)
            del data[group][0][key]
            texts.append(json.dumps(data))
    for change in ({"format": 999}, {"axes": 7}, {"tensors": [7]}, {"kept": [{"reason": "so"}]}):
        texts.append(json.dumps({**whole, **change}))
    data = copy.deepcopy(whole)
    data["tensors"][0]["dims"] = [["heads0"]]
    return [*texts, json.dumps(data)]


def test_broken_text_is_no_plan() -> None:
    for text in broken():
        with pytest.raises(PlanError, match="this is not a plan"):
            Plan.from_json(text)


def test_the_fingerprint_is_the_same_every_time() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    again = autotp.plan(small.Transformer(), tp=3, example_inputs=(tokens,))
    assert again.fingerprint == transformer(3).fingerprint


def test_the_fingerprint_is_another_for_another_number_of_ranks_or_model() -> None:
    plans = [transformer(1), transformer(2), transformer(3), transformer(3, 4), gpt2(4)]
    assert len({plan.fingerprint for plan in plans}) == len(plans)


def test_the_fingerprint_does_not_depend_on_source_lines() -> None:
    data = json.loads(transformer(3).to_json())
    for kept in data["kept"]:
        kept["source"] = "elsewhere.py:1"
    moved = Plan.from_json(json.dumps(data))
    assert moved != transformer(3)
    assert moved.fingerprint == transformer(3).fingerprint


# ---- sizes that people ask for


def test_twelve_heads_over_eight_ranks() -> None:
    assert widths(gpt2(8), "attention") == [(2, 2, 2, 2, 1, 1, 1, 1)] * 2
    assert widths(gpt2(8), "mlp") == [(24,) * 8] * 2


def test_more_ranks_than_heads_keep_attention_whole_and_say_so() -> None:
    plan = gpt2(16)
    assert widths(plan, "attention") == []
    assert widths(plan, "mlp") == [(12,) * 16] * 2
    reasons = {kept.name: kept.reason for kept in plan.kept}
    for name in ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight"):
        assert reasons[f"transformer.h.1.{name}"] == "it has 12 units, fewer than tp=16"
    assert "it has 12 units, fewer than tp=16" in str(plan)


@pytest.mark.parametrize(
    ("tp", "heads"), [(2, (13, 12)), (8, (4, 3, 3, 3, 3, 3, 3, 3)), (25, (1,) * 25)]
)
def test_twenty_five_heads_are_spread_as_evenly_as_they_can_be(
    tp: int, heads: tuple[int, ...]
) -> None:
    plan = gpt2(tp, n_head=25, n_embd=1600, n_positions=1024, vocab_size=50257)
    assert widths(plan, "attention") == [heads] * 2
    for rank, count in enumerate(heads):
        assert plan.local_shape("transformer.h.0.attn.c_attn.weight", rank) == (
            1600,
            3 * 64 * count,
        )
        assert plan.local_shape("transformer.h.1.attn.c_proj.weight", rank) == (64 * count, 1600)


def test_inner_features_that_do_not_divide_are_spread() -> None:
    plan = gpt2(4, n_inner=130)
    assert widths(plan, "mlp") == [(33, 33, 32, 32)] * 2
    assert plan.local_shape("transformer.h.0.mlp.c_fc.weight", 0) == (48, 33)
    assert plan.local_shape("transformer.h.0.mlp.c_proj.weight", 3) == (32, 48)


def test_ranks_together_hold_every_row_of_a_fused_weight_once() -> None:
    plan = gpt2(8)
    name = "transformer.h.0.attn.c_attn.weight"
    held = [i for r in range(8) for a, b in plan.ranges(name, r)[1] for i in range(a, b)]
    assert sorted(held) == list(range(3 * 48))
    assert plan.ranges(name, 0)[1] == ((0, 8), (48, 56), (96, 104))
    assert plan.ranges(name, 7)[1] == ((44, 48), (92, 96), (140, 144))


def test_each_layer_has_two_all_reduces_in_forward_and_two_in_backward() -> None:
    def counts(layers: int) -> tuple[int, int]:
        found = gpt2(4, n_layer=layers).collectives
        return found.forward, found.backward

    one, three = counts(1), counts(3)
    assert (three[0] - one[0], three[1] - one[1]) == (4, 4)


def test_a_plan_needs_no_weights() -> None:
    plan = autotp.plan(tiny_gpt2(), tp=4)
    assert plan == gpt2(4)
    assert str(plan) == str(gpt2(4))


@pytest.mark.parametrize("tp", [0, -1, True, 2.0, "2", None])
def test_a_number_of_ranks_that_is_none_is_refused(tp: Any) -> None:
    with pytest.raises(PlanError, match="cannot plan for tp="):
        autotp.plan(small.Mlp(), tp=tp, example_inputs=(torch.ones(2, 5, small.WIDTH),))


def test_a_model_that_shows_no_inputs_needs_example_inputs() -> None:
    with pytest.raises(PlanError, match="Sequential needs example_inputs"):
        autotp.plan(nn.Sequential(nn.Linear(2, 2)), tp=2)


# ---- graphs


def test_a_graph_has_the_shapes_of_its_rank() -> None:
    for rank, heads in enumerate((2, 2, 1)):
        graph = transformer(3).graph(rank)
        shapes = {name: tuple(p.shape) for name, p in graph.named_parameters()}
        assert shapes["blocks.0.block.qkv.weight"] == (3 * heads * small.SIZE, small.WIDTH)
        (mixed, *_) = (n for n in graph.graph.nodes if "scaled_dot" in n.name)
        assert mixed.meta["val"].shape[1] == heads


def test_a_readable_graph_shows_placements_f_and_g() -> None:
    text = transformer(3).graph(1).print_readable(print_output=False)
    assert "copy_to_region" in text and "reduce_from_region" in text
    assert "placement: S(1: heads0)" in text or "placement=S(1: heads0)" in text, text[:3000]
    assert re.search(r"placement.{1,3}P\b", text) and re.search(r"placement.{1,3}R\b", text)


def test_graphs_of_all_ranks_have_the_same_operators() -> None:
    ops = [[(n.op, n.name) for n in transformer(3).graph(rank).graph.nodes] for rank in range(3)]
    assert ops[0] == ops[1] == ops[2]


def test_a_dump_has_the_plan_and_the_graph_of_each_stage_and_rank(tmp_path: Path) -> None:
    plan = transformer(2)
    plan.dump(tmp_path / "new" / "folder")
    files = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    stages = {f"{i}_{name}.py" for i, (name, _) in enumerate(plan.stages)}
    assert {"plan.txt", "plan.json", "rank0.py", "rank1.py"} | stages <= set(files)
    assert files["plan.txt"] == f"{plan}\n"
    assert Plan.from_json(files["plan.json"]) == plan
    assert "copy_to_region" not in files["0_captured.py"]
    assert "copy_to_region" in files["rank1.py"]
    assert "S(1: heads0)" in files["rank0.py"]
    assert files["rank0.py"] != files["rank1.py"]
