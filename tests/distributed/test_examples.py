"""Examples run as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def example(name: str, *options: str) -> str:
    """What an example prints; it must end well."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, str(ROOT / "examples" / name), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_and_ends_as_the_unsharded_one(tmp_path: Path) -> None:
    sizes = ("--layers", "1", "--batch", "4", "--save-every", "2", "--out", str(tmp_path))
    example("train_gpt2.py", "--tp", "2", "--steps", "5", "--no-compare", *sizes)
    found = example("train_gpt2.py", "--tp", "3", "--steps", "8", "--resume", *sizes)
    assert "going on after 4 steps" in found
    assert "largest difference" in found
    drawing = (tmp_path / "loss.svg").read_text()
    assert "tp=3, dp=1" in drawing and drawing.count("<polyline") == 2
