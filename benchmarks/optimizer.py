"""Time of an AdamW step and of clipping: plain tensors, parameters that know that they are shards,
and DTensors.

    python benchmarks/optimizer.py                # 2 processes, GPT-2 of 12 layers of 256
    python benchmarks/optimizer.py --tp 2 --rounds 40 --width 768

Each round runs all three in turns, and the order changes from round to round. Printed are the
medians of the slowest rank, and the medians of each round's ratio to plain tensors; times on a
shared machine mean little. Plain tensors get another norm on each rank: they are the lower bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import autotp
from autotp.runtime.sharded import local

KINDS = ("plain", "shards", "DTensors")


def parameters(options: argparse.Namespace) -> dict[str, list[nn.Parameter]]:
    """The same shards three times, with gradients."""
    mesh = init_device_mesh("cpu", (options.tp,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    config = GPT2Config(n_embd=options.width, n_head=options.width // 64, n_layer=options.layers)
    model = GPT2LMHeadModel(config)
    shards: Any = autotp.parallelize(model, mesh=mesh)
    tensors: Any = autotp.parallelize(model, mesh=mesh)
    found = {
        "plain": [nn.Parameter(local(p).detach().clone()) for p in shards.parameters()],
        "shards": list(shards.parameters()),
        "DTensors": list(tensors.as_dtensors(mesh).parameters()),
    }
    for parameter in (p for each in found.values() for p in each):
        parameter.grad = torch.full_like(parameter, 0.01).detach()
    return found


def calls(
    found: dict[str, list[nn.Parameter]], foreach: bool
) -> dict[str, dict[str, Callable[[], Any]]]:
    """What is timed, by name and by kind of parameter."""
    steps: dict[str, Callable[[], Any]] = {}
    clips: dict[str, Callable[[], Any]] = {}
    for kind, params in found.items():
        steps[kind] = torch.optim.AdamW(params, lr=1e-4, foreach=foreach).step
        clips[kind] = lambda ps=params: nn.utils.clip_grad_norm_(ps, 1e9, foreach=foreach)
    note = ", foreach" if foreach else ""
    return {f"AdamW step{note}": steps, f"clip_grad_norm_{note}": clips}


def measure(call: Callable[[], Any]) -> float:
    """Seconds on the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def rounds(kinds: dict[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
    """Seconds of each kind, by round."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(count + 2):
        for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
            seconds = measure(kinds[kind])
            if number >= 2:  # the first ones make state
                times[kind].append(seconds)
    return times


def main() -> int:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launch, f"--nproc-per-node={options.tp}", *sys.argv]
        return subprocess.call(command, env={"OMP_NUM_THREADS": "1", **os.environ})
    found = parameters(options)
    first, count = dist.get_rank() == 0, len(found["plain"])
    if first:
        held = sum(p.numel() for p in found["plain"])
        print(f"tp={options.tp}: {count} tensors, {held / 1e6:.1f} M numbers on rank 0, ms")
        ratios = "".join(f"{kind + '/plain':>16}" for kind in KINDS[1:])
        print(f"{'':<26}" + "".join(f"{kind:>10}" for kind in KINDS) + ratios)
    for foreach in (False, True):
        for name, kinds in calls(found, foreach).items():
            times = rounds(kinds, options.rounds)
            medians = "".join(f"{1000 * statistics.median(times[kind]):>10.2f}" for kind in KINDS)
            ratios = ""
            for kind in KINDS[1:]:
                pairs = zip(times[kind], times["plain"], strict=True)
                ratios += f"{statistics.median(a / b for a, b in pairs):>16.2f}"
            if first:
                print(f"{name:<26}{medians}{ratios}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
