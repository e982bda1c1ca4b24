"""Processes of a benchmark over gloo, one thread each, and what each of them finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def spawned(folder: Path, script: str, count: int, *arguments: str, **environment: str) -> Any:
    """What every rank of `script --rank FOLDER ARGUMENTS` reports; exits with their output if one
    fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", script, "--rank", str(folder), *arguments]
    with open(folder / "log", "w+b") as log:
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        done = subprocess.run(command, stdout=log, stderr=log, env=variables)
        if done.returncode:
            log.seek(0)
            sys.exit(log.read().decode(errors="replace"))
    return [json.loads((folder / f"found{rank}").read_text()) for rank in range(count)]


def report(folder: Path, found: Any) -> None:
    """Hand over what this rank found."""
    (folder / f"found{os.environ['RANK']}").write_text(json.dumps(found))
