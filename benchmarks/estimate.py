"""The estimate's memory beside what real ranks allocate in a training step.

    python benchmarks/estimate.py                      # GPT-2 and Llama, 1, 2 and 3 processes
    python benchmarks/estimate.py --layers 8 --width 1024 --model llama --tp 2

`estimated` is the dry run of `autotp estimate`, on meta. `measured` comes from processes over gloo:
torch's profiler notes every allocation and release of the CPU allocator during one step, the second
one, so that gradients are there before as in the estimate. `kept` is what the forward pass leaves
(activations and logits), `peak` the most at a time, parameters and gradients in neither. Dropout is
off, because its masks are of another type on a CPU. float32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocations import allocated, collectives_wait
from ranks import report, spawned
from torch.profiler import record_function

import autotp
from autotp.estimating.dryrun import dry_run
from autotp.estimating.estimate import VARIANTS, layers_of

MB = 1e6
FORWARD = "forward is done"


def model_of(kind: str, layers: int, width: int) -> Any:
    """The model on meta; 1024 words for each 128 of width, so that logits matter."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    heads, words = width // 64, 8 * width
    with torch.device("meta"):
        if kind == "llama":
            sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4}
            counts = {"num_hidden_layers": layers, "num_attention_heads": heads}
            return LlamaForCausalLM(LlamaConfig(**sizes, **counts, vocab_size=words)).train()
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, **off)
        return GPT2LMHeadModel(config).train()


def call_of(batch: int, seq: int, device: str) -> dict[str, Any]:
    """One call with labels."""
    ids = torch.ones(batch, seq, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def estimated(options: argparse.Namespace, kind: str, tp: int, again: bool, slices: bool) -> Any:
    """Bytes kept and at the peak of every rank."""
    model = model_of(kind, options.layers, options.width)
    call = call_of(options.batch, options.seq, "meta")
    plan = autotp.plan(model, tp, example_inputs=call, sequence_parallel=slices)
    recompute = layers_of(model) if again else ()
    steps = [dry_run(model, plan, ((), call), rank=r, recompute=recompute) for r in range(tp)]
    return [[step.kept + step.logits, step.peak] for step in steps]


def measured(options: argparse.Namespace) -> list[int]:
    """The same of this process, from its allocations."""
    collectives_wait()
    torch.manual_seed(0)
    model = model_of(options.model[0], options.layers, options.width).to_empty(device="cpu")
    model.tie_weights()  # what was one tensor is one again
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor.detach(), std=0.02)
    if options.again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    call = call_of(options.batch, options.seq, "cpu")
    tp: Any = autotp.parallelize(model, example_inputs=call, sequence_parallel=options.slices)
    del model

    def step() -> None:
        loss = tp(**call).loss
        with record_function(FORWARD):
            pass
        loss.backward()

    step()
    found = allocated(step)
    return [found[FORWARD], found["peak"]]


def processes(options: argparse.Namespace, kind: str, tp: int, again: bool, slices: bool) -> Any:
    """The same as `tp` processes measure it."""
    arguments = ["--model", kind] + ["--again"] * again + ["--slices"] * slices
    for name in ("layers", "width", "batch", "seq"):
        arguments += [f"--{name}", str(getattr(options, name))]
    with tempfile.TemporaryDirectory() as folder:
        return spawned(Path(folder), __file__, tp, *arguments)


def main() -> None:
    """Measure and print, or be one process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=["gpt2", "llama"], action="append")
    for name, value in (("layers", 4), ("width", 512), ("batch", 4), ("seq", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 3])
    for name in ("--again", "--slices"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        report(options.rank, measured(options))
        dist.barrier()
        return
    sizes = f"{options.layers} layers of {options.width}, {options.batch} x {options.seq} tokens"
    head = "".join(f"{word:>11}" for word in ("estimated", "measured", "ratio"))
    print(f"{sizes}, MB of the rank that measured most\n{'':<32}{'kept':>33}{'peak':>33}")
    print(f"{'':<32}{head}{head}")
    for kind in options.model or ["gpt2", "llama"]:
        for tp in options.tp:
            for (again, slices), name in VARIANTS.items():
                if slices and tp == 1:
                    continue
                wanted = estimated(options, kind, tp, again, slices)
                got = processes(options, kind, tp, again, slices)
                row = f"{f'{kind}, tp={tp}, {name}':<32}"
                for at in range(2):  # kept, peak
                    most = max(range(tp), key=lambda rank: got[rank][at])
                    ours, real = wanted[most][at], got[most][at]
                    row += f"{ours / MB:11.1f}{real / MB:11.1f}{ours / real:11.3f}"
                print(row, flush=True)


if __name__ == "__main__":
    main()
