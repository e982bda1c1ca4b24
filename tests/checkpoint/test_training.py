"""A run that was saved goes on as if it had not stopped, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import autotp
from autotp.checkpoint import training
from tests.checkpoint.families import FAMILIES, gpt2, tensors, train, unlike
from tests.models import refill


def split(model: Any, tp: int, **kwargs: Any) -> Any:
    return autotp.parallelize(model, devices=["cpu"] * tp, **kwargs)


def adamw(model: Any, rate: float = 1e-3) -> torch.optim.Optimizer:
    """Decay for matrices only, in groups of their own; moments that count."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.8, 0.95))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_with_another_number_of_ranks(family: str, tmp_path: Path) -> None:
    tp = split(FAMILIES[family](), 2)
    optimizer = adamw(tp)
    train(tp, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 5e-4
    autotp.save(tmp_path, tp, optimizer, extra={"step": 3, "best": [1.5, None]})
    kept = {name: p.clone() for name, p in tensors(tp).items()}
    wanted = train(tp, optimizer, 3)
    for ranks in (1, 2, 3):
        other = split(refill(FAMILIES[family](), 9), ranks)
        resumed = adamw(other, rate=1.0)
        assert autotp.load(tmp_path, other, resumed) == {"step": 3, "best": [1.5, None]}
        if ranks == 2:
            assert unlike(tensors(other), kept) == []
        assert [group["lr"] for group in resumed.param_groups] == [5e-4, 1e-3]
        assert train(other, resumed, 3) == pytest.approx(wanted, rel=1e-6)


def test_files_hold_whole_tensors_once(tmp_path: Path) -> None:
    model = gpt2()
    tp = split(model, 3)
    optimizer = adamw(tp)
    train(tp, optimizer, 1)
    autotp.save(tmp_path, tp, optimizer)
    found = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    shapes = {f"model.{n}": list(p.shape) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            shapes[f"optimizer.{name}.{key}"] = list(parameter.shape)
        shapes[f"optimizer.{name}.step"] = []
    stored = {n: list(t.size) for n, t in found.items() if hasattr(t, "size")}
    assert {n: s for n, s in stored.items() if not n.startswith("random.")} == shapes
    for name, size in stored.items():
        volumes = [torch.Size(chunk.sizes).numel() for chunk in found[name].chunks]
        assert sum(volumes) == torch.Size(size).numel(), name
    assert len(found["model.transformer.h.0.attn.c_attn.weight"].chunks) == 9
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert written < 3 * 4 * sum(p.numel() for p in model.parameters()) + 600_000


def test_random_numbers_go_on(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    tp = split(model, 2)
    optimizer = adamw(tp)
    train(tp, optimizer, 2)
    autotp.save(tmp_path, tp, optimizer)
    wanted, drawn = train(tp, optimizer, 3), torch.rand(3)
    torch.manual_seed(99)
    other = split(refill(gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1), 9), 2)
    train(other, adamw(other), 1)
    resumed = adamw(other)
    autotp.load(tmp_path, other, resumed)
    assert train(other, resumed, 3) == wanted
    assert torch.equal(torch.rand(3), drawn)


def test_a_state_without_optimizer_is_read_without_one(tmp_path: Path) -> None:
    tp = split(gpt2(), 2)
    autotp.save(tmp_path, tp)
    other = split(refill(gpt2(), 9), 3)
    assert autotp.load(tmp_path, other) is None
    assert unlike(other.full_state_dict(), tp.full_state_dict()) == []
    with pytest.raises(autotp.CheckpointError, match="the checkpoint has no optimizer"):
        autotp.load(tmp_path, other, adamw(other))


def test_an_optimizer_of_another_kind_or_form_is_refused(tmp_path: Path) -> None:
    tp = split(gpt2(), 2)
    optimizer = adamw(tp)
    train(tp, optimizer, 1)
    autotp.save(tmp_path, tp, optimizer)
    before = {name: p.clone() for name, p in tensors(tp).items()}

    def refused(optimizer: torch.optim.Optimizer) -> str:
        with pytest.raises(autotp.CheckpointError) as caught:
            autotp.load(tmp_path, tp, optimizer)
        return str(caught.value)

    assert "AdamW, here SGD" in refused(torch.optim.SGD(tp.parameters(), lr=0.1))
    assert "2 groups, here 1" in refused(torch.optim.AdamW(tp.parameters()))
    few = torch.optim.AdamW([p for p in tp.parameters() if p.dim() > 1])
    assert "transformer.ln_f.bias" in refused(few) or "and" in refused(few)
    text = refused(torch.optim.AdamW(gpt2().parameters()))
    assert "the optimizer has a parameter that the model does not have" in text
    assert unlike(tensors(tp), before) == []


def test_state_that_is_not_laid_out_as_the_parameter_is_refused(tmp_path: Path) -> None:
    tp = split(gpt2(), 2)
    optimizer = torch.optim.AdamW(tp.parameters())
    train(tp, optimizer, 1)
    optimizer.state[next(tp.ranks[0].parameters())]["row_var"] = torch.zeros(129, 1)
    with pytest.raises(autotp.CheckpointError) as caught:
        autotp.save(tmp_path / "state", tp, optimizer)
    assert "row_var of transformer.wte.weight: shape [129, 1]" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    momentum = torch.optim.SGD(tp.parameters(), lr=0.1, momentum=0.9)
    train(tp, momentum, 2)
    autotp.save(tmp_path / "state", tp, momentum)
    wanted = train(tp, momentum, 2)
    other = split(refill(gpt2(), 9), 3)
    resumed = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    autotp.load(tmp_path / "state", other, resumed)
    assert train(other, resumed, 2) == pytest.approx(wanted, rel=1e-6)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    autotp.save(tmp_path, split(gpt2(n_layer=2), 2))
    other = split(refill(gpt2(vocab_size=256), 9), 2)
    before = {name: p.clone() for name, p in tensors(other).items()}
    with pytest.raises(autotp.CheckpointError) as caught:
        autotp.load(tmp_path, other)
    text = str(caught.value)
    assert "superfluous: transformer.h.1.attn.c_attn.bias" in text
    assert "wte.weight is torch.float32[256, 48], saved torch.float32[257, 48]" in text
    with pytest.raises(autotp.CheckpointError, match=r"saved torch\.float32"):
        autotp.load(tmp_path, split(gpt2(n_layer=2).bfloat16(), 2))
    assert unlike(tensors(other), before) == []


def test_wrapped_and_doubly_split_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tp = split(gpt2(), 2)
    with pytest.raises(autotp.CheckpointError, match="Sequential is not a parallel model"):
        autotp.save(tmp_path, torch.nn.Sequential(tp))
    parameter = tp.ranks[1].transformer.wpe.weight
    monkeypatch.setattr(parameter, "full_tensor", lambda: parameter, raising=False)
    for call in (
        lambda: autotp.save(tmp_path / "a", tp),
        lambda: autotp.load(tmp_path / "a", tp),
        lambda: tp.save_pretrained(tmp_path / "a"),
        tp.full_state_dict,
    ):
        with pytest.raises(autotp.CheckpointError, match="split a second time"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_named(tmp_path: Path) -> None:
    tp = split(gpt2(), 2)
    state = tmp_path / "state"
    autotp.save(state, tp)
    file = state / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(autotp.CheckpointError, match=f"cannot read the training state {state}"):
        autotp.load(state, tp)
    file.unlink()
    with pytest.raises(autotp.CheckpointError, match=r"__0_0\.distcp"):
        autotp.load(state, tp)
    (state / ".metadata").write_bytes(b"none")
    with pytest.raises(autotp.CheckpointError, match="cannot read the training state"):
        autotp.load(state, tp)
    with pytest.raises(autotp.CheckpointError, match="No such file"):
        autotp.load(tmp_path / "none", tp)


def test_a_save_that_fails_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tp = split(gpt2(), 2)
    autotp.save(tmp_path / "state", tp, extra=1)
    wanted = tp.full_state_dict()
    with torch.no_grad():
        tp.ranks[0].transformer.ln_f.bias += 1

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(training.FileSystemWriter, "write_data", full)
        with pytest.raises(autotp.CheckpointError, match="No space left on device"):
            autotp.save(tmp_path / "state", tp, extra=2)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert autotp.load(tmp_path / "state", tp) == 1
    assert unlike(tp.full_state_dict(), wanted) == []
    (tmp_path / "state" / "notes.txt").write_text("mine")
    autotp.save(tmp_path / "state", tp, extra=3)
    assert autotp.load(tmp_path / "state", tp) == 3
    assert (tmp_path / "state" / "notes.txt").read_text() == "mine"
