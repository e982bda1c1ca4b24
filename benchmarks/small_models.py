"""A small valid model of any Hugging Face type, with all its structural features kept.

Sizes are found in a default configuration by the names of its attributes and shrunk alike: 6 heads,
3 key heads where the type has grouped queries, two layers of each kind of layer, 4 experts, a
sliding window shorter than the example. What cannot be known from a name stands in `OVERRIDES`, as
data.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WIDTH, INNER, HEADS, KV_HEADS, SIZE, VOCABULARY, EXPERTS, LAYERS = 48, 60, 6, 3, 8, 257, 4, 2
OTHERS = {
    "bert-masked": ("bert", "BertForMaskedLM"),
    "roberta-masked": ("roberta", "RobertaForMaskedLM"),
    "albert": ("albert", "AlbertForMaskedLM"),
    "distilbert": ("distilbert", "DistilBertForMaskedLM"),
    "deberta-v2": ("deberta-v2", "DebertaV2ForMaskedLM"),
    "modernbert": ("modernbert", "ModernBertForMaskedLM"),
    "t5": ("t5", "T5ForConditionalGeneration"),
    "bart-seq2seq": ("bart", "BartForConditionalGeneration"),
    "marian-seq2seq": ("marian", "MarianMTModel"),
    "whisper-seq2seq": ("whisper", "WhisperForConditionalGeneration"),
    "vit": ("vit", "ViTForImageClassification"),
    "clip": ("clip", "CLIPModel"),
    "wav2vec2": ("wav2vec2", "Wav2Vec2ForCTC"),
}
# the first pattern that an attribute's whole name matches decides its value
PATTERNS: tuple[tuple[str, int], ...] = (
    (r"vocab_size.*|.*_vocab_size|decoder_vocab_size|n_words", VOCABULARY),
    (r"(num_key_value|num_kv|multi_query_group|num_attention_kv|n_kv).*(heads|groups)?", KV_HEADS),
    (r"n_head_kv", KV_HEADS),
    (r"index_n_heads", HEADS),
    (r"index_topk", 4),
    (r"mamba_d_state|ssm_state_size|state_size", 8),
    (
        r"(num_|n_|encoder_|decoder_|.*_num_)?(attention_)?(heads?|n_heads?)|num_attention_heads",
        HEADS,
    ),
    (r".*num_(attention_)?heads|linear_num_(key|value)_heads", HEADS),
    (r"(num_|n_|encoder_|decoder_)(hidden_)?layers?|.*num_hidden_layers|num_blocks", LAYERS),
    (r"(moe_|.*shared_.*|expert_)?(intermediate|ffn_hidden|ffn)_(size|dim)|d_ff|n_inner", INNER),
    (r"(encoder|decoder)_ffn_dim|ffn_hidden_size|feed_forward_size|moe_.*intermediate.*", INNER),
    (r".*intermediate_size(_mlp)?|dim_ff|d_inner|mlp_dim", INNER),
    (r"head_dim|attention_head_size|kv_channels|d_kv|attention_head_dim|d_head|.*head_dim", SIZE),
    (r"(hidden|embedding|model|embed|input)_(size|dim)|d_model|n_embd|n_embed|dim|emb_dim", WIDTH),
    (r"word_embed_proj_dim|cross_attention_hidden_size|lru_width|projection_dim", WIDTH),
    (r"(num_|n_|moe_num_)(local_|routed_)?experts|num_local_experts|ffn_num_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts", 2),
    (r"n_group|n_groups_moe", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers|n_dense_layers", 1),
    (
        r"(max|n)_(position_embeddings|positions|ctx|seq_len|sequence_length)|seq_length|n_positions",
        64,
    ),
    (r"max_(source|target|seq)_.*|max_position.*|context_length", 64),
    (r"sliding_window|attention_window.*|window_size|local_attention", 4),
    (r"rotary_dim|(mamba_)?chunk_size", 4),
    (r"kv_lora_rank", 12),
    (r"q_lora_rank", 16),
    (r"qk_nope_head_dim|v_head_dim", SIZE),
    (r"qk_rope_head_dim", 4),
    (r"image_size", 16),
    (r"patch_size", 8),
)
IMAGES = ("git",)  # language models that take no call without an image
LAYER_COUNT = r"num_hidden_layers|n_layers?|num_layers|num_blocks"
# per type: what the names do not tell
_GLOBAL_AND_LOCAL = ["sliding_attention", "full_attention"] * 2
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 2, "n_group": 2, "topk_group": 1},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "blt_local_encoder": {"hidden_size_global": WIDTH},
    "blt_local_decoder": {"hidden_size_global": WIDTH},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    "dots3_note_audio_encoder": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": HEADS, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": _GLOBAL_AND_LOCAL,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "intermediate_size": [INNER] * 4,
        "hidden_size_per_layer_input": 12,
        "laurel_rank": 8,
    },
    **{
        kind: {
            "num_hidden_layers": 4,
            "layer_types": _GLOBAL_AND_LOCAL,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 12,
        }
        for kind in ("gemma4_text", "gemma4_unified_text")
    },
    "hunyuan_v1_dense": {"head_dim": SIZE},
    "hunyuan_v1_moe": {"head_dim": SIZE},
    "ministral": {"head_dim": SIZE},
    **{
        kind: {
            "num_key_value_heads": KV_HEADS,
            "swa_num_attention_heads": HEADS,
            "swa_num_key_value_heads": KV_HEADS,
            "swa_head_dim": SIZE,
            "sliding_window_size": 4,
        }
        for kind in ("inkling_text", "inkling2_text", "inkling2_loop_text")
    },
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": SIZE,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 32),
        "axial_pos_shape": (8, 8),
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * SIZE,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": HEADS,
        "mamba_headdim": 16,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * SIZE,
    },
    "bamba": {"mamba_n_heads": HEADS, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_key_value_heads": HEADS, "num_experts_per_tok": 2},
    "diffllama": {"num_key_value_heads": 2},
    "dory": {  # its to_dict counts attention and MLP as layers of their own
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        "mamba_n_heads": HEADS,
        "mamba_d_head": 16,
        "layer_types": ["mamba", "attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"head_dim": 16, "num_heads": HEADS, "n_groups": 3},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "nemotron_h": {"n_groups": 3, "mamba_num_heads": HEADS, "mamba_head_dim": 16},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "deepseek_v3": {"num_key_value_heads": HEADS},
    "codegen": {"n_head": 8, "n_embd": 64},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "t5": {"decoder_start_token_id": 0},
}


def types() -> list[str]:
    """Every type that can be asked for: all causal language models, then the others."""
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OTHERS]


def configuration_of(kind: str) -> Any:
    """The configuration class of a type."""
    return CONFIG_MAPPING[OTHERS[kind][0] if kind in OTHERS else kind]


def small_model(kind: str) -> nn.Module:
    """A float32 model of a type, with random weights in which faults show."""
    config_type, name = OTHERS.get(kind) or (kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config = small_config(CONFIG_MAPPING[config_type], config_type)
    wanted = model_class.config_class
    if wanted is not None and not isinstance(config, wanted):
        nested = (c for c in vars(config).values() if isinstance(c, wanted))
        config = next(nested, None) or small_config(wanted, wanted.model_type)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = model_class(config).float()
    return salted(model)


def salted(model: nn.Module) -> nn.Module:
    """Every parameter refilled: no zero biases, no norm weights of one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.1 * noise)
            else:
                first = float(parameter.flatten()[0])
                if first and bool((parameter == first).all()):  # a scale, of a size that matters
                    parameter.copy_(first * (1 + 0.3 * noise))
                else:
                    parameter.copy_((1 if name.endswith("weight") else 0) + 0.3 * noise)
    return model


def small_config(config_class: Any, kind: str = "") -> Any:
    """A small configuration of a class; configurations nested in it are shrunk as well."""
    default = config_class()
    values = _shrunk(default.to_dict())
    for name, value in vars(default).items():
        if isinstance(value, transformers.PretrainedConfig):
            nested = small_config(type(value), value.model_type)
            values[name] = nested.to_dict()
    for name, value in OVERRIDES.get(kind, {}).items():
        values[name] = value
    accepted = set(inspect.signature(config_class.__init__).parameters) | set(values)
    return config_class(**{k: v for k, v in values.items() if k in accepted})


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Top-level values made small; nested dicts are made anew, or fit any size (rotary ones)."""
    grouped = values.get("kv_lora_rank") is None
    skipped = ("transformers_version", "model_type", "_name_or_path", "architectures")
    counts = {n: v for n, v in values.items() if re.fullmatch(LAYER_COUNT, n) and v}
    lists = {
        name: value
        for name, value in values.items()
        if isinstance(value, (list, tuple)) and value and len(value) in counts.values()
    }
    result = {
        name: _value(name, value, grouped)
        for name, value in values.items()
        if name not in skipped and not isinstance(value, dict)
    }
    if lists:
        kept = _layers_of_each_kind(list(lists.values()))
        for name, value in lists.items():
            single = name.removesuffix("_per_layer")
            result[name] = [_value(single, value[i], grouped) for i in kept]
        for name in counts:
            result[name] = len(kept)
    return result


def _layers_of_each_kind(lists: list[Any]) -> list[int]:
    """The first layer of each kind that per-layer lists tell apart: two to four layers."""
    kinds: dict[str, int] = {}
    for index, kind in enumerate(zip(*lists, strict=False)):
        kinds.setdefault(repr(kind), index)
    kept = sorted(kinds.values())[:4]
    return kept if len(kept) > 1 else [0, 1]


def _value(name: str, value: Any, grouped: bool) -> Any:
    if "drop" in name and isinstance(value, float):
        return 0.0
    if name.endswith("token_id") and isinstance(value, int):
        return value if 0 <= value < 8 else (3 if value > 0 else value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, small in PATTERNS:
        if re.fullmatch(pattern, name):
            if small == KV_HEADS and "head" in pattern and (value == 1 or not grouped):
                return 1 if value == 1 else HEADS
            return min(small, value) if small in (2, 1) else small
    return value


def example_call(model: nn.Module) -> dict[str, Any]:
    """Keywords of one call: tokens, pixels or features, and labels where the model takes them."""
    accepted = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(10, VOCABULARY - 7, shape, generator=generator)

    call: dict[str, Any] = {}
    config: Any = model.config
    match getattr(model, "main_input_name", "input_ids"):
        case "pixel_values":
            side = config.image_size
            call["pixel_values"] = torch.randn(2, 3, side, side, generator=generator)
        case "input_features" if hasattr(config, "num_mel_bins"):
            length = 2 * config.max_source_positions
            call["input_features"] = torch.randn(
                2, config.num_mel_bins, length, generator=generator
            )
            call["decoder_input_ids"] = tokens(2, 7)
        case "input_values":
            call["input_values"] = torch.randn(2, 2000, generator=generator)
        case _:
            call["input_ids"] = tokens(2, 7)
    if config.model_type in IMAGES:
        call["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator)
    if "pixel_values" in accepted and "return_loss" in accepted:  # pairs of image and text
        call["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator)
        call["return_loss"] = True
    if codebooks := getattr(getattr(config, "decoder", config), "num_codebooks", 0):
        call["input_ids"] = tokens(2 * codebooks, 7)
    if "labels" in accepted and "input_ids" in call:
        call["labels"] = call["input_ids"].clone()
        if getattr(config, "is_encoder_decoder", False):
            call["labels"] = tokens(2, 5)
        if codebooks:
            call["labels"] = tokens(2, 7, codebooks)
    if "use_cache" in accepted:
        call["use_cache"] = False
    return call
