"""`autotp plan` and `autotp verify`: models, JSON, exit codes, and errors that say where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.commands import main
from autotp.commands.files import LARGEST
from tests.models import Function, mlp

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 48, "n_head": 12, "vocab_size": 257}
SMALL |= {"n_positions": 64, "bos_token_id": 256, "eos_token_id": 256}
MLP = [f"{ROOT}/tests/models.py:mlp", "--input", "2,4,12"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def test_a_configuration_becomes_a_plan_without_weights(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config", config, "--tp", "8"]) == 0
    text = capsys.readouterr().out
    assert "plan of GPT2LMHeadModel for tp=8" in text
    assert "heads0..heads1  12     2 2 2 2 1 1 1 1" in text


def test_a_directory_and_its_configuration_give_the_same_plan(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(Path(config).parent), "--tp", "3", "--json"]) == 0
    of_directory = json.loads(capsys.readouterr().out)
    assert main(["plan", config, "--tp", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == of_directory


def test_plan_graph_and_verify_take_sequence_parallelism(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = [config, "--tp", "2", "--set", "n_layer=1", "--sequence-parallel"]
    assert main(["plan", *call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["collectives"]["reduce_scatters"] > 0
    assert main(["graph", *call, "--module", "transformer.h.0"]) == 0
    assert "reduce_scatter_to_sequence" in capsys.readouterr().out
    assert main(["verify", *call]) == 0


def test_values_of_a_configuration_can_be_changed(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, "--tp", "2", "--set", "n_layer=1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [axis["name"] for axis in data["axes"]] == ["vocab0", "heads0", "ffn0"]
    assert main(["plan", config, "--tp", "2", "--set", "n_lyer=1"]) == 2
    assert "GPT2Config has no n_lyer" in capsys.readouterr().err


def test_a_function_gives_the_model_and_arguments_show_a_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *MLP, "--tp", "3", "--json"]) == 0
    given = autotp.plan(mlp(), 3, example_inputs=(torch.ones(2, 4, 12),))
    assert json.loads(capsys.readouterr().out) == json.loads(given.to_json())


def test_a_saved_plan_is_shown_without_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "plan.json")
    assert main(["plan", *MLP, "--tp", "3", "--save", saved]) == 0
    text = capsys.readouterr().out
    assert main(["plan", "--plan", saved]) == 0
    assert capsys.readouterr().out == text
    assert main(["plan", *MLP, "--plan", saved, "--dump", str(tmp_path / "dump")]) == 0
    assert (tmp_path / "dump" / "rank2.py").exists()


def test_verify_compares_every_rank(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", config, "--tp", "5", "--json", "--set", "n_layer=1"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] and data["tp"] == 5
    assert {"gradient", "output"} == {row["what"] for row in data["rows"]}


def test_verify_exits_with_1_if_something_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *MLP, "--tp", "3", "--limit", "1e-30"]) == 1
    assert "tensors differ" in capsys.readouterr().out


def test_a_model_that_cannot_be_captured_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{__file__}:branching", "--tp", "2"]) == 3
    assert "torch.export cannot capture Function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("raising", "RuntimeError: no weights today"),
        ("leaving", "SystemExit: 0"),
        ("endless", "RecursionError"),
    ],
)
def test_a_function_that_raises_is_an_error_with_its_place(
    function: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "graph", "verify", "estimate", "coverage"):
        assert main([command, f"{__file__}:{function}", "--tp", "2", "--json"]) == 2
        said = capsys.readouterr()
        assert what in said.err and f"in {function}" in said.err and not said.out


def raising() -> Any:
    raise RuntimeError("no weights today")


def leaving() -> Any:
    sys.exit(0)


def endless() -> Any:
    return endless()


def test_a_file_that_raises_or_leaves_when_imported_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "module.py"
    for text in ("raise RuntimeError('at import')", "import sys; sys.exit('at import')", "\0"):
        path.write_text(text)
        assert main(["plan", f"{path}:f", "--tp", "2"]) == 2
        assert f"cannot import {path}" in capsys.readouterr().err


def test_what_a_model_prints_is_not_in_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "graph", "verify", "estimate", "coverage"):
        assert main([command, f"{__file__}:talking", "--tp", "2", "--json"]) in (0, 1)
        said = capsys.readouterr()
        json.loads(said.out)
        assert "building" in said.err and "running" in said.err


def talking() -> Any:
    """A model that prints when it is built and when it is called."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        print("running")
        return torch.as_tensor(m.two(torch.relu(m.one(x))))

    print("building")
    model = Function(forward, one=nn.Linear(4, 8), two=nn.Linear(8, 4))
    return model, (torch.ones(2, 4),)


def test_a_saved_plan_refuses_what_it_cannot_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "plan.json")
    assert main(["plan", *MLP, "--tp", "3", "--save", saved]) == 0
    assert main(["plan", "--plan", saved, "--tp", "3"]) == 0
    capsys.readouterr()
    for more, what in (
        (["--sequence-parallel"], "--sequence-parallel cannot be had without a model"),
        (["--set", "a=1", "--input", "2,4"], "--set, --input cannot be had without a model"),
        (["--dump", str(tmp_path / "dump")], "--dump cannot be had without a model"),
        (["--tp", "2"], "is not for tp=2"),
        ([*MLP, "--tp", "4"], "is not for tp=4"),
        (["--plan", ""], "Is a directory"),
        (["--save", ""], "Is a directory"),
    ):
        assert main(["plan", "--plan", saved, *more]) == 2
        assert what in capsys.readouterr().err
    plan = autotp.plan(mlp(), 3, example_inputs=(torch.ones(2, 4, 12),))
    with pytest.raises(autotp.PlanError, match="a plan for 3 ranks cannot be kept on 4"):
        autotp.plan(mlp(), 4, example_inputs=(torch.ones(2, 4, 12),), plan=plan)


def test_a_configuration_may_begin_with_a_byte_order_mark(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(config).write_text(json.dumps(SMALL), encoding="utf-8-sig")
    assert main(["plan", config, "--tp", "2", "--set", "n_layer=1"]) == 0
    for change in ("n_layer=x", "n_head=0", "__class__=1"):
        assert main(["plan", config, "--tp", "2", "--set", change]) == 2
    assert main(["plan", config, "--tp", "2", "--set", "architectures=5"]) == 0
    assert capsys.readouterr().err.count("autotp: ") == 3


def branching() -> Any:
    """A model whose path depends on a value."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.one(x) if x.sum() > 0 else x

    return Function(forward, one=nn.Linear(4, 4)), (torch.ones(2, 4),)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"model_type": "gpt2",\n "n_layer": }', "line 2, column 13"),
        ("", "line 1, column 1"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "a list, not an object"),
        ('{"n": ' + "9" * 5000 + "}", "digits"),
        ("{}", "model_type None"),
        ('{"model_type": "<script>"}', "'<script>'"),
        ('{"model_type": "gpt2", "n_embd": "x"}', "n_embd"),
        ('{"model_type": "gpt2", "n_embd": 7, "n_head": 2}', "cannot make a model"),
    ],
)
def test_a_wrong_configuration_is_an_error_with_its_place(
    text: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    assert main(["plan", "--config", str(path), "--tp", "2"]) == 2
    assert where in capsys.readouterr().err


def test_a_file_of_100_mb_is_refused_unread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    for option in ("--config", "--plan"):
        assert main(["plan", option, str(path), "--tp", "2"]) == 2
        assert f"larger than {LARGEST:,} bytes" in capsys.readouterr().err


def broken_plans() -> list[tuple[str, str]]:
    """Texts that are no plans, and the place that the error names."""
    plan = autotp.plan(mlp(), 3, example_inputs=(torch.ones(2, 4, 12),))
    whole = plan.to_json()
    found = [
        (whole[: len(whole) // 2], "line "),
        (whole.replace('"tp": 3', '"tp": '), "line 4 column"),
        ("[" * 100_000, "RecursionError"),
        ("7", "the whole: 7, not an object"),
        ("", "line 1 column 1"),
    ]
    changes: list[tuple[list[Any], Any, str]] = [
        (["tp"], "3", "tp: '3', not a whole number"),
        (["tp"], True, "tp: True, not a whole number"),
        (["tp"], 0, "tp: 0 ranks"),
        (["tp"], 4, "axes[0].bounds: 4 of them for tp=4"),
        (["model"], None, "model: None, not text"),
        (["axes"], {}, "axes: {}, not a list"),
        (["axes", 0, "columns"], "one", "axes[0].columns: 'one', not a list"),
        (["axes", 0, "columns", 0], 7, "axes[0].columns[0]: 7, not text"),
        (["axes", 0, "bounds", 1], 1.5, "axes[0].bounds[1]: 1.5, not a whole number"),
        (["axes", 0, "bounds", 1], 10**9, "axes[0].bounds: not from 0 to"),
        (["axes", 0, "bounds"], [], "axes[0].bounds: not from 0 to"),
        (["tensors", 0, "dtype"], "nn", "tensors[0].dtype: 'nn' is none of torch's"),
        (["tensors", 0, "dims"], [{"sum": 3}], "not a dim"),
        (["kept", 0], [], "kept[0]: [], not an object"),
        (["collectives", "forward"], [1], "collectives.forward: [1], not a whole number"),
        (["collectives", "no_such"], 1, "no_such"),
    ]
    for path, value, where in changes:
        data = json.loads(whole)
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        found.append((json.dumps(data), where))
    return found


def test_a_broken_plan_is_an_error_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    for text, where in broken_plans():
        path.write_text(text)
        assert main(["plan", "--plan", str(path)]) == 2, where
        said = capsys.readouterr().err
        assert where in said and str(path) in said and "Traceback" not in said, said


def test_text_or_bytes_that_are_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    for data, where in (
        (b"x" * LARGEST, "line 1 column 1"),
        (b'{"format": 1, "\xff', "byte 15"),
        (bytes(range(256)) * (100 << 12), f"larger than {LARGEST:,} bytes"),
    ):
        path.write_bytes(data)
        assert main(["plan", "--plan", str(path)]) == 2
        assert where in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["plan", "--tp", "2"], "one model is needed"),
        (["plan", "a", "--config", "b", "--tp", "2"], "one model is needed"),
        (["plan", *MLP], "--tp is needed"),
        (["plan", "no/such.json", "--tp", "2"], "No such file"),
        (["plan", "no_such:function", "--tp", "2"], "No module named 'no_such'"),
        (["plan", "tests.models:nothing", "--tp", "2"], "no function tests.models:nothing"),
        (["plan", "tests.models:refill", "--tp", "2"], "cannot call tests.models:refill"),
        (["plan", "tests.spawn:Path", "--tp", "2"], "gives no model"),
        (["plan", "tests.models:mlp", "--tp", "2", "--input", "2,x"], "--input is no shape"),
        (["plan", "tests.models:mlp", "--tp", "2", "--input", "2:int99"], "this is no dtype"),
        (["plan", "tests.models:mlp", "--tp", "2", "--set", "x"], "--set needs KEY=VALUE"),
        (["plan", "tests.models:mlp", "--tp", "2", "--input", "=2"], "'' names no argument"),
        (["plan", "tests.models:mlp", "--tp", "2", "--input", "9" * 20], "cannot be made"),
        (["plan", "tests.models:mlp", "--tp", "2", "--input", "9" * 15 + ",99999"], "cannot be"),
        (["plan", ".:f", "--tp", "2"], "cannot import ."),
        (["plan", "x" * 5000, "--tp", "2"], "there is no model"),
        (["plan", "x" * 5000 + ":f", "--tp", "2"], "cannot import"),
        (["plan", "--plan", "a\0b"], "null byte"),
        (["plan", *MLP, "--tp", "2", "--save", "a\0b"], "null byte"),
        (["plan", *MLP, "--tp", "2", "--dump", "a\0b"], "null byte"),
        (["verify", *MLP, "--tp", "2", "--dtype", "int64"], "--dtype is not for models"),
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert what in capsys.readouterr().err


def test_inputs_that_the_model_does_not_take_exit_with_3(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("plan", "verify", "estimate"):
        given = ["tests.models:mlp", "--tp", "2", "--input", "no_such=2,4,12"]
        assert main([command, *given]) == 3
        assert "by name: no_such" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--seed", "9" * 30), ("--limit", "1e308"), ("--limit", "nan"), ("--limit", "0")],
)
def test_numbers_beyond_bounds_exit_with_2(option: str, value: str) -> None:
    with pytest.raises(SystemExit) as done:
        main(["verify", *MLP, "--tp", "2", option, value])
    assert done.value.code == 2


@pytest.mark.parametrize("size", ["0", "-1", "x", "99999999", "1.5"])
def test_a_bad_number_of_ranks_exits_with_2(size: str) -> None:
    with pytest.raises(SystemExit) as done:
        main(["plan", *MLP, "--tp", size])
    assert done.value.code == 2


def test_the_help_imports_no_torch() -> None:
    code = "import sys\nfrom autotp.commands import main\n"
    code += (
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
