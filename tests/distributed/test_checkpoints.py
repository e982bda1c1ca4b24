"""Real processes load, save, resume, and end together when one of them fails."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autotp
from autotp.checkpoint import saving
from autotp.checkpoint.together import Peers
from tests.checkpoint.families import FAMILIES, batch, differences, on_meta, tensors, train, unlike
from tests.distributed.cases import assert_below
from tests.distributed.cases import differences as errors
from tests.models import refill
from tests.spawn import SpawnError, run

LIMIT = 3.0  # seconds that a lost rank is waited for
SOON = 30.0


def attempt(call: Any) -> dict[str, Any]:
    """The error of a call, how long it took, and whether the ranks still talk."""
    begun = time.monotonic()
    found = {"kind": "", "text": ""}
    try:
        call()
    except Exception as error:
        found = {"kind": type(error).__name__, "text": str(error)}
    total = torch.ones(1)
    seconds = time.monotonic() - begun
    dist.all_reduce(total)
    return found | {"seconds": seconds, "after": total.item()}


def family(name: str, folder: Path) -> dict[str, Any]:
    """Load one family's checkpoint, compare, save it in two ways, train, save, resume."""
    model: Any = FAMILIES[name]()
    read: Any = autotp.parallelize(on_meta(model), checkpoint=folder / name)
    given: Any = autotp.parallelize(model)
    found: dict[str, Any] = {"loaded": differences(read, given)}
    losses = [m(**batch()).loss for m in (read, given, model)]
    for loss in losses:
        loss.backward()
    grads = [{n: p.grad for n, p in m.named_parameters()} for m in (read, given)]
    found["gradients"] = unlike(*grads)
    found["losses"] = [loss.item() for loss in losses]
    found["errors"] = errors(model, read, gradients=True)
    read.zero_grad()
    read.save_pretrained(folder / f"{name}-one-{read.tp_size}")
    read.save_pretrained(folder / f"{name}-many-{read.tp_size}", max_shard_size=20_000)
    found["full"] = unlike(read.full_state_dict(), model.state_dict())
    found["names"] = list(read.full_state_dict()) == list(model.state_dict())
    other: Any = autotp.parallelize(refill(type(model)(model.config), 5))
    other.load_state_dict(model.state_dict())
    found["from full"] = differences(other, given)
    other.load_state_dict(read.state_dict())
    found["from local"] = differences(other, given)
    given.zero_grad()
    return found | runs(given, other, folder / f"{name}-state")


def runs(model: Any, other: Any, folder: Path) -> dict[str, list[float]]:
    """Two ranks train and save after three steps; whoever they are go on from there."""
    found = {}
    if model.tp_size == 2:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = train(model, optimizer, 3)
        autotp.save(folder, model, optimizer, extra={"step": 3})
        found["trained"] = before + train(model, optimizer, 3)
    refill(other, 9)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    assert autotp.load(folder, other, optimizer) == {"step": 3}
    return found | {"resumed": train(other, optimizer, 3)}


def works(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: family(name, folder) for name in FAMILIES}
    found["refused"] = refusals(rank, folder) if world == 3 else {}
    return found


def refusals(rank: int, folder: Path) -> dict[str, Any]:
    """What fails on one rank or on all, one after the other; the ranks go on after each."""
    model: Any = FAMILIES["gpt2"]()
    tp: Any = autotp.parallelize(model)
    kept = folder / "kept"
    tp.save_pretrained(kept)
    found = {}

    def on_rank_0(call: Any) -> Any:
        return attempt(call if rank == 0 else lambda: None)

    found["other folders"] = attempt(lambda: tp.save_pretrained(folder / f"to-{rank % 2}"))
    (folder / "file").touch()
    found["a file in the way"] = attempt(lambda: tp.save_pretrained(folder / "file"))
    found["state: a file in the way"] = attempt(lambda: autotp.save(folder / "file", tp))
    original, calls = saving.write, []

    def full(*args: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        original(*args)

    saving.write = full  # type: ignore[assignment]
    found["disk full"] = attempt(lambda: tp.save_pretrained(kept, max_shard_size=20_000))
    saving.write = original
    found["kept"] = differences(type(model).from_pretrained(kept), model)
    found["left"] = sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
    path = folder / ("gpt2" if rank != 1 else "none")
    meta = on_meta(model)
    found["one has no files"] = attempt(lambda: autotp.parallelize(meta, checkpoint=path))
    cut = folder / "cut" / "model.safetensors"
    found["cut short"] = attempt(lambda: autotp.parallelize(meta, checkpoint=cut))
    llama = on_meta(FAMILIES["llama"]())
    found["misfit"] = attempt(lambda: autotp.parallelize(llama, checkpoint=folder / "gpt2"))
    found["no state"] = attempt(lambda: autotp.load(folder / "none", tp))
    changed = folder / "changed"
    found["other weights"] = attempt(
        lambda: autotp.parallelize(meta, checkpoint=changed if rank == 2 else folder / "gpt2")
    )
    own = folder / f"own-{rank}.pt"
    torch.save(tp.state_dict(), own)
    dist.barrier()
    theirs = torch.load(folder / f"own-{(rank + 1) % 3}.pt")
    found["another rank's"] = attempt(lambda: tp.load_state_dict(theirs))
    tp.load_state_dict(torch.load(own))
    wrong = model.state_dict() | {"transformer.wte.weight": torch.ones(5, 48)}
    found["wrong shape"] = attempt(lambda: tp.load_state_dict(wrong))
    found["nothing"] = attempt(lambda: tp.save_pretrained(kept))
    # Afterwards the ranks have not made the same calls: this is the last that the group does.
    save, state = (lambda: tp.save_pretrained(kept, timeout=LIMIT)), folder / "state"
    found["save_pretrained on rank 0"] = on_rank_0(save)
    found["save on rank 0"] = on_rank_0(lambda: autotp.save(state, tp, timeout=LIMIT))
    return found


def prepared(folder: Path) -> None:
    for name, make in FAMILIES.items():
        make().save_pretrained(folder / name)  # type: ignore[operator]
    whole = (folder / "gpt2" / "model.safetensors").read_bytes()
    (folder / "cut").mkdir()
    (folder / "cut" / "model.safetensors").write_bytes(whole[:-1000])
    model: Any = FAMILIES["gpt2"]()
    with torch.no_grad():
        model.transformer.ln_f.bias[3] += 1
    model.save_pretrained(folder / "changed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    prepared(path)
    return path


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run(works, 2, folder, timeout=600)


@pytest.fixture(scope="module")
def three(folder: Path, two: Any) -> list[dict[str, Any]]:
    return run(works, 3, folder, timeout=600)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_load_and_save_to_the_bit(
    name: str, world: int, folder: Path, two: Any, three: Any
) -> None:
    model: Any = FAMILIES[name]()
    for found in two if world == 2 else three:
        mine = found[name]
        for what in ("loaded", "gradients", "full", "from full", "from local"):
            assert mine[what] == [], what
        assert mine["names"]
        loaded, given, whole = mine["losses"]
        assert loaded == given == pytest.approx(whole, rel=1e-6)
        assert_below(1e-5, mine["errors"])
    for kind in ("one", "many"):
        saved = folder / f"{name}-{kind}-{world}"
        again, info = type(model).from_pretrained(saved, output_loading_info=True)
        assert not any(info.values()), info
        assert unlike(tensors(again), tensors(model)) == []
        assert len(list(saved.glob("model-*"))) == 0 if kind == "one" else 3


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_saved_on_two_ranks_goes_on_with_any_number(
    name: str, folder: Path, two: Any, three: Any
) -> None:
    wanted = two[0][name]["trained"]
    assert wanted[0] > wanted[3] > wanted[5] + 0.1
    alone: Any = autotp.parallelize(refill(FAMILIES[name](), 9), devices=["cpu"])
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1.0)
    autotp.load(folder / f"{name}-state", alone, optimizer)
    for losses in (two[1][name]["resumed"], three[2][name]["resumed"], train(alone, optimizer, 3)):
        assert losses == pytest.approx(wanted[3:], rel=1e-6)
    assert two[0][name]["resumed"] == wanted[3:], "the same ranks go on to the bit"


@pytest.mark.dist
@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all_and_they_go_on(three: Any) -> None:
    every = [found["refused"] for found in three]
    assert [found.pop("kept") for found in every] == [[]] * 3
    assert [found.pop("left") for found in every] == [[]] * 3
    for found in every:
        for name, refused in found.items():
            assert refused["after"] == 3, name
            assert refused["seconds"] < SOON, name
        assert found["nothing"]["kind"] == "", found["nothing"]["text"]
    for name in ("save_pretrained on rank 0", "save on rank 0"):
        alone = every[0][name]
        assert alone["kind"] == "GroupError" and LIMIT <= alone["seconds"] < LIMIT + 3
        assert alone["text"].startswith("ranks 1 and 2 did not come to compare saving ")
    texts = {name: [found[name]["text"] for found in every] for name in every[0]}
    for name, cause in {
        "other folders": "rank 1 gave another value than ranks 0 and 2",
        "one has no files": "neither model.safetensors nor",
        "cut short": "cut/model.safetensors",
        "misfit": "the checkpoint does not fit LlamaForCausalLM",
        "no state": "cannot read the training state",
        "other weights": "transformer.ln_f.bias: sums",
        "wrong shape": "transformer.wte.weight is [5, 48], not [257, 48]",
    }.items():
        assert all(cause in text for text in texts[name]), (name, texts[name])
    for name in ("a file in the way", "state: a file in the way", "disk full"):
        assert all("rror" in found[name]["kind"] for found in every), (name, texts[name])
        assert all("cannot write the" in text for text in texts[name]), (name, texts[name])
    assert "No space left" in texts["disk full"][2]
    for rank, text in enumerate(texts["another rank's"]):
        assert f"written by rank {(rank + 1) % 3} of 3, read by rank {rank} of 3" in text


def dies(rank: int, world: int, folder: Path, what: str) -> None:
    """Save once; then the last rank is killed in the middle of saving again."""
    from torch.distributed.checkpoint import FileSystemWriter

    model: Any = autotp.parallelize(FAMILIES["gpt2"]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 3)
    model.save_pretrained(folder / "model")
    autotp.save(folder / "state", model, optimizer, extra={"step": 3})
    losses = train(model, optimizer, 3)
    if rank == world - 1:
        original, calls = Peers.send, []

        def send(*args: Any) -> None:
            calls.append(1)
            os._exit(0) if len(calls) > 3 else original(*args)

        Peers.send = send  # type: ignore[method-assign]
        FileSystemWriter.write_data = lambda *args: os._exit(0)  # type: ignore
    begun = time.monotonic()
    try:
        if what == "model":
            model.save_pretrained(folder / "model", timeout=LIMIT)
        else:
            autotp.save(folder / "state", model, optimizer, timeout=LIMIT)
    except Exception as error:
        seconds = time.monotonic() - begun
        found = {"text": str(error), "seconds": seconds, "losses": losses}
        (folder / f"found{rank}").write_text(json.dumps(found))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "state"])
def test_a_rank_that_is_killed_while_saving_leaves_the_last_checkpoint(
    what: str, tmp_path: Path
) -> None:
    with pytest.raises((SpawnError, FileNotFoundError)):  # the killed rank returns nothing
        run(dies, 3, tmp_path, what, timeout=200)
    every = [json.loads((tmp_path / f"found{rank}").read_text()) for rank in range(2)]
    for found in every:
        assert found["seconds"] < 3 * LIMIT
        assert found["text"].startswith("rank 2 did not come to compare the end of saving "), found
    alone: Any = autotp.parallelize(refill(FAMILIES["gpt2"](), 9), devices=["cpu"])
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1.0)
    assert autotp.load(tmp_path / "state", alone, optimizer) == {"step": 3}
    kept: Any = type(FAMILIES["gpt2"]()).from_pretrained(tmp_path / "model")
    assert unlike(dict(kept.state_dict()), alone.full_state_dict()) == []
    assert train(alone, optimizer, 3) == pytest.approx(every[0]["losses"], rel=1e-6)
