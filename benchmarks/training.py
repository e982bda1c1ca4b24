"""A training step and a forward pass of one model, under autotp and its peers, side by side.

    python benchmarks/training.py                           # GPT-2 and Llama, both shapes
    python benchmarks/training.py --model llama --shape short --rounds 15 --json found.json
    python benchmarks/training.py --memory                  # peak memory, one process pair each

All variants live in one pair of processes (gloo, one thread each) with the same weights and batch,
and take turns: a block of calls for each, then the next round in another order. Losses and some
gradients, of split and of whole parameters, are compared with the unsharded model first. `single`
is the whole model on both processes at once. A time is the mean over a block of the slower rank;
reported is the median over rounds, and ratios are of medians in the same run. Collectives are
counted by torch's profiler (`gloo:*` events), so every variant is counted alike.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import report, spawned
from training_table import memory_table, time_table
from training_work import SHAPES, VARIANTS, memory_of, rank_of

# Memory that goes back to the system and is asked for again costs up to a tenth of a step, and more
# or less of it by what ran before: it stays in the processes, of whatever variant.
KEPT = {
    "MALLOC_MMAP_THRESHOLD_": "10000000000",
    "MALLOC_TRIM_THRESHOLD_": "10000000000",
    "MALLOC_TOP_PAD_": "500000000",
}
TIGHT = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is free goes back at once


def both(options: argparse.Namespace, *arguments: str) -> list[dict[str, Any]]:
    """What two ranks find, with these arguments of this script."""
    sizes = ("layers", "width", "key_heads", "rounds")
    given = [(f"--{name.replace('_', '-')}", str(getattr(options, name))) for name in sizes]
    allocator = TIGHT if "--memory" in arguments else KEPT
    with tempfile.TemporaryDirectory() as name:
        flat = [word for pair in given for word in pair]
        found: list[dict[str, Any]] = spawned(
            Path(name), __file__, 2, *arguments, *flat, **allocator
        )
        return found


def main() -> None:
    """Measure and print, or be one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(VARIANTS), action="append")
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    parser.add_argument("--variants", help="names, separated by ;", default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--key-heads", type=int, default=0, help="as many as queries have, if 0")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--json", type=Path, help="also write what was found to this file")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        options.model, options.shape = options.model[0], options.shape[0]
        options.variants = options.variants.split(";")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = memory_of(options) if options.memory else rank_of(options)
        report(options.rank, found)
        dist.barrier()
        return
    every: dict[str, Any] = {}
    for model in options.model or VARIANTS:
        chosen = [n for n in options.variants.split(";") if n] or list(VARIANTS[model])
        for shape in options.shape or SHAPES:
            given = ("--model", model, "--shape", shape, "--variants")
            key = f"{model}, {shape} {SHAPES[shape]}"
            if options.memory:
                kept = [name for name in chosen if name != "no communication"]
                rows = {name: both(options, *given, name, "--memory") for name in kept}
                print(memory_table(key, rows), flush=True)
                every[key] = rows
            else:
                every[key] = both(options, *given, ";".join(chosen))[0]
                print(time_table(key, every[key]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
