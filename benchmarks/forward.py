"""A forward pass at tp=1 through the emitted module against the original, both eager.

    python benchmarks/forward.py                     # GPT-2 and Llama: decode and both shapes
    python benchmarks/forward.py --pairs 30 --only decode

One process, one thread, evaluation mode, no process group. Both take turns: a pair is one run of
each, and the order changes from pair to pair. A decode run makes `--tokens` tokens with a
`DynamicCache` of its own. The median of the pairs' ratios is what counts; times on a shared machine
mean little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from training_work import SHAPES, whole
from transformers import GPT2Config, GPT2LMHeadModel

import autotp

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2 124M": lambda: GPT2LMHeadModel(GPT2Config()),
    "gpt2, 4 layers of 512": lambda: whole("gpt2", 4, 512, 0),
    "llama, 4 layers of 512": lambda: whole("llama", 4, 512, 4),
}


def decode(model: Any, vocabulary: int, tokens: int) -> float:
    """Seconds for each token after a prompt."""
    prompt = torch.randint(vocabulary, (1, 32), generator=torch.Generator().manual_seed(1))
    output = model(prompt, use_cache=True)
    begun = 0.0
    for step in range(tokens + 1):
        if step == 1:  # the first one warms up
            begun = time.perf_counter()
        following = output.logits[:, -1:].argmax(-1)
        output = model(following, past_key_values=output.past_key_values, use_cache=True)
    return (time.perf_counter() - begun) / tokens


def forward(model: Any, vocabulary: int, shape: tuple[int, int]) -> float:
    """Seconds for one forward pass, the mean over a quarter of a second."""
    batch = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))
    calls, begun = 0, time.perf_counter()
    while not calls or time.perf_counter() - begun < 0.25:
        model(batch, use_cache=False)
        calls += 1
    return (time.perf_counter() - begun) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--only", default="", help="part of a row's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':<40}{'original':>12}{'autotp tp=1':>14}{'ratio':>8}   of the medians of pairs")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().eval()
        words = model.config.vocab_size
        ours = autotp.parallelize(model, devices=["cpu"]).ranks[0]
        runs: dict[str, Callable[[Any], float]] = {
            "decode": partial(decode, vocabulary=words, tokens=options.tokens),
            **{
                f"{key} {shape}": partial(forward, vocabulary=words, shape=shape)
                for key, shape in SHAPES.items()
            },
        }
        for kind, run in runs.items():
            row = f"{name}, {kind}"
            if options.only in row:
                print(f"{row:<40}{compared(run, model, ours, options.pairs)}", flush=True)


def compared(run: Callable[[Any], float], model: Any, ours: Any, pairs: int) -> str:
    """Medians of a run's seconds for both models, and of their ratios."""
    times: list[tuple[float, float]] = []
    with torch.no_grad():
        for number in range(pairs + 1):
            both = [(0, model), (1, ours)]
            found = {i: run(m) for i, m in both[:: 1 - 2 * (number % 2)]}
            times.append((found[0], found[1]))
    times = times[1:]  # the first pair captures
    theirs, mine = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    return f"{theirs * 1e3:>9.2f} ms{mine * 1e3:>11.2f} ms{ratio:>8.3f}"


if __name__ == "__main__":
    main()
