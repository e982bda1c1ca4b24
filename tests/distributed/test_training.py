"""Training on real ranks with the tools that everybody uses: the same as training the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autotp
from autotp.runtime.sharded import local
from tests.distributed.cases import error, part, tokens, whole_parameters
from tests.models import refill, tiny_gpt2
from tests.spawn import run

pytestmark = pytest.mark.dist
STEPS = 50


def model_of(drop: float = 0.0) -> Any:
    return refill(tiny_gpt2(resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop)).train()


def losses(
    model: nn.Module,
    steps: int,
    batches: Callable[[int], Tensor],
    *,
    clip: float | None = 1.0,
    rate: float = 1e-3,
    parts: int = 1,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of AdamW, over `parts` accumulated micro batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    found = []
    for step in range(steps):
        total = 0.0
        for number, x in enumerate(batches(step).chunk(parts)):
            quiet = getattr(model, "no_sync", None) if number < parts - 1 else None
            with quiet() if quiet else _nothing():
                loss = model(input_ids=x, labels=x, use_cache=False).loss / parts
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else torch.zeros(())
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        found.append((total, norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def batch(step: int) -> Tensor:
    return tokens(4, 12, seed=step)


# ---- one tp group


def on_ranks(rank: int, world: int) -> dict[str, Any]:
    model = model_of()
    one, tp = copy.deepcopy(model), autotp.parallelize(model, tp=world)
    seen: dict[str, Any] = {"wanted": losses(one, STEPS, batch), "found": losses(tp, STEPS, batch)}
    sliced = autotp.parallelize(model, tp=world, sequence_parallel=True)
    seen["slices"] = losses(sliced, STEPS, batch)
    tp.load_state_dict(one.state_dict())
    seen["norms"] = norms(one, tp)
    seen["scaler"] = scaler(rank, tp, world)
    seen["average"] = average(copy.deepcopy(model), tp, model)
    seen["refused"] = refused(model, tp)
    dropping = model_of(drop=0.2)
    tp = autotp.parallelize(dropping, tp=world)
    seen["masks"] = masks(rank, tp, dropping)
    seen["recomputed"] = recomputed(rank, tp, dropping, world)
    tp = autotp.parallelize(dropping, tp=world, random="whole")
    torch.manual_seed(1)
    wanted = losses(dropping, 5, batch)
    torch.manual_seed(1 if rank == 0 else 99 + rank)
    seen["as the model"] = {"wanted": wanted, "found": losses(tp, 5, batch)}
    return seen


def norms(one: nn.Module, tp: Any) -> dict[Any, Any]:
    """Clipping by every kind of norm, each way: norms, and the gradients after it."""
    x, found = batch(0), {}
    for each in (one, tp):
        each(input_ids=x, labels=x).loss.backward()
    kept = [
        [None if p.grad is None else local(p.grad).clone() for p in m.parameters()]
        for m in (one, tp)
    ]
    for order in (2.0, float("inf"), 1.0, 3.0):
        for foreach in (None, True, False):
            for each, grads in zip((one, tp), kept, strict=True):
                for p, grad in zip(each.parameters(), grads, strict=True):
                    p.grad = None if grad is None else grad.clone()
            clip = torch.nn.utils.clip_grad_norm_
            wanted = clip(one.parameters(), 0.1, norm_type=order, foreach=foreach)
            norm = clip(tp.parameters(), 0.1, norm_type=order, foreach=foreach)
            own = dict(tp.named_parameters())
            worst = max(
                error(own[n].grad, part(p.grad, tp.plan, n, tp.rank), p.grad)
                for n, p in one.named_parameters()
                if p.grad is not None and "c_attn.bias" not in n  # a key's bias has none in truth
            )
            found[order, foreach] = (norm.item(), wanted.item(), worst)
    tp.zero_grad()
    return found


def scaler(rank: int, tp: Any, world: int) -> list[Any]:
    """One rank overflows in its shard: nobody steps, and the scale falls everywhere."""
    optimizer = torch.optim.SGD(tp.parameters(), lr=0.1)
    scale = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, seen = batch(0), []
    for step in range(2):
        before = [local(p).detach().clone() for p in tp.parameters()]
        scale.scale(tp(input_ids=x, labels=x).loss).backward()
        if step == 0 and rank == world - 1:
            tp.transformer.h[0].mlp.c_fc.weight.grad.fill_(float("inf"))
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        same = all(torch.equal(a, local(p)) for a, p in zip(before, tp.parameters(), strict=True))
        seen.append((same, scale.get_scale()))
    return seen


def average(one: nn.Module, tp: Any, model: nn.Module) -> float:
    """An exponential moving average of the parameters, against the model's."""
    tp.load_state_dict(model.state_dict())
    pairs = []
    for each in (one, tp):
        ema = torch.optim.swa_utils.AveragedModel(
            each, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        ema.update_parameters(each)
        with torch.no_grad():
            for p in each.parameters():
                p.mul_(3)
        ema.update_parameters(each)
        pairs.append(ema.module)
    own = dict(pairs[1].named_parameters())
    assert all(type(own[n]) is type(p) for n, p in tp.named_parameters())
    return max(
        error(own[n], part(p.detach(), tp.plan, n, tp.rank), p)
        for n, p in pairs[0].named_parameters()
    )


def refused(model: nn.Module, tp: Any) -> dict[str, str]:
    """What cannot be right raises, on every rank and before it changes anything."""
    x = batch(0)
    tp(input_ids=x, labels=x).loss.backward()
    early = torch.optim.AdamW(model.parameters())
    matrices = [p for p in tp.parameters() if p.dim() == 2]
    calls: dict[str, Callable[[], Any]] = {
        "vector": lambda: torch.nn.utils.parameters_to_vector(tp.parameters()),
        "adafactor": lambda: torch.optim.Adafactor(tp.parameters()).step(),
        "muon": lambda: torch.optim.Muon(matrices).step(),
        "early": lambda: early.step(),
    }
    found = {}
    for name, call in calls.items():
        before = [local(p).detach().clone() for p in tp.parameters()]
        try:
            call()
            found[name] = "nothing"
        except autotp.AutoTPError as caught:
            found[name] = f"{type(caught).__name__}: {caught}"
        for p, old in zip(tp.parameters(), before, strict=True):
            assert torch.equal(local(p), old) or name == "muon"  # it goes parameter by parameter
            with torch.no_grad():
                local(p).copy_(old)
    return found


def masks(rank: int, tp: Any, model: nn.Module) -> dict[str, Any]:
    """Dropout with another seed on each rank, set after the model was made."""
    seen: dict[str, Any] = {}
    for number in range(2):
        tp.load_state_dict(model.state_dict())
        torch.manual_seed(3 if rank == 0 else 2000 * number + rank)
        seen[f"losses {number}"] = losses(tp, 5, batch)
        seen[f"whole {number}"] = whole_parameters(tp)
    torch.manual_seed(rank)
    seen["dropped"] = [first_token_dropped(tp) for _ in range(2)]
    return seen


def first_token_dropped(tp: Any) -> Tensor:
    """For each sequence and local head whether attention drops the first token, which sees itself
    alone: its output is zero then."""
    found: list[Tensor] = []
    handle = tp.transformer.h[0].attn.c_proj.register_forward_pre_hook(
        lambda _, args: found.append(args[0].detach())
    )
    with torch.no_grad():
        tp(input_ids=tokens(64, 12), use_cache=False)
    handle.remove()
    first = found[0].view(64, 12, -1)[:, 0]
    return first.view(64, -1, 4).eq(0).all(-1)  # heads of 4


def recomputed(rank: int, tp: Any, model: Any, world: int) -> dict[str, Any]:
    """Activation checkpointing after, before, around blocks, and around the call, with dropout."""
    found: dict[str, Any] = {}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def curve(name: str, tp: Any, wrap: Callable[[Any], Any] = lambda tp: tp) -> None:
        tp.load_state_dict(state)
        torch.manual_seed(4 if rank == 0 else rank)
        found[name] = losses(wrap(tp), 3, batch)
        capture, _ = tp.capture_for((), dict(input_ids=batch(0), labels=batch(0), use_cache=False))
        again = capture.plan.program().recomputed if capture.plan else ()
        found[f"{name} blocks"] = sorted(again)

    curve("off", tp)
    tp.activation_checkpointing_enable()
    curve("after", tp)
    tp.activation_checkpointing_disable()
    curve("the whole call", tp, Whole)
    curve("all but products", tp, lambda tp: Whole(tp, context_fn=products_kept))
    for number, block in enumerate(tp.transformer.h):
        tp.transformer.h[number] = checkpoint_wrapper(block)
    found["wrapped"] = losses_again(tp, rank, state)
    model.activation_checkpointing_enable()
    curve("before", autotp.parallelize(model, tp=world))
    model.activation_checkpointing_disable()
    return found


def losses_again(tp: Any, rank: int, state: dict[str, Tensor]) -> Any:
    """With wrapped blocks names differ, so parameters are set one by one."""
    own = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in tp.named_parameters()}
    with torch.no_grad():
        for name, p in own.items():
            local(p).copy_(part(state[name], tp.plan, name, tp.rank))
    torch.manual_seed(4 if rank == 0 else rank)
    return losses(tp, 3, batch)


class Whole(nn.Module):
    """A model whose whole call is checkpointed, all of it or selectively."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
        options = self.options

        class Out:
            loss = checkpoint(
                lambda x, y: self.model(input_ids=x, labels=y, use_cache=use_cache).loss,
                input_ids,
                labels,
                use_reentrant=False,
                **options,
            )

        return Out


def products_kept() -> Any:
    """Selective checkpointing: what a product made is kept, and must not have been written to."""
    aten = torch.ops.aten
    return create_selective_checkpoint_contexts([aten.mm.default, aten.addmm.default])


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run(on_ranks, request.param, timeout=900)


def close(found: list[tuple[float, float]], wanted: list[tuple[float, float]], to: float) -> None:
    assert len(found) == len(wanted)
    for step, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a == pytest.approx(b, rel=to), f"step {step}"


def test_fifty_steps_of_adamw_with_clipping(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        close(seen["found"], seen["wanted"], 1e-4)
        assert seen["found"] == ranks[0]["found"]
    first, last = seen["wanted"][0][0], seen["wanted"][-1][0]
    assert last < first, "it learns"
    assert seen["wanted"][0][1] > 1.0, "it clips"


def test_fifty_steps_with_the_sequence_in_slices(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        close(seen["slices"], seen["wanted"], 1e-4)
        assert seen["slices"] == ranks[0]["slices"]


def test_gradients_are_clipped_by_the_norm_of_the_whole(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        for key, (norm, wanted, worst) in seen["norms"].items():
            assert norm == pytest.approx(wanted, rel=1e-5), key
            assert worst < 1e-4, key


def test_an_overflow_on_one_rank_stops_the_step_on_all(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["scaler"] == [(True, 4.0), (False, 4.0)]


def test_a_moving_average_is_the_models(ranks: list[dict[str, Any]]) -> None:
    assert all(seen["average"] < 1e-6 for seen in ranks)


def test_what_cannot_be_right_raises_everywhere(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        found = seen["refused"]
        for name in ("vector", "adafactor", "muon"):
            assert found[name].startswith("ShardError"), (name, found[name])
            assert "full_state_dict()" in found[name]
        assert "AdamW holds parameters of the original model" in found["early"]


def test_dropout_is_alike_where_ranks_hold_the_same(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]["masks"]
    for seen in ranks:
        masks_ = seen["masks"]
        assert masks_["losses 0"] == masks_["losses 1"] == first["losses 0"]  # rank 0's seed
        for name, tensor in masks_["whole 0"].items():
            assert torch.equal(tensor, first["whole 0"][name]), name


def test_attention_drops_something_else_on_each_rank(ranks: list[dict[str, Any]]) -> None:
    found = [mask for seen in ranks for mask in seen["masks"]["dropped"]]
    for number, mask in enumerate(found):
        assert 0.1 < mask.float().mean() < 0.3
        for other in found[:number]:
            assert 0.2 < (mask != other).float().mean() < 0.45  # 2 * 0.2 * 0.8 if independent


def test_dropout_can_be_the_models_own(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        close(seen["as the model"]["found"], seen["as the model"]["wanted"], 1e-5)


def test_recomputed_activations_change_nothing(ranks: list[dict[str, Any]]) -> None:
    blocks = ["transformer.h.0", "transformer.h.1"]
    for seen in ranks:
        found = seen["recomputed"]
        for name in ("before", "after", "the whole call", "all but products", "wrapped"):
            assert found[name] == found["off"], name
        assert found["before blocks"] == found["after blocks"] == blocks
        assert found["off blocks"] == found["the whole call blocks"] == []
