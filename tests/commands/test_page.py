"""The HTML page in headless Chromium: it opens, a block unfolds, panels say what is true."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.commands import main
from autotp.graphs.page import page
from autotp.planning import Plan
from tests.commands.test_graph_command import Hostile
from tests.models import tiny_gpt2

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
    *("--virtual-time-budget=4000", "--window-size=1400,900", "--enable-logging=stderr"),
    "--dump-dom",
]
browser = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")
HELPERS = """
const text = (selector) => document.querySelector(selector).textContent;
const click = (element) => element.dispatchEvent(new MouseEvent("click", { bubbles: true }));
const names = () => [...document.querySelectorAll(".node[data-name]")].map((e) => e.dataset.name);
const node = (name) => document.querySelector('.node[data-name="' + name + '"]');
const all = (selector) => [...document.querySelectorAll(selector)].map((e) => e.textContent);
const row = (path) => document.querySelector('#tree [data-path="' + path + '"]');
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autotp.plan(tiny_gpt2(n_layer=5), 8)


def in_browser(text: str, script: str, folder: Path, address: str = "") -> Any:
    """What the script puts into `result` after the page has opened; no error on the console."""
    found = "\nconst out = document.createElement('pre'); out.id = 'result';"
    found += "out.textContent = JSON.stringify(result); document.body.append(out);"
    script = f"<script>{HELPERS}const result = {{}};\n{script}{found}</script></body>"
    path = folder / "page.html"
    path.write_text(text.replace("</body>", script), encoding="utf-8")
    call = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'user'}", f"file://{path}{address}"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    match = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@browser
def test_it_opens_a_block_unfolds_and_a_value_tells_of_itself(plan: Plan, tmp_path: Path) -> None:
    result = in_browser(
        page(plan),
        """
        result.title = text("#model");
        result.folded = all(".node.fold .first");
        result.before = names().length;
        click(document.querySelector('.node[data-id^="run:"]'));   // the layers: opens the first
        result.path = text("#path");
        result.after = names();
        click(row("transformer.h.3"));
        result.panel = text("#panel");
        click(node("scaled_dot_product_attention_3"));
        result.attention = text("#panel");
        document.getElementById("rank").value = 7;
        document.getElementById("rank").dispatchEvent(new Event("input"));
        result.here = text(".ranks tr.here");
        click(node("transformer.h.3.attn.c_proj.bias"));
        result.bias = text("#panel");
        click(node("g_addmm_13"));
        result.g = text("#panel");
        """,
        tmp_path,
    )
    assert result["title"] == "GPT2LMHeadModel  tp=8"
    assert any("0 \u2026 4  (5 alike)" in text for text in result["folded"])
    assert result["path"].endswith("h \u203a 0")
    assert "transformer.h.0.attn.c_attn.weight" in result["after"]
    assert len(result["after"]) > 20
    assert "all-reduces forward (g): 2" in result["panel"]
    assert "g_addmm_13 after transformer.h.3.attn.c_proj (attention)" in result["panel"]
    assert "f_layer_norm_7 before transformer.h.3.mlp.c_fc" in result["panel"]
    assert "[batch, heads3, seq, 4]" in result["attention"]
    assert (
        "modeling_gpt2.py:" in result["attention"] and "reduction.attention" in result["attention"]
    )
    assert result["here"] == "7[batch, 1, seq, 4]1  (number 11)"
    assert "their axis is whole because aten.layer_norm normalizes over it" in result["panel"]
    assert "aten.layer_norm normalizes over it (layer_norm, modeling_gpt2.py:" in result["bias"]
    assert "Its dim and that operator's are one axis." in result["bias"]
    assert "an all-reduce adds the ranks' summands" in result["g"]


@browser
def test_a_search_finds_weights_and_an_address_names_what_is_seen(
    plan: Plan, tmp_path: Path
) -> None:
    result = in_browser(
        page(plan),
        """
        result.start = text("#panel h2") + "; " + text("#rank-text");
        const input = document.getElementById("search");
        input.value = "h.4 c_fc weight";
        input.dispatchEvent(new Event("input"));
        result.found = all("#found li");
        click(document.querySelector("#found li"));
        result.panel = text("#panel");
        result.address = location.hash;
        result.chosen = document.querySelector(".node.chosen").dataset.name;
        document.getElementById("views").checked = true;
        document.getElementById("views").dispatchEvent(new Event("change"));
        result.views = names().filter((name) => name.startsWith("view")).length;
        """,
        tmp_path,
        "#module=transformer.h.2.mlp&rank=5",
    )
    assert result["start"].startswith("transformer.h.2.mlp; 5 (of 0 to 7)")
    assert result["found"] == ["transformer.h.4.mlp.c_fc.weight parameter, S(1: ffn4)"]
    assert result["chosen"] == "transformer.h.4.mlp.c_fc.weight"
    assert "It is column-parallel" in result["panel"]
    assert "value=transformer_h_4_mlp_c_fc_weight" in result["address"]
    assert result["views"] > 3


@browser
def test_heads_are_counted_where_key_heads_are_shared(tmp_path: Path) -> None:
    config = LlamaConfig(
        **{"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2},
    )
    model = LlamaForCausalLM(config)
    held = {}
    for tp in (2, 3):
        script = f"""
        focusOn("model.layers.0");
        setRank({tp - 1});
        result.bar = text("#rank-text");
        result.panel = text("#panel");
        result.legend = text("#legend");
        choose(VALUES.find((value) => value.name === "scaled_dot_product_attention").index, true);
        result.value = text("#panel");
        focusOn("");
        result.whole = text("#panel");
        """
        (tmp_path / str(tp)).mkdir()
        held[tp] = in_browser(page(autotp.plan(model, tp)), script, tmp_path / str(tp))
    assert held[2]["bar"].endswith("4 of 8 heads")  # a key head and the four heads that it serves
    assert "1 of 2 groups of 4 heads" in held[2]["panel"]
    assert held[3]["bar"].endswith("2 of 8 heads")  # one of the four heads of each key head
    assert "1 of 4 groups of 2 heads" in held[3]["panel"]
    assert "groups of 2 heads of heads0" in held[3]["value"]
    assert "their axis is whole because it has 2 units, fewer than tp=3" in held[3]["whole"]
    assert "inputs in parts" in held[3]["legend"] and "parts pair" not in held[3]["legend"]


@browser
def test_heads_are_not_claimed_where_no_softmax_shows_them(plan: Plan, tmp_path: Path) -> None:
    script = """
    HEADS.clear();
    setRank(1);
    result.bar = text("#rank-text");
    result.panel = text("#panel");
    """
    result = in_browser(page(plan), script, tmp_path)
    assert "heads" not in result["bar"]
    assert "2 of 12 units" in result["panel"]


@browser
def test_a_chosen_value_stays_in_sight_when_the_window_changes(plan: Plan, tmp_path: Path) -> None:
    result = in_browser(
        page(plan),
        """
        focusOn("transformer.h.3");
        choose(VALUES.find((value) => value.name === "g_addmm_15").index, true);
        window.dispatchEvent(new Event("resize"));
        const box = node("g_addmm_15").getBoundingClientRect();
        const seen = document.getElementById("canvas").getBoundingClientRect();
        result.inside = box.top >= seen.top && box.bottom <= seen.bottom;
        fit(true); // the layer is taller than the window: without the choice it is out of sight
        result.far = node("g_addmm_15").getBoundingClientRect().top > seen.bottom;
        """,
        tmp_path,
    )
    assert result == {"inside": True, "far": True}


@browser
def test_slices_of_the_sequence_are_shown(tmp_path: Path) -> None:
    made = autotp.plan(tiny_gpt2(n_layer=5), 8, sequence_parallel=True)
    result = in_browser(
        page(made),
        """
        click(row("transformer.h.3"));
        result.module = text("#panel");
        result.letters = all(".node.early .letter");
        result.edges = all(".edge-place");
        setRank(7);
        click(node("layer_norm_6"));
        result.panel = text("#panel");
        result.sizes = localShape({ placement: "S", slice: 1, shape: ["2", "11"] }, 7);
        result.all = RANKS.map((rank) => Number(shareOf("11", rank)));
        """,
        tmp_path,
    )
    assert "reduce-scatters forward: 2" in result["module"]
    assert "after transformer.h.3.attn.c_proj (attention)" in result["module"]
    assert "all-gathers forward, of slices: 2f_layer_norm_6 before" in result["module"]
    assert "ln_1.weight: its gradient" in result["module"]
    assert sorted(result["letters"]) == ["AG", "AG", "RS", "RS"]
    assert "S(1: sequence)" in result["edges"]
    assert "[batch, seq/8, 48]: rank 7 holds items seq*7/8 to seq*8/8" in result["panel"]
    assert result["sizes"] == ["2", "2"]
    assert sum(result["all"]) == 11


@browser
def test_the_page_knows_the_sizes_of_every_rank(plan: Plan, tmp_path: Path) -> None:
    from autotp.graphs.values import local_shape, view

    script = (
        "for (const value of VALUES) result[value.name] = RANKS.map((r) => localShape(value, r));"
    )
    found = in_browser(page(plan), script, tmp_path)
    for value in view(plan, "after").values:
        if value.dtype:
            want = [list(local_shape(value, plan, rank)) for rank in range(8)]
            assert found[value.name] == want, value.name


@browser
def test_markup_in_names_is_shown_as_text(tmp_path: Path) -> None:
    made = autotp.plan(Hostile(), 2, example_inputs=(torch.ones(2, 4),))
    name = '<script>"\u00e9\\'
    result = in_browser(
        page(made),
        """
        result.tree = text("#tree");
        result.scripts = document.scripts.length;
        choose(VALUES.find((value) => value.operator.endsWith("weight")).index, true);
        result.panel = text("#panel");
        """,
        tmp_path,
    )
    assert name in result["tree"] and "</script>'" in result["tree"]
    assert f"{name}.weight (parameter" in result["panel"]
    assert result["scripts"] == 8  # data, six files, and this test's own


@browser
@pytest.mark.slow
def test_72_layers_stay_fluid(tmp_path: Path) -> None:
    made = autotp.plan(tiny_gpt2(n_layer=72), 8)
    result = in_browser(
        page(made),
        """
        const took = (act) => { const t = performance.now(); act(); return performance.now() - t; };
        result.layer = took(() => focusOn("transformer.h.70"));
        result.whole = took(() => focusOn(""));
        result.rank = took(() => setRank(5));
        result.folded = all(".node.fold .first");
        """,
        tmp_path,
    )
    assert any("(72 alike)" in text for text in result["folded"]), result
    assert max(result["layer"], result["whole"], result["rank"]) < 2000, (
        result
    )  # ms, a busy machine


def test_nothing_is_fetched_and_the_license_is_there(plan: Plan) -> None:
    text = page(plan)
    assert "default-src 'none'" in text
    assert not re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=[\"'](?!data:)", text)
    assert "Copyright (c) 2012-2014 Chris Pettitt" in text and "sourceMappingURL" not in text


def test_data_cannot_end_its_element() -> None:
    made = autotp.plan(Hostile(), 2, example_inputs=(torch.ones(2, 4),))
    text = page(made)
    data = text.split('type="application/json">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data)["model"] == "Hostile"


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    call = ["graph", "tests.models:mlp", "--input", "2,4,12", "--tp", "3"]
    assert main([*call, "--output", str(path)]) == 0
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
