"""Train a small GPT-2 over tp x dp processes on text that every machine has.

    python examples/train_gpt2.py                           # 2 processes share the model
    python examples/train_gpt2.py --tp 2 --dp 2             # two such pairs, half a batch each
    python examples/train_gpt2.py --tp 3 --resume           # after a kill, on any number of ranks

The text is the documentation in Python's standard library, byte by byte. At the end rank 0 trains
the unsharded model alone, draws both losses over each other (loss.svg), and the exit status is 0
only if they agree.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import autotp

LIMIT = 1e-4  # on the difference of the two losses, at every step


def text() -> Tensor:
    """All documentation strings of the standard library's modules, as one vector of bytes."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                found.append(ast.get_docstring(node) or "")
    return torch.frombuffer(bytearray("\n\n".join(filter(None, found)).encode()), dtype=torch.uint8)


def batch(data: Tensor, step: int, size: int, context: int) -> Tensor:
    """The global batch of a step [size, context]: it depends on nothing that a kill could lose."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - context, (size,), generator=generator)
    return torch.stack([data[start : start + context] for start in starts]).long()


def build(options: argparse.Namespace) -> GPT2LMHeadModel:
    """A GPT-2 of bytes, the same on every rank."""
    torch.manual_seed(options.seed)
    drop, context = options.dropout, options.context
    sizes = {"n_layer": options.layers, "n_head": options.heads, "n_embd": 16 * options.heads}
    rates = {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=context, use_cache=False, **sizes, **rates, **ends)
    ).train()


def train(model: nn.Module, optimizer: Any, options: argparse.Namespace, **place: Any) -> Iterator:
    """Yield each step's number and loss, of this process's share of the batch."""
    data, device = text(), next(model.parameters()).device
    share, of = place.get("share", 0), place.get("of", 1)
    for step in range(place.get("first", 0), options.steps):
        torch.manual_seed(options.seed + step * of + share)  # dropout, also after a kill
        tokens = batch(data, step, options.batch, options.context).chunk(of)[share].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step, loss.detach()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of both runs."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sharded(options: argparse.Namespace, console: Console) -> list[float]:
    """The losses of training over all ranks, with those from before a kill."""
    kind = "cuda" if torch.cuda.device_count() >= options.tp * options.dp else "cpu"
    mesh = init_device_mesh(kind, (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
    copies = mesh["dp"]
    tp = autotp.parallelize(build(options), mesh=mesh).to(kind)
    optimizer, losses = adam(tp), []
    last = options.out / "last"
    if options.resume and last.exists():
        losses = autotp.load(last, tp, optimizer)["losses"]
        console.print(f"going on after {len(losses)} steps with the state in {last}")
    model = tp if options.dp == 1 else DistributedDataParallel(tp, process_group=copies.get_group())
    place = {"share": copies.get_local_rank(), "of": options.dp, "first": len(losses)}
    with bar(console) as progress:
        task = progress.add_task("", total=options.steps, completed=len(losses), loss=0, speed=0)
        begun = time.perf_counter()
        for step, loss in train(model, optimizer, options, **place):
            dist.all_reduce(loss, group=copies.get_group())
            losses.append(loss.item() / options.dp)
            done = (step + 1 - place["first"]) * options.batch * options.context
            speed = done / (time.perf_counter() - begun)
            progress.update(task, advance=1, loss=losses[-1], speed=speed)
            if len(losses) % options.save_every == 0 and place["share"] == 0:
                autotp.save(last, tp, optimizer, extra={"losses": losses})
    return losses


def bar(console: Console) -> Progress:
    """Steps done, loss and tokens per second."""
    numbers = "loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s"
    columns = [BarColumn(), MofNCompleteColumn(), TextColumn(numbers), TimeRemainingColumn()]
    return Progress(*columns, console=console)


def compare(losses: list[float], options: argparse.Namespace, console: Console) -> bool:
    """Train the unsharded model in this process, and draw both losses."""
    console.print("the unsharded model, in one process:")
    whole, model = [], build(options)
    with bar(console) as progress:
        task = progress.add_task("", total=options.steps, loss=0, speed=0)
        begun = time.perf_counter()
        for step, loss in train(model, adam(model), options):
            whole.append(loss.item())
            speed = (step + 1) * options.batch * options.context / (time.perf_counter() - begun)
            progress.update(task, advance=1, loss=whole[-1], speed=speed)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"tp={options.tp}, dp={options.dp}"
    (options.out / "loss.svg").write_text(svg({name: losses, "unsharded": whole}))
    worst = max(abs(a - b) for a, b in zip(losses, whole, strict=True))
    console.print(f"{name:<14} {sparkline(losses)} {losses[-1]:.6f}")
    console.print(f"{'unsharded':<14} {sparkline(whole)} {whole[-1]:.6f}")
    console.print(f"largest difference {worst:.1e}, curves in {options.out / 'loss.svg'}")
    return worst <= LIMIT or options.dropout > 0  # ranks draw other masks


def sparkline(values: list[float], width: int = 50) -> str:
    """A curve as one line of text."""
    picked = values[:: max(1, len(values) // width)]
    low, high = min(picked), max(picked)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / (high - low or 1))] for v in picked)


def svg(curves: dict[str, list[float]]) -> str:
    """Curves over steps: the first broad and pale, the second thin and dark on top of it."""
    low, high = (f(f(c) for c in curves.values()) for f in (min, max))
    steps = max(len(c) for c in curves.values())
    pens = [("#f4a261", 7), ("#1d3557", 1.5)]
    parts = []
    for row, (name, values) in enumerate(curves.items()):
        color, width = pens[row]
        across = [60 + 560 * i / max(1, steps - 1) for i in range(len(values))]
        down = [340 - 310 * (value - low) / (high - low or 1) for value in values]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
        pen = f'fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round"'
        parts.append(f'<polyline {pen} points="{points}"/>')
        parts.append(f'<path {pen} d="M440 {42 + 22 * row}h40"/>')
        parts.append(f'<text x="490" y="{47 + 22 * row}">{name}</text>')
    marks = [(30, f"{high:.2f}"), (340, f"{low:.2f}")]
    parts += [f'<text x="52" y="{y + 5}" text-anchor="end">{label}</text>' for y, label in marks]
    parts.append('<path d="M60 20V350H630" fill="none" stroke="#888"/>')
    parts.append(f'<text x="345" y="375" text-anchor="middle">loss over {steps} steps</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 650 390" font-family="sans-serif"'
    return (
        f'{head} font-size="14"><rect width="650" height="390" fill="white"/>{"".join(parts)}</svg>'
    )


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="processes that share a model")
    parser.add_argument("--dp", type=int, default=1, help="models that share a batch")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("train_gpt2"), help="what is written")
    parser.add_argument(
        "--no-compare", action="store_true", help="do not train unsharded at the end"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences in the global batch")
    parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4, help="of 16 features")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    """Start the processes, or be one of them."""
    options = arguments()
    logging.set_verbosity_error()
    if "RANK" not in os.environ:
        world = options.tp * options.dp
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        threads = str(max(1, (os.cpu_count() or 1) // world))
        command = [*launch, f"--nproc-per-node={world}", *sys.argv]
        return subprocess.call(command, env={"OMP_NUM_THREADS": threads, **os.environ})
    console = Console(quiet=os.environ["RANK"] != "0")
    losses = sharded(options, console)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return 0 if not first or options.no_compare or compare(losses, options, console) else 1


if __name__ == "__main__":
    sys.exit(main())
