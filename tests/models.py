"""Small models as functions, each with one structure.

All take values [batch, seq, WIDTH], unless said. Shares are unequal on purpose: 5 heads over 2, 3
or 4 ranks, 10 inner features over 3 or 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

WIDTH, INNER, HEADS, SIZE = 12, 10, 5, 4  # stream of values, MLP, number of heads, of each head
VOCABULARY = 11


def refill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every parameter in place, so that faults show: no zero biases, no norm weights of one.

    A tied parameter is filled once. Numbers are drawn in float64: the same ones for every dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied one comes once
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                noise = 0.1 * noise
            elif name.rpartition(".")[2] == "weight":  # of a norm
                noise = 1 + 0.3 * noise
            else:
                noise = 0.3 * noise
            parameter.copy_(noise)
    return model


def mlp() -> nn.Module:
    """Linear, GELU, Linear, behind a norm and beside the residual."""
    return Residual(nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)))


def gated_mlp() -> nn.Module:
    """Two column products multiplied, one row product."""
    return Function(
        lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)),
        gate=nn.Linear(WIDTH, INNER, bias=False),
        up=nn.Linear(WIDTH, INNER, bias=False),
        down=nn.Linear(INNER, WIDTH, bias=False),
    )


def attention(*, fused: bool = True, eager: bool = False) -> nn.Module:
    """Causal attention: one matrix or three for q, k and v; written out, or one operator."""
    return Residual(Attention(fused=fused, mix=_eager if eager else _causal))


def gqa_attention(how: Literal["expand", "enable_gqa"] = "expand") -> nn.Module:
    """Three key heads serve six query heads."""
    return Residual(Attention(fused=False, heads=6, kv_heads=3, mix=MIXES[how]))


def linear_norm_linear() -> nn.Module:
    """No pair: the norm needs all features of the first product."""
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.LayerNorm(INNER), nn.Linear(INNER, WIDTH))


def linear_softmax_linear() -> nn.Module:
    """No pair: the softmax needs all features of the first product."""
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.Softmax(dim=-1), nn.Linear(INNER, WIDTH))


def column_read_twice() -> nn.Module:
    """One column output read by two row products."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(m.up(x))
        return m.down(h), m.side(h)

    up, down, side = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(INNER, 3)
    return Function(forward, up=up, down=down, side=side)


def reshape_mixes_axis() -> nn.Module:
    """No pair: a view lays features over positions."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.up(x)
        return m.down(h.reshape(h.shape[0], h.shape[2], h.shape[1]).transpose(1, 2))

    return Function(forward, up=nn.Linear(WIDTH, INNER), down=nn.Linear(INNER, WIDTH))


def tied_head() -> nn.Module:
    """Embedding and output product share their matrix; takes tokens, and targets for a loss."""

    def forward(m: Any, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Any]:
        logits = m.head(m.norm(m.embed(tokens)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = embed.weight
    return Function(forward, embed=embed, norm=nn.LayerNorm(WIDTH), head=head)


def tiny_gpt2(**overrides: Any) -> GPT2LMHeadModel:
    """Hugging Face's GPT-2: 2 layers, 12 heads of 4, random weights, no dropout; takes tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config: dict[str, Any] = {
        "n_layer": 2,
        "n_head": 12,
        "n_embd": 48,
        "n_positions": 64,
        "vocab_size": 257,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **overrides,
    }
    last = config["vocab_size"] - 1  # the default, 50256, is no token here
    return GPT2LMHeadModel(GPT2Config(**{"bos_token_id": last, "eos_token_id": last, **config}))


class Function(nn.Module):
    """A function of the modules given by name."""

    def __init__(self, call: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Tensor) -> Any:
        return self.call(self, *args)


class Residual(nn.Module):
    """A block behind a norm and beside the residual."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.norm(x))


class Attention(nn.Module):
    """Projections and heads; `mix` is what happens between the products."""

    def __init__(
        self,
        *,
        fused: bool,
        mix: Callable[[Tensor, Tensor, Tensor], Tensor],
        heads: int = HEADS,
        kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.widths = [SIZE * count for count in (heads, kv_heads or heads, kv_heads or heads)]
        self.mix = mix
        if fused:
            self.qkv: nn.Module | None = nn.Linear(WIDTH, sum(self.widths))
        else:
            self.qkv = None
            self.q, self.k, self.v = (nn.Linear(WIDTH, width) for width in self.widths)
        self.out = nn.Linear(self.widths[0], WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            self.qkv(x).split(self.widths, -1)
            if self.qkv is not None
            else (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (part.view(*x.shape[:2], -1, SIZE).transpose(1, 2) for part in parts)
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-2, -1) / SIZE**0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def _enable_gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _causal(q, _many(k), _many(v))


def _many(x: Tensor) -> Tensor:
    batch, heads, seq, size = x.shape  # each key head stands twice, side by side
    return x[:, :, None].expand(batch, heads, 2, seq, size).reshape(batch, 2 * heads, seq, size)


MIXES = {"expand": _expand, "enable_gqa": _enable_gqa}
