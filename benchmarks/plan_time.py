"""How long a plan takes beside the capture alone, and whether it is linear in layers.

    python benchmarks/plan_time.py              # 12, 24 and 48 layers of GPT-2 XL's width
    python benchmarks/plan_time.py --layers 72 --hidden 3072 --heads 32 --repeat 9
    python benchmarks/plan_time.py --layers 72 --hidden 3072 --heads 32 --memory

Each pair is timed in turn on one model on the meta device (no weights), in CPU seconds of this
process, since wall time on a shared machine says little. `export` is `torch.export` alone with the
same arguments; `plan` is all of `autotp.plan`: capture, inference, matching, choice, insertion.
`rank` is one rank's graph on top: localised and checked. `--memory` tells instead how far one plan
raises the peak of the resident set above what the imports take. AUTOTP_WITHOUT=blocks traces every
block.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim, export
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import autotp
from autotp.pipeline import rank_program


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and its result."""
    gc.collect()  # what an earlier call left is not charged to this one
    begun = time.process_time()
    result = work()
    return time.process_time() - begun, result


def gpt2(layers: int, hidden: int, heads: int) -> tuple[Any, dict[str, Any]]:
    """A model on the meta device, and a training call."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads))
    tokens = torch.zeros(3, 5, dtype=torch.long, device="meta")
    return model, {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}


def measure(layers: int, hidden: int, heads: int, tp: int, repeat: int) -> dict[str, float]:
    """Medians for one model."""
    model, inputs = gpt2(layers, hidden, heads)
    sizes = {0: Dim.AUTO, 1: Dim.AUTO}
    shapes = {"input_ids": sizes, "labels": sizes, "use_cache": None}
    times: dict[str, list[float]] = {"export": [], "plan": [], "rank": []}
    for _ in range(repeat):
        times["export"].append(
            seconds(lambda: export(model, (), inputs, dynamic_shapes=shapes, strict=False))[0]
        )
        taken, plan = seconds(lambda: autotp.plan(model, tp, example_inputs=inputs))
        times["plan"].append(taken)
        times["rank"].append(seconds(lambda plan=plan: rank_program(plan, tp - 1))[0])
    found = {key: statistics.median(values) for key, values in times.items()}
    return {"layers": layers, **found, "ratio": found["plan"] / found["export"]}


def peak() -> float:
    """The most that was resident so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--hidden", type=int, default=1600)
    parser.add_argument("--heads", type=int, default=25)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    if arguments.memory:
        layers, before = arguments.layers[0], peak()  # of a second model some would be there
        model, inputs = gpt2(layers, arguments.hidden, arguments.heads)
        autotp.plan(model, arguments.tp, example_inputs=inputs)
        print(f"{layers} layers: imports {before:.0f} MB, peak {peak() - before:.0f} MB more")
        return
    measure(1, 64, 4, 2, 1)  # imports and first calls are not measured
    rows = [
        measure(layers, arguments.hidden, arguments.heads, arguments.tp, arguments.repeat)
        for layers in arguments.layers
    ]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("layers   export s     plan s   ratio   one rank s   plan s per layer")
    for row in rows:
        print(
            f"{row['layers']:6.0f} {row['export']:10.2f} {row['plan']:10.2f} {row['ratio']:7.2f} "
            f"{row['rank']:12.2f} {row['plan'] / row['layers']:18.3f}"
        )


if __name__ == "__main__":
    main()
