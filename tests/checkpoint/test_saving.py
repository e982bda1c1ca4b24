"""What is saved is the whole model, and what was there before is there until it is."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.checkpoint import folder as folders
from autotp.checkpoint import saving, whole
from autotp.checkpoint.folder import replaced
from autotp.checkpoint.reading import Files
from autotp.checkpoint.writing import write
from tests.checkpoint.families import FAMILIES, gpt2, tensors, unlike
from tests.models import WIDTH, mlp, refill


def split(model: Any, tp: int, **kwargs: Any) -> Any:
    return autotp.parallelize(model, devices=["cpu"] * tp, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp, size", [(1, "50GB"), (2, 20_000), (5, "50GB")])
def test_from_pretrained_loads_what_was_saved_to_the_bit(
    family: str, tp: int, size: Any, tmp_path: Path
) -> None:
    model: Any = FAMILIES[family]()
    split(model, tp).save_pretrained(tmp_path / "saved", max_shard_size=size)
    again, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    assert unlike(tensors(again), tensors(model)) == []
    model.save_pretrained(tmp_path / "plain", max_shard_size=size)
    mine, theirs = Files(tmp_path / "saved").tensors, Files(tmp_path / "plain").tensors
    assert {n: (t.shape, t.dtype, t.file.name) for n, t in mine.items()} == {
        n: (t.shape, t.dtype, t.file.name) for n, t in theirs.items()
    }, "the same names, ties stored once, in the same files"
    for file in ("config.json", "generation_config.json"):
        texts = [(tmp_path / d / file).read_text() for d in ("saved", "plain")]
        assert json.loads(texts[0]) == json.loads(texts[1])


def test_the_dtype_is_saved_and_the_model_left_as_it_was(tmp_path: Path) -> None:
    model: Any = gpt2().bfloat16()
    tp = split(model, 3)
    config = tp.ranks[0].config.to_dict()
    tp.save_pretrained(tmp_path)
    assert tp.ranks[0].config.to_dict() == config
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = type(model).from_pretrained(tmp_path)
    assert unlike(tensors(again), tensors(model)) == []


def test_a_module_without_configuration_is_saved_as_weights(tmp_path: Path) -> None:
    x = (torch.zeros(2, 5, WIDTH),)
    model = refill(mlp())
    split(model, 3, example_inputs=x).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    read = split(mlp().to("meta"), 2, example_inputs=x, checkpoint=tmp_path)
    assert unlike(read.full_state_dict(), dict(model.state_dict())) == []


def test_one_tensor_at_a_time_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = []
    original = torch.empty

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        if made.numel() and not made.is_meta:
            alive.append(weakref.ref(made))
            most.append(sum(ref() is not None for ref in alive))
        return made

    tp = split(gpt2(), 2)
    monkeypatch.setattr(saving.torch, "empty", counted)
    tp.save_pretrained(tmp_path)
    assert len(most) > 5 and max(most) == 1


def test_every_dtype_is_written_as_safetensors_writes_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    kinds = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )  # fmt: skip
    given = {str(kind): torch.arange(6).view(2, 3).to(kind) for kind in kinds}
    given["scalar"] = torch.tensor(3.5)
    given["empty"] = torch.empty(0, 4)
    write(tmp_path / "mine", {n: t.to("meta") for n, t in given.items()}, given.__getitem__)
    save_file(given, tmp_path / "theirs", metadata={"format": "pt"})
    assert len((tmp_path / "mine").read_bytes()) == len((tmp_path / "theirs").read_bytes())
    found = load_file(tmp_path / "mine")
    assert found.keys() == given.keys()
    for name, tensor in found.items():
        assert tensor.dtype == given[name].dtype
        assert torch.equal(tensor.float(), given[name].float())


# ---- state dicts


def test_a_full_state_dict_is_the_models(tmp_path: Path) -> None:
    model = gpt2()
    tp = split(model, 3)
    full = tp.full_state_dict()
    assert list(full) == list(model.state_dict())
    assert unlike(full, dict(model.state_dict())) == []
    assert full["lm_head.weight"] is full["transformer.wte.weight"]
    full["transformer.wpe.weight"].zero_()
    full["transformer.wte.weight"].zero_()
    assert unlike(tp.full_state_dict(), dict(model.state_dict())) == [], "they are copies"


def test_a_state_dict_is_loaded_whole_or_as_the_ranks_own(tmp_path: Path) -> None:
    model = gpt2()
    given, other = split(model, 3), split(refill(gpt2(), 5), 3)
    assert unlike(other.full_state_dict(), dict(model.state_dict())) != []
    keys = other.load_state_dict(model.state_dict())
    assert not keys.missing_keys and not keys.unexpected_keys
    assert unlike(tensors(other), tensors(given)) == []
    again = split(refill(gpt2(), 5), 3)
    for rank, mine in enumerate(again.ranks):
        torch.save(given.ranks[rank].state_dict(), tmp_path / f"{rank}.pt")
        mine.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
    assert unlike(tensors(again), tensors(given)) == []
    last = split(refill(gpt2(), 5), 3)
    last.load_state_dict(given.state_dict())
    assert unlike(tensors(last), tensors(given)) == []


def test_a_whole_state_dict_reaches_a_wrapped_rank() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = gpt2()
    rank = split(refill(gpt2(), 5), 2).ranks[1]
    Wrapper(rank).load_state_dict({f"module.{n}": t for n, t in model.state_dict().items()})
    assert unlike(tensors(rank), tensors(split(model, 2).ranks[1])) == []


def test_state_dicts_that_do_not_fit_are_refused_by_name() -> None:
    model = gpt2()
    rank, other = split(model, 3).ranks[0], split(model, 3).ranks[1]
    whole_, local = model.state_dict(), dict(rank.state_dict())

    def refused(state: Any, kind: type[Exception] = autotp.CheckpointError) -> str:
        with pytest.raises(kind) as caught:
            rank.load_state_dict(state)
        return str(caught.value)

    before = {n: t.clone() for n, t in tensors(rank).items()}
    text = refused(other.state_dict())
    assert "written by rank 1 of 3, read by rank 0 of 3" in text
    text = refused(split(model, 2).ranks[0].state_dict())
    assert "written by rank 0 of 2" in text
    name = "transformer.h.0.attn.c_attn.weight"
    text = refused(whole_ | {name: torch.ones(48, 145)})
    assert f"{name} is [48, 145], not [48, 144], nor [48, 48] as on rank 0" in text
    text = refused(whole_ | {"transformer.ln_f.bias": torch.ones(47)})
    assert "transformer.ln_f.bias is [47], not [48]" in text
    text = refused(local | {name: whole_[name]})
    assert f"{name} is whole" in text and "a state dict is whole or local" in text
    del whole_["transformer.ln_f.bias"]
    assert "transformer.ln_f.bias" in refused(whole_, RuntimeError)
    assert unlike(tensors(rank), before) == [], "nothing was changed"


# ---- directories


def test_a_directory_is_replaced_with_what_lies_beside_taken_along(tmp_path: Path) -> None:
    target = tmp_path / "model"
    (target / "runs" / "deep").mkdir(parents=True)
    (target / "tokenizer.json").write_text("words")
    (target / "runs" / "deep" / "model.safetensors").write_text("of another")
    (target / "link").symlink_to("tokenizer.json")
    tp = split(gpt2(), 2)
    tp.save_pretrained(target, max_shard_size=20_000)
    assert len(list(target.glob("model-*"))) > 3
    tp.save_pretrained(target)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json", "generation_config.json", "link", "model.safetensors", "runs",
        "tokenizer.json",
    ]  # fmt: skip
    assert (target / "runs" / "deep" / "model.safetensors").read_text() == "of another"
    assert (target / "link").is_symlink() and (target / "link").read_text() == "words"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def failing_after(original: Any, after: int) -> Any:
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    return failing


def test_an_error_at_any_point_leaves_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    tp = split(gpt2(), 2)
    tp.save_pretrained(target)
    before = files(target)
    with torch.no_grad():
        tp.ranks[0].transformer.ln_f.bias += 1
    points: list[tuple[Any, str, int]] = [(saving._Whole, "__call__", n) for n in (0, 1, 9, 15)]
    points += [(saving, "_write_rest", 0), (folders, "_sync", 0), (folders, "_exchange", 0)]
    for home, name, after in points:
        with monkeypatch.context() as patched:
            patched.setattr(home, name, failing_after(getattr(home, name), after))
            with pytest.raises(autotp.CheckpointError, match="No space left on device"):
                tp.save_pretrained(target)
        assert files(target) == before, name
        assert [path.name for path in tmp_path.iterdir()] == ["model"], name
    tp.save_pretrained(target)
    assert files(target) != before


def test_directories_are_replaced_without_a_system_call_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *args, **kwargs: object())
    monkeypatch.setattr(folders.os, "link", lambda *args, **kwargs: (_ for _ in ()).throw(OSError))
    target = tmp_path / "here"
    for text in ("one", "two"):
        with replaced(target, lambda name: name == "old") as new:
            (new / "file").write_text(text)
            (new / ("old" if text == "one" else "new")).touch()
        (target / "other").write_text("kept")
    assert files(target) == {"file": b"two", "new": b"", "other": b"kept"}
    assert os.listdir(tmp_path) == ["here"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(autotp.CheckpointError, match=r"cannot write the checkpoint .*file"):
        split(gpt2(), 2).save_pretrained(tmp_path / "file")


def test_the_mark_of_a_local_state_dict_names_the_rank() -> None:
    rank = split(gpt2(), 2).ranks[1]
    assert rank.state_dict()._metadata[""][whole.MARK] == "rank 1 of 2"
