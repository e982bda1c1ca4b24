"""Small models that generate, and what they are asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.models import refill

WORDS, WINDOW, NEW = 257, 12, 32
TOKENS: dict[str, Any] = {
    "vocab_size": WORDS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    **TOKENS,
}
GROUPED = {**WIDTHS, "num_key_value_heads": 4}
KINDS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=6, n_embd=24, n_positions=64, **TOKENS)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "window": lambda: MistralForCausalLM(
        MistralConfig(**{**GROUPED, "sliding_window": WINDOW, "num_hidden_layers": 2})
    ),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**WIDTHS)),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            forced_eos_token_id=None,
            decoder_start_token_id=2,
            **TOKENS,
        )
    ),
}
HEADS = {"gpt2": 6, "llama": 4, "window": 4, "neox": 8}  # of keys and values


def generator(kind: str) -> Any:
    """A model whose greedy tokens vary."""
    model: nn.Module = refill(KINDS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def prompt() -> dict[str, Tensor]:
    """Two prompts, the first padded at the left."""
    tokens = torch.randint(2, WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3], tokens[0, :3] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def written(model: Any, **how: Any) -> Any:
    """What a model generates, with the logits of every step."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    facts = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**prompt(), **{**options, **facts, **how})


def assert_same_text(found: Any, wanted: Any) -> None:
    """The same tokens, of logits within 1e-4; the tokens vary."""
    assert torch.equal(found.sequences, wanted.sequences)
    assert len(wanted.logits) == NEW
    for step, (mine, theirs) in enumerate(zip(found.logits, wanted.logits, strict=True)):
        assert (mine - theirs).abs().max() < 1e-4, step
    assert wanted.sequences[:, -NEW:].unique().numel() > NEW // 5
