"""GPT-2 with tensor parallelism by hand, as Megatron-LM writes it: fused GELU, causal flag."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron_layers import Column, Embedding, Row, copy_to_region, heads, joined, loss_of
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual."""

    def __init__(self, block: Any, size: int) -> None:
        super().__init__()
        self.size = size
        self.ln_1, self.ln_2 = _norm(block.ln_1), _norm(block.ln_2)
        qkv, out = block.attn.c_attn, block.attn.c_proj
        self.qkv = Column(qkv.weight.detach().T, qkv.bias.detach(), pieces=3)
        self.out = Row(out.weight.detach().T, out.bias.detach())
        up, down = block.mlp.c_fc, block.mlp.c_proj
        self.up = Column(up.weight.detach().T, up.bias.detach())
        self.down = Row(down.weight.detach().T, down.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(copy_to_region(self.ln_1(x))).chunk(3, -1)
        q, k, v = (heads(part, self.size) for part in parts)
        x = x + self.out(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        up = self.up(copy_to_region(self.ln_2(x)))
        return x + self.down(F.gelu(up, approximate="tanh"))


class MegatronGPT2(nn.Module):
    """The model with this rank's parts of a whole one's weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        core, config = model.transformer, model.config
        self.words = Embedding(core.wte.weight.detach())
        self.places = nn.Parameter(core.wpe.weight.detach().clone())
        size = config.n_embd // config.n_head
        self.blocks = nn.ModuleList(Block(block, size) for block in core.h)
        self.norm = _norm(core.ln_f)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss, or this rank's part of the logits without labels."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + F.embedding(places, self.places)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(copy_to_region(self.norm(x)), self.words.weight)
        return logits if labels is None else loss_of(logits, labels)

    def gradients(self) -> dict[str, tuple[Tensor | None, int | None]]:
        """Some gradients under the original's names, and the dim that they are split in."""
        first = self.blocks[0]
        assert isinstance(first, Block)
        down = first.down.weight.grad
        return {
            "transformer.wte.weight": (self.words.weight.grad, 0),
            "transformer.wpe.weight": (self.places.grad, None),
            "transformer.h.0.ln_1.weight": (first.ln_1.weight.grad, None),
            "transformer.h.0.mlp.c_proj.weight": (None if down is None else down.T, 0),
            "transformer.ln_f.bias": (self.norm.bias.grad, None),
        }


def _norm(norm: Any) -> nn.LayerNorm:
    made = nn.LayerNorm(norm.normalized_shape, norm.eps)
    made.load_state_dict(norm.state_dict())
    return made
