"""Small models of several layouts, on the meta device too, and whether two of them are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import refill, tiny_gpt2

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def gpt2(**overrides: Any) -> nn.Module:
    """Tied table; query, key and value in one matrix, which is stored transposed."""
    return refill(tiny_gpt2(**{"n_layer": 1, **overrides}))


def llama() -> nn.Module:
    """Grouped queries: 3 key heads, which 2 ranks share unevenly; untied head; rotary table."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=3)
    return refill(LlamaForCausalLM(config))


def phi3() -> nn.Module:
    """Fused query, key and value of different widths, fused gate and up; 5 heads."""
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = SIZES | {"hidden_size": 40}
    config = Phi3Config(**sizes, num_attention_heads=5, num_key_value_heads=5)
    return refill(Phi3ForCausalLM(config))


FAMILIES = {"gpt2": gpt2, "llama": llama, "phi3": phi3}


def on_meta(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model built again from its configuration, without values."""
    with torch.device("meta"):
        return type(model)(model.config).to(dtype).train(model.training)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under each of its names."""
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return dict(every)


def differences(one: nn.Module, other: nn.Module) -> list[str]:
    """Names of tensors that the models do not share to the bit, dtype included."""
    return unlike(tensors(one), tensors(other))


def unlike(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names under which two dicts do not hold the same bits."""
    found = [f"only one has {name}" for name in mine.keys() ^ theirs.keys()]
    for name in mine.keys() & theirs.keys():
        a, b = mine[name], theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
            found.append(f"{name}: {a.dtype}{[*a.shape]} {b.dtype}{[*b.shape]}")
    return found


def batch() -> dict[str, Any]:
    """A call with a loss."""
    tokens = torch.randint(257, (2, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The losses of some steps."""
    losses = []
    for _ in range(steps):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
