"""Llama with tensor parallelism by hand, as Megatron-LM writes it: one f for q, k and v, one for
gate and up, the causal flag, torch's RMS norm."""

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
        self.norm_1 = _norm(block.input_layernorm)
        self.norm_2 = _norm(block.post_attention_layernorm)
        mix, mlp = block.self_attn, block.mlp
        self.q, self.k, self.v = (
            Column(p.weight.detach()) for p in (mix.q_proj, mix.k_proj, mix.v_proj)
        )
        self.out = Row(mix.o_proj.weight.detach())
        self.gate, self.up = (
            Column(mlp.gate_proj.weight.detach()),
            Column(mlp.up_proj.weight.detach()),
        )
        self.down = Row(mlp.down_proj.weight.detach())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        entered = copy_to_region(self.norm_1(x))
        q, k, v = (heads(linear(entered), self.size) for linear in (self.q, self.k, self.v))
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.out(joined(mixed))
        entered = copy_to_region(self.norm_2(x))
        return x + self.down(F.silu(self.gate(entered)) * self.up(entered))


class MegatronLlama(nn.Module):
    """The model with this rank's parts of a whole one's weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        core, config = model.model, model.config
        self.words = Embedding(core.embed_tokens.weight.detach())
        size = config.hidden_size // config.num_attention_heads
        self.blocks = nn.ModuleList(Block(block, size) for block in core.layers)
        self.norm = _norm(core.norm)
        self.head = Column(model.lm_head.weight.detach())
        self.register_buffer("frequencies", core.rotary_emb.inv_freq.clone(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss, or this rank's part of the logits without labels."""
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        assert isinstance(self.frequencies, Tensor)
        angles = torch.outer(places, self.frequencies)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(copy_to_region(self.norm(x)))
        return logits if labels is None else loss_of(logits, labels)

    def gradients(self) -> dict[str, tuple[Tensor | None, int | None]]:
        """Some gradients under the original's names, and the dim that they are split in."""
        first = self.blocks[0]
        assert isinstance(first, Block)
        return {
            "model.embed_tokens.weight": (self.words.weight.grad, 0),
            "model.layers.0.input_layernorm.weight": (first.norm_1.weight.grad, None),
            "model.layers.0.self_attn.q_proj.weight": (first.q.weight.grad, 0),
            "model.layers.0.mlp.down_proj.weight": (first.down.weight.grad, 1),
            "model.norm.weight": (self.norm.weight.grad, None),
        }


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def _norm(norm: Any) -> nn.RMSNorm:
    made = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
    made.load_state_dict(norm.state_dict())
    return made
