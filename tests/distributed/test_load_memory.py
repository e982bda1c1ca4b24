"""Loading takes the memory of a rank's shards, not of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_loads_and_saves_gpt2_in_little_more_than_its_shards() -> None:
    command = [sys.executable, "benchmarks/load_memory.py", "--tp", "2", "--json"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    every = json.loads(done.stdout.splitlines()[-1])
    assert len(every) == 2
    for found in every:
        assert found["whole model"] == pytest.approx(474.7, abs=0.1)
        assert 0.5 <= found["shards"] / found["whole model"] < 0.51
        assert found["shards"] < found["load"] <= 1.1 * (found["shards"] + found["largest tensor"])
    assert every[0]["save"] < 2 * every[0]["largest tensor"], "a whole tensor and a part"
    assert every[1]["save"] < 50
