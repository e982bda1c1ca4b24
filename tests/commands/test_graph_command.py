"""`autotp graph`: readable text, differences, DOT, SVG and GraphML."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn

import autotp
from autotp.commands import main
from autotp.graphs import dot, text
from autotp.graphs.select import part
from autotp.graphs.values import local_shape, view
from autotp.planning import Plan
from tests.models import mlp, tiny_gpt2

MLP = ["tests.models:mlp", "--input", "2,4,12", "--tp", "3"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autotp.plan(tiny_gpt2(), 8)


def test_a_module_reads_as_python_with_placements() -> None:
    made = autotp.plan(mlp(), 3, example_inputs=(torch.ones(2, 4, 12),))
    lines = text.python_text(part(view(made, "1"), "block")).splitlines()
    assert lines[0] == "# block: Residual, rank 1 of 3"
    assert "# 0.weight: S(0: ffn0) float32[3, 12]" in lines
    body = [" ".join(line.split()) for line in lines if " = " in line]
    assert [line.split("  # ")[0].split(" # ")[0] for line in body] == [
        "f_layer_norm = copy_to_region(layer_norm)",
        "linear = aten.linear(f_layer_norm, 0.weight, 0.bias)",
        "gelu = aten.gelu(linear)",
        "linear_1 = aten.linear(gelu, 2.weight)",
        "g_linear = reduce_from_region(linear_1)",
        "add_tensor = aten.add(g_linear, 2.bias)",
    ]
    assert body[0].endswith("# R float32[batch, seq, 12] f: identity; an all-reduce in backward")
    assert body[1].endswith("# S(2: ffn0) float32[batch, seq, 3] mlp column-parallel")
    assert body[3].endswith("# P float32[batch, seq, 12] mlp row-parallel")


def test_before_has_no_collective_and_after_has_both(plan: Plan) -> None:
    before, after = (text.python_text(part(view(plan, v), "transformer.h.0")) for v in VIEWS)
    assert "copy_to_region" not in before and "I float32" not in before
    assert after.count("copy_to_region") == after.count("reduce_from_region") == 2


VIEWS = ("before", "after")


def test_the_difference_of_before_and_after_is_f_and_g_and_the_biases(plan: Plan) -> None:
    one, other = (part(view(plan, v), "transformer.h.0") for v in VIEWS)
    added = [line for line in text.difference(one, other).splitlines() if line[:1] == "+"]
    assert sum("copy_to_region" in line for line in added) == 2
    assert sum("reduce_from_region" in line for line in added) == 2


def test_two_ranks_differ_in_sizes_only_and_equal_ones_not_at_all(plan: Plan) -> None:
    parts = [part(view(plan, rank), "transformer.h.1") for rank in ("0", "7", "3")]
    assert "-# attn.c_proj.weight: S(0: heads1*4) float32[8, 48]" in text.difference(*parts[:2])
    assert "+# attn.c_proj.weight: S(0: heads1*4) float32[4, 48]" in text.difference(*parts[:2])
    assert not text.difference(parts[0], parts[2])


def test_layers_differ_in_the_names_of_their_axes_only(plan: Plan) -> None:
    parts = [part(view(plan, "before"), f"transformer.h.{i}") for i in (0, 1)]
    changed = [x for x in text.difference(*parts).splitlines()[2:] if x[:1] in "+-"]
    assert all("forward(self" in x or "add" in x or "dropout" in x for x in changed), changed


def test_shapes_of_a_rank_are_those_of_its_graph(plan: Plan) -> None:
    whole = view(plan, "after").by_name()
    for rank in (0, 7):
        for value in view(plan, str(rank)).values:
            if value.dtype and value.name in whole:
                assert local_shape(whole[value.name], plan, rank) == value.shape, value.name


def test_a_value_says_what_barred_it(plan: Plan) -> None:
    values = view(plan, "after").by_name()
    norm = values["layer_norm"]
    assert norm.rule.startswith("reduction.last")
    assert any("aten.layer_norm normalizes over it" in bar for bar in norm.bars)
    bias = values["transformer_h_0_attn_c_proj_bias"]
    assert any("aten.layer_norm normalizes over it (layer_norm, modeling" in w for w in bias.whole)


def test_dot_is_valid_and_svg_is_drawn(plan: Plan) -> None:
    chosen = part(view(plan, "after"), "transformer.h.0")
    assert dot.dot_text(chosen).count('label="g"') == 2
    if shutil.which("dot") is None:
        pytest.skip("graphviz is not installed")
    assert dot.svg_text(chosen).count("<g id=") > len(chosen.values)


def test_without_graphviz_svg_is_an_error_that_says_so(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(autotp.PlanError, match="graphviz is not installed"):
        dot.svg_text(part(view(plan, "after"), "transformer.h.0"))


def test_graphml_reads_back(plan: Plan) -> None:
    chosen = part(view(plan, "after"), "transformer.h.0.mlp")
    read = nx.read_graphml(io.BytesIO(dot.graphml_text(chosen).encode()))
    assert sum(data.get("role") == "g" for _, data in read.nodes(data=True)) == 1
    assert read.has_edge("addmm_2", "view_9")


class Hostile(nn.Module):
    """Names that are markup."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module('<script>"é\\', nn.Linear(4, 6))
        self.add_module("</script>'", nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = torch.relu(module(x))
        return x


def test_names_that_are_markup_are_text_in_every_format() -> None:
    made = autotp.plan(Hostile(), 2, example_inputs=(torch.ones(2, 4),))
    chosen = part(view(made, "after"))
    assert '<script>"é\\.weight' in text.python_text(chosen)
    names = {
        name
        for _, name in nx.read_graphml(io.BytesIO(dot.graphml_text(chosen).encode())).nodes(
            data="module"
        )
    }
    assert '<script>"é\\' in names
    if shutil.which("dot"):
        done = subprocess.run(
            ["dot", "-Tsvg"], input=dot.dot_text(chosen).encode(), capture_output=True
        )
        assert done.returncode == 0, done.stderr
        assert b"<script>" not in done.stdout and b"&lt;script&gt;" in done.stdout


class Control(nn.Module):
    """A name that steers a terminal, ends a line and is no XML."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a\x1b[31m\nb\ufffe", nn.Linear(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(next(self.children())(x))


def control() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Control(), (torch.ones(2, 4),)


def test_control_characters_in_names_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    call = [f"{__file__}:control", "--tp", "2"]
    for command in ("plan", "graph", "coverage"):
        main([command, *call])
        assert "\x1b" not in capsys.readouterr().out
    assert main(["graph", *call]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("a\\x1b[31m\\nb" in line for line in lines)
    assert main(["graph", *call, "--format", "graphml"]) == 0
    nx.read_graphml(io.BytesIO(capsys.readouterr().out.encode()))


def test_the_command_writes_by_the_name_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, begins in (("x.dot", "digraph"), ("x.graphml", "<graphml"), ("x.py", "# block")):
        path = tmp_path / name
        assert main(["graph", *MLP, "--module", "block", "--output", str(path)]) == 0
        assert path.read_text().startswith(begins)
    assert main(["graph", *MLP, "--json", "--view", "after"]) == 0
    data = json.loads(capsys.readouterr().out)
    found = {value["name"]: value for value in data["values"]}
    assert found["gelu"]["local"] == [["batch", "seq", "4"]] + [["batch", "seq", "3"]] * 2


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--module", "blok"], "try      block"),
        (["--view", "3"], "a rank from 0 to 2"),
        (["--view", "x"], "there is no graph 'x'"),
        (["--diff", "norm@0", "block@9"], "there is no graph '9'"),
        (["--view", "9" * 5000], "there is no graph '9999"),
        (["--diff", "0", "1", "--format", "html"], "a difference is text"),
        (["--json", "--format", "dot"], "two formats"),
        (["--output", ""], "Is a directory"),
        (["--output", "a\0b"], "null byte"),
    ],
)
def test_a_wrong_choice_exits_with_2(
    more: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graph", *MLP, *more]) == 2
    assert what in capsys.readouterr().err
