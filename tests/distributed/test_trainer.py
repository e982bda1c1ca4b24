"""The Trainer of transformers trains a parallel model as it trains the model itself."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import autotp
from autotp.runtime.sharded import local
from tests.distributed.cases import tokens
from tests.models import refill, tiny_gpt2
from tests.spawn import run

pytestmark = pytest.mark.dist
STEPS, SAVED = 8, 4
ROWS = 40  # of the data set: a step takes 8 of them, so it is gone through more than once


def model_of() -> Any:
    """Three heads of 8: two ranks hold two and one."""
    return refill(tiny_gpt2(n_head=3, n_embd=24)).train()


def rows(seed: int, count: int, ignored: int = 5) -> list[dict[str, Tensor]]:
    """Sequences whose beginnings are no targets, of different lengths below `ignored`."""
    found = []
    for number, x in enumerate(tokens(count, 12, seed=seed)):
        labels = x.masked_fill(torch.arange(12) < number % ignored, -100)
        found.append({"input_ids": x, "labels": labels, "unused": x})
    return found


def arguments(folder: Path, each: int, **options: Any) -> transformers.TrainingArguments:
    """Global batches of 8, in two micro batches of `each` on every data-parallel process."""
    return transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=each,
        per_device_eval_batch_size=each,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        logging_nan_inf_filter=False,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        **options,
    )


def spread(prediction: Any) -> dict[str, float]:
    """Of the logits, and of how many samples there are some."""
    found = prediction.predictions
    return {"spread": float(found.std()), "samples": len(found), "first": float(found[0, 0, 0])}


def history(trainer: Any) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of each step."""
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return [(log["loss"], log["grad_norm"], log["learning_rate"]) for log in logs]


def trained(kind: Any, model: Any, folder: Path, each: int, **resume: Any) -> dict[str, Any]:
    trainer = kind(
        model,
        arguments(folder, each),
        train_dataset=rows(0, ROWS),
        eval_dataset=rows(1, 11, 1),
        compute_metrics=spread,
    )
    trainer.train(**resume)
    scores = trainer.evaluate()
    kept = ("eval_loss", "eval_spread", "eval_samples", "eval_first")
    return {"history": history(trainer), "scores": {name: scores[name] for name in kept}}


def refused(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_ranks(rank: int, world: int, folder: Path, tp: int) -> dict[str, Any]:
    from autotp.trainer import Trainer

    each = 4 * tp // world
    seen: dict[str, Any] = {}
    model: Any = autotp.parallelize(model_of(), tp=tp)
    own = inspect.signature(type(model.skeleton).forward)
    seen["signature"] = inspect.signature(type(model).forward) == own
    seen["trained"] = trained(Trainer, model, folder / "run", each)
    if world > tp:
        return seen
    again: Any = autotp.parallelize(refill(model_of(), 9), tp=tp)
    last = str(folder / "run" / f"checkpoint-{SAVED}")
    seen["resumed"] = trained(Trainer, again, folder / "again", each, resume_from_checkpoint=last)
    ends = zip(model.parameters(), again.parameters(), strict=True)
    seen["same end"] = all(torch.equal(local(a), local(b)) for a, b in ends)
    seen["plain"] = refused(
        lambda: transformers.Trainer(model, arguments(folder / "plain", each), train_dataset=[])
    )
    seen["not parallel"] = refused(lambda: Trainer(model_of()))
    seen["ddp"] = refused(lambda: DistributedDataParallel(model))
    fresh: Any = autotp.parallelize(model_of(), tp=tp)
    seen["accelerate"] = refused(lambda: accelerate.Accelerator(cpu=True).prepare(fresh))
    seen["loop"] = loop(fresh, each)
    return seen


def loop(model: Any, each: int) -> list[float]:
    """A training loop as accelerate's documentation has it."""
    from autotp.trainer import Accelerator

    accelerator = Accelerator(cpu=True)
    data = DataLoader(rows(0, ROWS), batch_size=2 * each)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, model, optimizer = accelerator.prepare(data, model, optimizer)
    found = []
    for x in data:
        out = model(input_ids=x["input_ids"], labels=x["input_ids"])
        accelerator.backward(out.loss)
        found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def plain_loop(model: Any) -> list[float]:
    """The norms of the same loop without accelerate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for x in DataLoader(rows(0, ROWS), batch_size=8):  # type: ignore[arg-type]
        model(input_ids=x["input_ids"], labels=x["input_ids"]).loss.backward()
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process trains the unsharded model."""
    folder = tmp_path_factory.mktemp("one")
    found = trained(transformers.Trainer, model := model_of(), folder, 4)
    return found | {"end": model.state_dict(), "loop": plain_loop(model_of())}


@pytest.mark.parametrize("world", [2, 4])
def test_the_trainer_trains_as_it_trains_the_model(
    world: int, wanted: dict[str, Any], tmp_path: Path
) -> None:
    for seen in run(on_ranks, world, tmp_path, 2, timeout=300):
        for name in ("trained", "resumed") if world == 2 else ("trained",):
            found = seen[name]
            assert len(found["history"]) == STEPS
            for step, pair in enumerate(zip(found["history"], wanted["history"], strict=True)):
                assert pair[0] == pytest.approx(pair[1], rel=1e-5), f"{name}, step {step}"
            scores = found["scores"] | {"eval_loss": wanted["scores"]["eval_loss"]}
            assert scores == pytest.approx(wanted["scores"], rel=1e-4), name
            assert scores["eval_samples"] == 11
            # Trainer weighs batches, not samples, and two processes fill the last batch up
            loss, limit = found["scores"]["eval_loss"], 1e-5 if world == 2 else 1e-2
            assert loss == pytest.approx(wanted["scores"]["eval_loss"], rel=limit), name
        assert seen["signature"]
    saved = tmp_path / "run" / f"checkpoint-{STEPS}"
    again, info = type(model_of()).from_pretrained(saved, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in again.state_dict().items():
        if not name.endswith("c_attn.bias"):  # a key's bias has no gradient but rounding
            torch.testing.assert_close(tensor, wanted["end"][name], rtol=0, atol=1e-4)
    if world == 2:
        judge(seen, wanted["loop"])


def judge(seen: dict[str, Any], wanted: list[float]) -> None:
    assert seen["same end"], "resumed to the bit"
    assert seen["loop"] == pytest.approx(wanted, rel=1e-5)
    assert "distributed_config" in seen["plain"], "transformers.Trainer does not begin"
    assert "this Trainer is for parallel models" in seen["not parallel"]
    for name in ("ddp", "accelerate"):
        assert "DistributedDataParallel over ranks that share the model" in seen[name], name
