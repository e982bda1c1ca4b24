"""What may import what, what `import autotp` brings along, and that no pass names an
architecture."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PASSES = sorted(path for path in (ROOT / "passes").glob("*.py") if path.name != "__init__.py")
RULES = sorted((ROOT / "autotp" / "rules").glob("*.py"))
RUNTIME = sorted((ROOT / "autotp" / "runtime").glob("*.py"))
FACTS = {("passes.infer", "Inferred"), ("passes.match", "GemmPair")}  # what analyses return
ARCHITECTURES = re.compile(
    r"gpt|llama|bert|neox|mistral|mixtral|qwen|falcon|bloom|gemma|phi\d|\bphi\b|\bopt\b|\bt5\b|codegen",
    re.IGNORECASE,
)


def imports(path: Path) -> Iterator[tuple[str, str, int]]:
    """(module, name, line) of every import, wherever it stands; name is empty for `import
    module`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno} imports relatively"
            yield from ((node.module or "", alias.name, node.lineno) for alias in node.names)


def words(path: Path) -> Iterator[tuple[str, int]]:
    """Identifiers and strings of the code, without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                value.value = ""  # a docstring
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for text in (
            getattr(node, "id", ""),
            getattr(node, "attr", ""),
            getattr(node, "name", ""),
            getattr(node, "arg", ""),
            getattr(node, "value", ""),
        ):
            if isinstance(text, str):
                yield text, line


def in_a_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded(statement: str) -> set[str]:
    """The top-level modules that a statement brings along, beyond those of `import torch`."""
    code = f"import sys, torch\nbefore = set(sys.modules)\n{statement}\n"
    return set(in_a_new_process(code + "print(*(set(sys.modules) - before))").split())


def test_importing_autotp_imports_little() -> None:
    found = in_a_new_process("import sys, autotp\nprint(*sys.modules)").split()
    assert not {"torch", "transformers", "networkx", "sympy", "numpy", "passes"} & set(found)


def test_the_calls_of_autotp_import_neither_transformers_nor_networkx() -> None:
    found = loaded("import autotp\nautotp.plan, autotp.parallelize, autotp.Plan, autotp.PlanError")
    assert not {
        name for name in found if name.split(".")[0] in ("transformers", "networkx", "rich")
    }


def test_planning_imports_no_transformers() -> None:
    statement = (
        "import autotp\n"
        "one, two = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)\n"
        "model = torch.nn.Sequential(one, torch.nn.ReLU(), two)\n"
        "print(autotp.plan(model, tp=2, example_inputs=(torch.ones(2, 4),)).fingerprint)"
    )
    found = loaded(statement)
    assert not {name for name in found if name.split(".")[0] == "transformers"}


def test_importing_autotp_patches_nothing() -> None:
    code = """
import torch, torch.nn.functional, torch.distributed, torch.fx, torch.export
from torch.utils import _pytree
watched = [torch, torch.nn, torch.nn.functional, torch.nn.Module, torch.Tensor, torch.ops.aten,
           torch.fx, torch.fx.Graph, torch.fx.Node, torch.distributed, torch.export,
           torch.autograd, _pytree]
before = [{k: id(v) for k, v in vars(m).items()} for m in watched]
import autotp
autotp.plan, autotp.parallelize, autotp.verify, autotp.Plan
import autotp.build, autotp.printing, passes.emit
for module, was in zip(watched, before):
    now = {k: id(v) for k, v in vars(module).items()}
    changed = [k for k in was if not k.startswith("__") and now.get(k) != was[k]]
    assert not changed, (module, changed)
print("nothing")
"""
    assert in_a_new_process(code) == "nothing"


@pytest.mark.parametrize("path", PASSES, ids=lambda path: path.name)
def test_a_pass_imports_of_another_pass_only_what_it_returns(path: Path) -> None:
    for module, name, line in imports(path):
        if module == "passes" or module.startswith("passes."):
            assert (module, name) in FACTS, f"passes/{path.name}:{line} imports {module}.{name}"


@pytest.mark.parametrize("path", PASSES, ids=lambda path: path.name)
def test_a_pass_has_one_public_function_of_the_name_of_its_file(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    extra = {"check": ["collectives", "same_order"]}  # facts about graphs that the proof needs
    assert [name for name in public if name not in extra.get(path.stem, [])] == [path.stem]


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: path.name)
def test_the_runtime_imports_neither_passes_nor_rules(path: Path) -> None:
    for module, name, line in imports(path):
        full = f"{module}.{name}"
        assert not re.match(r"passes\b|autotp\.rules\b|autotp\.pipeline\b|autotp\.api\b", full), (
            f"autotp/runtime/{path.name}:{line} imports {full}"
        )


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_rules_import_neither_passes_nor_the_runtime(path: Path) -> None:
    for module, name, line in imports(path):
        full = f"{module}.{name}"
        assert not re.match(r"passes\b|autotp\.runtime\b|autotp\.planning\b", full), (
            f"autotp/rules/{path.name}:{line} imports {full}"
        )


def test_only_the_pipeline_imports_passes() -> None:
    for path in sorted((ROOT / "autotp").rglob("*.py")):
        found = [line for module, _, line in imports(path) if module.split(".")[0] == "passes"]
        assert not found or path.name == "pipeline.py", f"{path.relative_to(ROOT)}:{found}"


def test_nothing_imports_the_tests() -> None:
    for folder in ("autotp", "passes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            assert not [
                line for module, _, line in imports(path) if module.split(".")[0] == "tests"
            ]


@pytest.mark.parametrize(
    "path", [*PASSES, *RULES], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_no_pass_and_no_rule_names_an_architecture(path: Path) -> None:
    found = [(word, line) for word, line in words(path) if ARCHITECTURES.search(word)]
    assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_the_words_of_a_file_are_its_code_without_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        '"""About GPT."""\n# bloom\ndef falcon(x):\n    """Of Llama."""\n    return x["bert"]\n'
    )
    assert [word for word, _ in words(path) if ARCHITECTURES.search(word)] == ["falcon", "bert"]


def test_a_file_that_shadows_the_passes_is_named(tmp_path: Path) -> None:
    (tmp_path / "passes.py").write_text("x = 1\n")
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.append({str(ROOT)!r})\nimport autotp; autotp.plan\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{tmp_path / 'passes.py'} shadows a package of autotp" in done.stderr
