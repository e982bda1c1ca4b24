"""A GPT-2 in plain PyTorch that knows nothing of Hugging Face, parallelized by the same call.

    python examples/nanogpt.py                                        # print the plan for 4 ranks
    torchrun --standalone --nproc-per-node 2 examples/nanogpt.py      # train a few steps on 2 ranks

The losses are those of one rank, up to rounding.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autotp


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model."""

    vocab: int = 257
    context: int = 64
    layers: int = 2
    heads: int = 6
    width: int = 48
    bias: bool = True
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.heads, self.width, self.dropout = config.heads, config.width, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(self.width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(y.transpose(1, 2).contiguous().view(batch, time, width))


class MLP(nn.Module):
    """Two layers with a GELU between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A decoder with learned positions; input and output embeddings are one matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.vocab, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tok.weight
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.tok(idx) + self.pos(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        flat = logits.view(-1, logits.shape[-1])
        return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=-1)


def main() -> None:
    """Print the plan, or train as one rank."""
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT(GPTConfig())
    idx = torch.randint(model.config.vocab, (4, 32))
    targets = torch.randint(model.config.vocab, (4, 32))
    if "RANK" not in os.environ:
        print(autotp.plan(model, tp=4, example_inputs=(idx, targets)))
        return
    tp = autotp.parallelize(model, example_inputs=(idx, targets))
    optimizer = torch.optim.AdamW(tp.parameters(), lr=1e-2)
    for step in range(10):
        _, loss = tp(idx, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if tp.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
