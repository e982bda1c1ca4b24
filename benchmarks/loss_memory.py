"""Peak memory of the output head and the loss, forward and backward: whole and one rank's share.

    python benchmarks/loss_memory.py --tokens 1024 --hidden 256 --vocab 50257 --tp 4

Each variant runs in a process of its own; the figure is the growth of the peak resident set over
the step, so inputs and weights are not in it. A rank's operators run alone on its share of the
rows (what it exchanges with the others is a few numbers for each token).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import torch
from torch.nn import functional as F

from autotp.axes import balanced
from autotp.runtime import vocabulary
from autotp.runtime.group import Group


def peak() -> float:
    """The process's largest resident set so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def step(arguments: argparse.Namespace, share: int) -> float:
    """MB that the peak grows by in one step with this many rows."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(arguments.tokens, arguments.hidden, requires_grad=True)
    weight = torch.randn(share, arguments.hidden).requires_grad_()
    target = torch.randint(share, (arguments.tokens,))
    x.grad, weight.grad = torch.zeros_like(x), torch.zeros_like(weight)
    warm = torch.randn(8, 8, requires_grad=True)  # threads and buffers of torch itself
    F.cross_entropy(warm @ warm, torch.zeros(8, dtype=torch.long)).backward()
    before = peak()
    logits = F.linear(x, weight)
    if share == arguments.vocab:
        loss = F.cross_entropy(logits, target)
    else:
        loss = vocabulary.cross_entropy(logits, target, ((0, share),), group=Group())
    loss.backward()
    return peak() - before


def main() -> None:
    """Measure both and print, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--share", type=int, help="run one variant with this many rows")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.share:
        print(step(arguments, arguments.share))
        return
    largest = balanced(arguments.vocab, arguments.tp)[1]
    found = {}
    for name, share in {"whole": arguments.vocab, "one rank": largest}.items():
        command = [sys.executable, *sys.argv, "--share", str(share)]
        found[name] = float(subprocess.run(command, capture_output=True, check=True).stdout)
    ratio = found["one rank"] / found["whole"]
    if arguments.json:
        print(json.dumps({**found, "ratio": ratio, "tp": arguments.tp}))
        return
    logits = arguments.tokens * arguments.vocab * 4 / 2**20
    print(f"{arguments.tokens} tokens, vocabulary {arguments.vocab}: logits are {logits:.0f} MB")
    for name, size in found.items():
        print(f"  {name:<9} {size:7.0f} MB")
    print(f"  ratio     {ratio:7.3f}   (1/tp = {1 / arguments.tp:.3f})")


if __name__ == "__main__":
    main()
