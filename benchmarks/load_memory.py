"""Peak anonymous memory of each rank while it loads GPT-2 124M, and while the model is saved.

    python benchmarks/load_memory.py --tp 2

A checkpoint with random weights is written first. Each rank builds the model on meta and prepares
everything once without weights, so that the figures are of loading alone: how far the process's
RssAnon (/proc/self/status, read by a process of its own every millisecond) rises above what it was
before. `from_pretrained` loads the whole model on each rank and splits it then, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ranks import report, spawned

import autotp

MB = 2**20
WATCH = """
import sys, threading, time
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
most, path = 0, f"/proc/{sys.argv[1]}/status"
print("ready", flush=True)
while not done.wait(0.001):
    text = open(path).read()
    most = max(most, int(text.split("RssAnon:")[1].split()[0]))
print(most)
"""


def anonymous() -> float:
    """The process's anonymous resident memory, in MB."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) / 1024


@contextmanager
def growth(found: dict[str, float], name: str) -> Iterator[None]:
    """Note how far the memory rises in the block."""
    before = anonymous()
    command = [sys.executable, "-c", WATCH, str(os.getpid())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        yield
        out, _ = watcher.communicate()
    found[name] = max(int(out) / 1024, anonymous()) - before


def rank_of(folder: Path) -> dict[str, float]:
    """What one rank measures."""
    from transformers import AutoConfig, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    config = AutoConfig.from_pretrained(folder / "checkpoint")

    def blank() -> Any:
        with torch.device("meta"):
            return GPT2LMHeadModel(config)

    autotp.parallelize(blank())
    found: dict[str, float] = {}
    model = blank()
    with growth(found, "load"):
        tp: Any = autotp.parallelize(model, checkpoint=folder / "checkpoint")
    found["shards"] = sum(p.nbytes for p in tp.parameters()) / MB
    found["largest tensor"] = max(p.nbytes for p in model.parameters()) / MB
    found["whole model"] = sum(p.nbytes for p in model.parameters()) / MB
    with growth(found, "save"):
        tp.save_pretrained(folder / "saved")
    del tp
    with growth(found, "from_pretrained"):
        whole = GPT2LMHeadModel.from_pretrained(folder / "checkpoint", dtype=torch.float32)
        autotp.parallelize(whole)
    torch.distributed.barrier()
    return found


def measure(tp: int) -> list[dict[str, float]]:
    """The figures of every rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder / "checkpoint")
        found: list[dict[str, float]] = spawned(folder, __file__, tp)
        return found


def main() -> None:
    """Measure and print, or be one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.rank:
        report(arguments.rank, rank_of(arguments.rank))
        return
    every = measure(arguments.tp)
    if arguments.json:
        print(json.dumps(every))
        return
    first = every[0]
    print(f"GPT-2 124M, float32, tp={arguments.tp}: {first['whole model']:.0f} MB, ", end="")
    print(f"the largest tensor {first['largest tensor']:.0f} MB")
    heads = ("shards", "load", "limit", "save", "from_pretrained")
    print("  rank", *(head.rjust(16) for head in heads))
    for rank, found in enumerate(every):
        limit = 1.1 * (found["shards"] + found["largest tensor"])
        values = (found[head] if head != "limit" else limit for head in heads)
        print(f"  {rank:4}", *(f"{value:13.0f} MB" for value in values))
    worst = max(found["load"] / (found["shards"] + found["largest tensor"]) for found in every)
    print(f"  load / (shards + largest tensor), worst rank: {worst:.2f} (limit 1.10)")
    sys.exit(worst > 1.1)


if __name__ == "__main__":
    main()
