"""The main job: GPT-2 124M over several processes, equal to the unsharded model.

    python examples/gpt2.py                    # 2 processes, random weights
    python examples/gpt2.py --tp 3 --model DIR # a local checkpoint, or a name on the hub

Prints the plan, then compares loss, logits, every gradient and three SGD steps with the unsharded
model, on every rank. Exits with 0 only if all are equal.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import autotp

LIMIT = 1e-5  # relative to the largest value of each tensor, float32


def build(name: str | None) -> GPT2LMHeadModel:
    """GPT-2 from a checkpoint, or 124M random weights with biases that are not zero."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    if name:
        return GPT2LMHeadModel.from_pretrained(name, **off)
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT2LMHeadModel(GPT2Config(**off))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # zero biases would hide one that is added twice
            parameter.add_(noise * (0.02 if parameter.dim() > 1 else 0.1))
    return model


def worst(pairs: list[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup) -> float:
    """The largest relative difference over all pairs and ranks."""
    error = max(
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-12) for a, b in pairs if a.numel()
    )
    total = torch.tensor(error)
    dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
    return float(total)


def slices(
    model: torch.nn.Module, tp: torch.nn.Module, what: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's tensors beside the same part of the unsharded model's."""
    whole = dict(model.named_parameters())
    pairs = []
    for name, mine in tp.named_parameters():
        full = whole[name].grad if what == "gradient" else whole[name].detach()
        for dim, held in enumerate(tp.plan.ranges(name, tp.rank)):
            full = torch.cat([full.narrow(dim, a, b - a) for a, b in held], dim)
        pairs.append((mine.grad if what == "gradient" else mine.detach(), full))
    return pairs


def run(arguments: argparse.Namespace) -> bool:
    """One rank's part of the comparison."""
    model = build(arguments.model)
    tp = autotp.parallelize(model, tp=arguments.tp, logits="gather")
    first, group = tp.rank == 0, tp.group.process_group

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    say(str(tp.plan))
    tokens = torch.randint(
        model.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(1)
    )
    passed = True

    def check(what: str, error: float) -> None:
        nonlocal passed
        passed = passed and error <= LIMIT
        say(f"  {what:<28} {error:9.2e}  {'ok' if error <= LIMIT else 'WRONG'}")

    say(f"relative errors against the unsharded model, worst of {tp.tp_size} ranks:")
    want, have = model(tokens, labels=tokens), tp(tokens, labels=tokens)
    check("loss", worst([(have.loss.detach(), want.loss.detach())], group))
    check("logits", worst([(have.logits.detach(), want.logits.detach())], group))
    want.loss.backward()
    have.loss.backward()
    check("gradients", worst(slices(model, tp, "gradient"), group))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, tp)]
    for step in range(3):
        for m, optimizer in zip((model, tp), optimizers, strict=True):
            if step:
                m(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    check("parameters after 3 SGD steps", worst(slices(model, tp, "parameter"), group))

    unsharded = sum(p.nbytes for p in model.parameters())
    held = sum(p.nbytes for p in tp.parameters())
    planned = tp.plan.parameter_bytes(tp.rank)
    passed = passed and held == planned
    for rank in range(tp.tp_size):
        dist.barrier(group)
        if tp.rank == rank:
            share = f"{held:,} of {unsharded:,} bytes of parameters ({held / unsharded:.1%})"
            print(f"  rank {rank} holds {share}, planned {planned:,}", flush=True)
    dist.barrier(group)
    verdict = torch.tensor(int(passed))
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
    say("PASS" if verdict else "FAIL")
    return bool(verdict)


def main() -> int:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="number of processes")
    parser.add_argument("--model", help="local checkpoint directory or hub name")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launch, f"--nproc-per-node={arguments.tp}", *sys.argv]
        threads = str(max(1, (os.cpu_count() or 1) // arguments.tp))
        return subprocess.call(command, env={"OMP_NUM_THREADS": threads, **os.environ})
    passed = run(arguments)
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
