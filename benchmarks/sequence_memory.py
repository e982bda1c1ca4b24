"""Bytes that a rank keeps for the backward pass, with and without sequence parallelism.

    python benchmarks/sequence_memory.py

All ranks run in lockstep in one process; what autograd saves is counted once for each storage,
parameters left out, and divided by the number of ranks.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import autotp


def kept(model: nn.Module, x: Tensor) -> float:
    """MB of activations that one forward pass leaves, in all."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
    return sum(found.values()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(n_layer=given.layers, n_embd=given.width, n_head=given.width // 64)
    model = GPT2LMHeadModel(config).train()
    x = torch.randint(config.vocab_size, (given.batch, given.length))
    whole = kept(model, x)
    print(
        f"{given.layers} layers of {given.width}, {given.batch} x {given.length} tokens, dropout on"
    )
    print(f"unsharded {whole:21.1f} MB")
    for tp in given.tp:
        for sliced in (False, True):
            ranks = autotp.parallelize(model, tp=tp, devices=["cpu"] * tp, sequence_parallel=sliced)
            mine = kept(ranks, x) / tp
            name = "with slices" if sliced else "without"
            print(f"tp={tp} {name:<15} {mine:10.1f} MB  {mine / whole:6.3f} of unsharded")


if __name__ == "__main__":
    main()
