"""Time for each generated token: the emitted module at tp=1 against the original, both eager.

    python benchmarks/decode.py                     # GPT-2 124M and a small Llama, random weights
    python benchmarks/decode.py --pairs 30 --tokens 20

Both decode the same tokens with their own `DynamicCache`, in turns: a pair is one run of each, and
the order changes from pair to pair. The median of the pairs' ratios is what counts; times on a
shared machine mean little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autotp

SMALL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2 124M": lambda: GPT2LMHeadModel(GPT2Config()),
    "gpt2 small, 12 layers of 256": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=256, n_head=8, vocab_size=5000)
    ),
    "llama small, 12 layers of 256": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, num_attention_heads=8, num_key_value_heads=4, vocab_size=5000)
    ),
}


def decode(model: Any, prompt: torch.Tensor, tokens: int) -> float:
    """Seconds for each token after the prompt."""
    output = model(prompt, use_cache=True)
    begun = 0.0
    for step in range(tokens + 1):
        if step == 1:  # the first one warms up
            begun = time.perf_counter()
        following = output.logits[:, -1:].argmax(-1)
        output = model(following, past_key_values=output.past_key_values, use_cache=True)
    return (time.perf_counter() - begun) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--only", default="", help="part of a model's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':<32}{'original':>12}{'autotp tp=1':>14}{'ratio':>8}   of the medians of pairs")
    for name, make in MODELS.items():
        if options.only not in name:
            continue
        torch.manual_seed(0)
        model = make().eval()
        ours = autotp.parallelize(model, devices=["cpu"]).ranks[0]
        prompt = torch.randint(0, model.config.vocab_size, (1, 32))
        with torch.no_grad():
            times: list[tuple[float, float]] = []
            for number in range(options.pairs + 1):
                both = [(0, model), (1, ours)]
                run = {
                    i: decode(m, prompt, options.tokens) for i, m in both[:: 1 - 2 * (number % 2)]
                }
                times.append((run[0], run[1]))
        times = times[1:]  # the first pair captures
        theirs, mine = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(b / a for a, b in times)
        print(f"{name:<32}{theirs * 1e3:>9.2f} ms{mine * 1e3:>11.2f} ms{ratio:>8.3f}")


if __name__ == "__main__":
    main()
