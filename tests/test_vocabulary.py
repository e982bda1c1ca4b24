"""The vocabulary is split: embedding, head and loss of whole models, with every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autotp
from autotp.runtime.outputs import ShardedOutput, ShardedOutputError
from tests.models import tiny_gpt2
from tests.oneprocess import assert_same, parallels, refill

VOCAB, WIDTH = 257, 12


class Head(nn.Module):
    """Embedding, a norm, and a head with a loss, in one of the forms that models have."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Embedding(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=form == "bias")
        if form == "tied":
            self.head.weight = self.tok.weight
        self.register_buffer(
            "weights", torch.rand(VOCAB, generator=torch.Generator().manual_seed(5))
        )

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.norm(x))
        if self.form == "scaled":
            logits = logits * 0.3
        if self.form == "softcap":
            logits = torch.tanh(logits / 5) * 5
        flat, wanted = logits.view(-1, VOCAB), targets.view(-1)
        options: dict[str, Any] = {"ignore_index": -1}
        if self.form == "smoothed":
            options |= {"label_smoothing": 0.1}
        if self.form == "weighted":
            options |= {"weight": self.weights}
        if self.form == "two steps":
            return logits, F.nll_loss(F.log_softmax(flat, -1), wanted, **options)
        if self.form == "two steps":
            return logits, F.nll_loss(F.log_softmax(flat, -1), wanted, **options)
        if self.form == "per token":
            loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", **options)
            return logits, loss.sum() / 7
        if self.form == "summed":
            options |= {"reduction": "sum"}
        return logits, F.cross_entropy(flat, wanted, **options)


def batch(rows: int = 3, length: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(VOCAB, (rows, length), generator=generator)
    targets = torch.randint(VOCAB, (rows, length), generator=generator)
    targets[0, :2] = -1
    return idx, targets


FORMS = (
    *("tied", "untied", "bias", "scaled", "softcap", "smoothed"),
    *("weighted", "per token", "summed", "two steps"),
)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_head_and_loss_is_split_and_exact(form: str) -> None:
    model = refill(Head(form).double())
    for lockstep in parallels(model, (2, 3, 4, 8), batch()):
        plan = lockstep.plan
        assert plan.is_sharded("tok.weight") and not plan.is_sharded("pos.weight")
        assert form == "tied" or plan.is_sharded("head.weight")
        assert plan.collectives.loss == 2 and plan.collectives.forward == 1
        assert_same(model, lockstep, batch(2, 9))


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_is_exact_tied_and_untied(tied: bool) -> None:
    if tied:
        model: nn.Module = refill(tiny_gpt2())
    else:
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=VOCAB,
            tie_word_embeddings=False,
        )
        model = refill(LlamaForCausalLM(config))
    for tp in (3, 8):
        report = autotp.verify(model, tp)
        report.raise_if_failed()
        vocabulary = [axis for axis in report.plan.axes if axis.kind == "vocabulary"]
        assert len(vocabulary) == (1 if tied else 2)
        assert all(axis.units == VOCAB for axis in vocabulary)


def test_a_tied_table_stays_one_parameter() -> None:
    lockstep = autotp.parallelize(tiny_gpt2(), devices=["cpu"] * 2)
    for rank in lockstep.ranks:
        assert rank.lm_head.weight is rank.transformer.wte.weight


def test_the_shares_of_gpt2_are_exact() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    plan = autotp.plan(model, tp=8)
    share = {axis.kind: max(axis.widths) for axis in plan.axes}
    assert share == {"vocabulary": 6283, "attention": 2, "mlp": 384}
    layer = 2 * 64 * 3 * (768 + 1) + 2 * 64 * 768 + 384 * (768 + 1) + 384 * 768
    whole = 1024 * 768 + 12 * (4 * 768 + 2 * 768) + 2 * 768  # positions, norms and row biases
    assert plan.parameters(0) == 6283 * 768 + 12 * layer + whole
    total = sum(p.numel() for p in model.parameters())
    quarter = autotp.plan(model, plan=None, tp=4).parameters(0)
    assert abs(quarter - ((total - whole) / 4 + whole)) <= 0.02 * total / 4


def test_storage_is_what_the_plan_says() -> None:
    lockstep = autotp.parallelize(tiny_gpt2(), devices=["cpu"] * 8)
    for number, rank in enumerate(lockstep.ranks):
        held = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in rank.parameters()
        }
        assert sum(held.values()) == lockstep.plan.parameter_bytes(number)


def test_labels_outside_the_vocabulary_raise_as_unsharded() -> None:
    model = tiny_gpt2()
    idx, _ = batch()
    labels = idx.clone()
    labels[0, 3] = VOCAB
    for one in (model, autotp.parallelize(model, devices=["cpu"] * 3)):
        with pytest.raises(IndexError, match="Target 257 is out of bounds"):
            one(idx, labels=labels)


def test_the_loss_counts_the_items_of_the_whole_batch() -> None:
    model = refill(tiny_gpt2())
    idx, _ = batch()
    lockstep = autotp.parallelize(model, devices=["cpu"] * 3)
    want = model(idx, labels=idx, num_items_in_batch=40).loss
    assert torch.allclose(lockstep(idx, labels=idx, num_items_in_batch=40).loss, want)


@pytest.mark.parametrize("policy", ["auto", "local", "gather"])
def test_what_leaves_the_module_follows_the_policy(policy: str) -> None:
    from autotp.build import build
    from autotp.options import Options
    from autotp.runtime.group import Group
    from autotp.skeleton import skeleton_of

    model = refill(Head("tied").double())
    skeleton, inputs = skeleton_of(model), batch()
    call = ((), dict(zip(("idx", "targets"), inputs, strict=True)))
    plan = autotp.plan(model, tp=3, example_inputs=call[1], logits=policy)
    rank = build(model, skeleton, plan, Group.in_process(3)[1], call, options=Options(policy))
    kept = {where.size for c in rank.captures for where in c.outputs.values()}
    assert kept == (set() if policy == "gather" else {VOCAB})
    assert plan.collectives.gathers == (1 if policy == "gather" else 0)


def test_split_logits_say_what_to_do() -> None:
    from autotp.runtime.group import Group
    from autotp.runtime.outputs import LocalOutput

    where = LocalOutput(1, (((0, 2),), ((2, 5),)), False)
    logits: Any = ShardedOutput(torch.zeros(4, 2), where, Group.in_process(2)[0])
    assert tuple(logits.shape) == (4, 5)
    for read in (lambda: logits.argmax(-1), lambda: torch.exp(logits), lambda: logits[0]):
        with pytest.raises(ShardedOutputError, match=r"logits\.gather\(\) on every rank"):
            read()
