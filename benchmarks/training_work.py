"""What one rank of `training.py` does: the model, the variants, checks, counts and times."""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORDS = 8192
SHAPES = {"training": (4, 256), "short": (1, 16)}
GPT2 = ("single", "no communication", "megatron", "autotp", "autotp, local logits")
COMPILED = "autotp compiled"
DTENSOR = ("dtensor", "dtensor, split loss", "dtensor, split loss, block inputs")
VARIANTS = {"gpt2": (*GPT2, COMPILED), "llama": (*GPT2, COMPILED, *DTENSOR, "hf tp_plan")}
CHECKED = {
    "gpt2": """transformer.wte.weight transformer.wpe.weight transformer.h.0.ln_1.weight
        transformer.h.0.mlp.c_proj.weight transformer.ln_f.bias""",
    "llama": """model.embed_tokens.weight model.layers.0.input_layernorm.weight
        model.layers.0.self_attn.q_proj.weight model.layers.0.mlp.down_proj.weight
        model.norm.weight""",
}
BLOCK = 0.3  # seconds of calls in one turn, and at least one call


def whole(kind: str, layers: int, width: int, key_heads: int) -> Any:
    """The unsharded model, no parameter of which is zero or one."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    heads = width // 64
    torch.manual_seed(0)
    if kind == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model: Any = GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=WORDS, **off)
        )
    else:
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads or heads,
            vocab_size=WORDS,
        )
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.train()


def batch(shape: str) -> torch.Tensor:
    """Tokens, the same on every rank."""
    return torch.randint(WORDS, SHAPES[shape], generator=torch.Generator().manual_seed(1))


def errors(variants: Mapping[str, Any], kind: str, tokens: torch.Tensor) -> dict[str, float]:
    """For each variant the largest relative difference of its loss and gradients from single's."""
    found = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, variant in variants.items():
        variant.model.zero_grad(set_to_none=True)
        loss = variant.step(tokens)
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        got = {"loss": loss, **variant.gradients(CHECKED[kind].split())}
        wanted = wanted or {key: value.clone() for key, value in got.items()}
        pairs = [(got[key], value) for key, value in wanted.items()]
        found[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        variant.model.zero_grad(set_to_none=True)
    return found


def counted(call: Callable[[], Any], large: int) -> dict[str, Any]:
    """The collectives of one call: bytes, number from a size on and below, and aten operators."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        call()
    found = {"large": 0, "small": 0, "bytes": 0, "operators": 0}
    for event in profiled.events() or ():
        if event.name.startswith("gloo:"):
            sizes = [torch.Size(shape).numel() for shape in event.input_shapes if shape]
            count = max(sizes, default=0)
            found["large" if count >= large else "small"] += 1
            found["bytes"] += 4 * count
        found["operators"] += event.name.startswith("aten::")
    return found


def timed(
    calls: Mapping[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of a call in each round, on the slower rank, and CPU seconds of both."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    numbers = {}
    for name, call in calls.items():
        call()
        begun = time.perf_counter()
        call()
        taken = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        numbers[name] = max(1, round(BLOCK / float(taken)))
    order, shuffled = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            dist.barrier()
            begun, busy = time.perf_counter(), time.process_time()
            for _ in range(numbers[name]):
                calls[name]()
            taken = torch.tensor([time.perf_counter() - begun, time.process_time() - busy])
            every = [torch.empty(2) for _ in range(dist.get_world_size())]
            dist.all_gather(every, taken)
            wall[name].append(max(float(x[0]) for x in every) / numbers[name])
            cpu[name].append(sum(float(x[1]) for x in every) / numbers[name])
    return wall, cpu


def busy() -> float:
    """CPU seconds that the machine has worked."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def rank_of(options: argparse.Namespace) -> dict[str, Any]:
    """What one rank finds for one model and shape."""
    from peers import make

    tokens = batch(options.shape)
    folder = options.rank / "model"
    original = whole(options.model, options.layers, options.width, options.key_heads)
    if dist.get_rank() == 0:
        original.save_pretrained(folder)
    dist.barrier()
    variants, failed = {}, {}
    for name in options.variants:
        try:
            variants[name] = make(name, options.model, lambda: copy.deepcopy(original), folder)
            variants[name].prepare(tokens)
            variants[name].step(tokens)
        except Exception as error:  # a peer that does not run is a row that says so
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            variants.pop(name, None)
    true = {name: v for name, v in variants.items() if name != "no communication"}
    found: dict[str, Any] = {"failed": failed, "errors": errors(true, options.model, tokens)}
    before, own = busy(), time.process_time()
    for phase in ("step", "infer"):
        calls = {name: call_of(variant, phase, tokens) for name, variant in variants.items()}
        counts = {
            name: counted(call, tokens.numel() * options.width) for name, call in calls.items()
        }
        wall, cpu = timed(calls, options.rounds)
        found[phase] = {"wall": wall, "cpu": cpu, "collectives": counts}
    mine = torch.tensor(time.process_time() - own)
    dist.all_reduce(mine)
    found["foreign"] = max(0.0, busy() - before - float(mine))
    return found


def memory_of(options: argparse.Namespace) -> dict[str, float]:
    """How far one variant's anonymous memory rises, in MB: its weights, and three steps. And its
    tensors: weights, and the most that a step allocates on top."""
    from ctypes import CDLL

    from allocations import allocated, collectives_wait
    from load_memory import anonymous, growth
    from peers import make

    def tidy() -> float:
        gc.collect()
        CDLL("libc.so.6").malloc_trim(0)
        return anonymous()

    tokens, folder = batch(options.shape), options.rank / "model"
    original = whole(options.model, options.layers, options.width, options.key_heads)
    if dist.get_rank() == 0:
        original.save_pretrained(folder)
    dist.barrier()
    size = sum(p.nbytes for p in original.parameters()) / 2**20
    held, name = [copy.deepcopy(original), original], options.variants[0]
    del original
    make(name, options.model, held.pop, folder).step(tokens)  # what is made once is no part of it
    before = tidy() - size  # without the copy that the variant is made from
    variant = make(name, options.model, held.pop, folder)
    found = {"model": tidy() - before}
    with growth(found, "steps"):
        for _ in range(3):
            variant.model.zero_grad(set_to_none=True)
            variant.step(tokens)
    collectives_wait()
    variant.model.zero_grad(set_to_none=True)
    weights = {p.to_local() if hasattr(p, "to_local") else p for p in variant.model.parameters()}
    peak = allocated(lambda: variant.step(tokens))["peak"]
    found["tensors"] = (sum(weight.nbytes for weight in weights) + peak) / 2**20
    return found


def call_of(variant: Any, phase: str, tokens: torch.Tensor) -> Callable[[], Any]:
    """A training step without the optimizer, or a forward pass."""

    def step() -> None:
        variant.model.zero_grad(set_to_none=True)
        variant.step(tokens)

    return step if phase == "step" else lambda: variant.infer(tokens)
