"""A rank's model is called, moved and copied as the original, in any of its call forms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp
from autotp.errors import AutoTPError
from autotp.runtime.sharded import ShardedParameter
from tests.distributed.cases import (
    assert_alike,
    assert_below,
    differences,
    error,
    targets,
    tokens,
    whole_parameters,
)
from tests.models import refill, tiny_gpt2
from tests.spawn import run

pytestmark = [pytest.mark.dist, pytest.mark.slow]
FROZEN = ("transformer.wpe.weight", "transformer.h.0.mlp.c_fc.bias")


def calls(rank: int, world: int) -> dict[str, Any]:
    """Call forms one after the other, on one model."""
    model = source()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tp = autotp.parallelize(model)
    found: dict[str, Any] = {"traits": traits(model, tp), "forms": {}}

    def form(name: str, call: Callable[[nn.Module], Any]) -> None:
        found["forms"][name] = compare(call(tp), call(model)) | {"captures": len(tp.captures)}

    x, longer = tokens(2, 9), tokens(3, 14)
    mask = torch.ones_like(longer)
    mask[1, :4] = mask[2, :1] = 0
    form("captured", lambda m: m(input_ids=x, labels=targets(x), use_cache=False))
    form("positional", lambda m: m(x, None, None, labels=targets(x), use_cache=False))
    form("longer", lambda m: m(longer, labels=targets(longer), use_cache=False))
    found["split"] = split(model, tp, longer)
    form("mask", lambda m: m(longer, attention_mask=mask, labels=longer, use_cache=False))
    form("no labels", lambda m: m(longer, use_cache=False))
    form("cache", lambda m: m(longer))
    form("tuple", lambda m: m(longer, use_cache=False, return_dict=False))
    form("batch 1", lambda m: m(longer[:1], use_cache=False))
    form("seq 1", lambda m: m(longer[:, :1], use_cache=False))
    for each in (model, tp):
        each.eval()
    form("evaluation", lambda m: m(longer, labels=longer, use_cache=False))
    with torch.no_grad():
        form("no grad", lambda m: m(x, labels=x, use_cache=False))
    found["copy"] = copied(tp, longer)
    found["unchanged"] = model.train() is model and all(
        torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    )
    for name, dtype in (("float64", torch.float64), ("bfloat16", torch.bfloat16)):
        for each in (model, tp.train()):
            assert each.to(dtype) is each
        form(name, lambda m: m(longer, use_cache=False))
        found[f"{name} parameters"] = {str(p.dtype) for p in tp.parameters()}
    return found


def source() -> nn.Module:
    """A model of which one whole and one split parameter are frozen."""
    model = refill(tiny_gpt2(n_layer=1, n_inner=130))
    for name in FROZEN:
        model.get_parameter(name).requires_grad = False
    return model


def traits(model: nn.Module, tp: Any) -> dict[str, bool]:
    """What a rank's model has in common with the original."""
    names = [[name for name, _ in m.named_parameters(remove_duplicate=False)] for m in (model, tp)]
    own, whole = dict(tp.named_parameters()), dict(model.named_parameters())
    modules = [[name for name, _ in m.named_modules()] for m in (model, tp)]

    def kind(name: str) -> type:
        return ShardedParameter if tp.plan.is_sharded(name) else nn.Parameter

    return {
        "names": names[0] == names[1],
        "modules": modules[0] == modules[1],
        "tie": tp.get_parameter("lm_head.weight") is tp.get_parameter("transformer.wte.weight"),
        "requires_grad": all(own[n].requires_grad == whole[n].requires_grad for n in whole),
        "dtype": all(own[n].dtype == whole[n].dtype for n in whole),
        "device": all(own[n].device == whole[n].device for n in whole),
        "kind": all(type(p) is kind(name) for name, p in own.items()),
        "training": tp.training == model.training,
        "config": tp.config == model.config,
        "own memory": not {p.data_ptr() for p in own.values()}
        & {p.data_ptr() for p in whole.values()},
    }


def compare(found: Any, wanted: Any) -> dict[str, Any]:
    """Types, names and values of two outputs."""
    pairs: list[tuple[Any, Any]]
    if isinstance(wanted, dict):
        same = list(found) == list(wanted)
        pairs = [(found[name], wanted[name]) for name in wanted]
    else:
        same = len(found) == len(wanted)
        pairs = list(zip(found, wanted, strict=False))
    errors = {}
    for number, (a, b) in enumerate(pairs):
        if isinstance(b, Tensor):
            errors[f"{number}"] = error(a if isinstance(a, Tensor) else a.gather(), b)
        else:
            same = same and type(a) is type(b) and a.get_seq_length() == b.get_seq_length()
    kinds = [type(a).__name__ for a, _ in pairs]
    return {"same": same and type(found) is type(wanted), "errors": errors, "kinds": kinds}


def split(model: nn.Module, tp: Any, x: Tensor) -> dict[str, Any]:
    """Logits of a training step: whole when all ranks ask, an error when one rank reads them."""
    logits = tp(x, labels=x, use_cache=False).logits
    found: dict[str, Any] = {"kind": type(logits).__name__, "shape": tuple(logits.shape)}
    found["local"] = logits.local.shape[-1]
    if tp.rank == 0:
        reads: dict[str, Callable[[], Any]] = {
            "function": lambda: torch.softmax(logits, -1),
            "method": lambda: logits.argmax(-1),
            "index": lambda: logits[0],
            "add": lambda: torch.zeros(1) + logits,
            "divide": lambda: logits / 2,
            "compare": lambda: logits > 0,
            "equal": lambda: x == logits,
            "array": lambda: np.asarray(logits),
            "truth": lambda: bool(logits),
        }
        found["reads"] = {name: refused(read) for name, read in reads.items()}
    for each in (model, tp):
        each.zero_grad()
    for whole in (model(x, use_cache=False).logits, logits.gather()):
        whole.float().square().mean().backward()
    found["gradients"] = differences(model, tp, gradients=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    found["after"] = total.item()
    return found


def refused(read: Callable[[], Any]) -> str:
    try:
        read()
    except AutoTPError as refusal:
        return str(refusal)
    return "no error"


def copied(tp: Any, x: Tensor) -> dict[str, Any]:
    """A deep copy computes the same, and is another model."""
    with torch.no_grad():
        before = tp(x, labels=x, use_cache=False)
        twin = copy.deepcopy(tp)
        found = {"same": error(twin(x, labels=x, use_cache=False).loss, before.loss)}
        for parameter in twin.parameters():
            parameter.mul_(0.5)
        found["other"] = error(twin(x, labels=x, use_cache=False).logits, before.logits)
        found["original"] = error(tp(x, labels=x, use_cache=False).logits, before.logits)
    twin.train()(x, labels=x, use_cache=False).loss.backward()
    return found | {
        "tied": twin.lm_head.weight is twin.transformer.wte.weight,
        "types": type(twin) is type(tp) and twin.training and not tp.training,
        "gradients": all(p.grad is not None for p in twin.parameters() if p.requires_grad),
        "separate": all(
            a is not b and (a.grad is None or a.grad is not b.grad)
            for a, b in zip(twin.parameters(), tp.parameters(), strict=True)
        ),
        "whole": whole_parameters(twin),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run(calls, 2, timeout=400)


def test_every_call_form_returns_what_the_model_returns(two: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two):
        for name, form in found["forms"].items():
            limit = {"float64": 1e-12, "bfloat16": 0.05}.get(name, 1e-5)
            assert form["same"], f"{name} on rank {rank}: {form['kinds']}"
            assert_below(limit, {f"{name} {number}": e for number, e in form["errors"].items()})
            assert form["errors"], name


def test_a_new_shape_is_no_new_capture_and_a_new_form_is(two: list[dict[str, Any]]) -> None:
    for found in two:
        captures = {name: form["captures"] for name, form in found["forms"].items()}
        assert captures["captured"] == captures["positional"] == captures["longer"] == 1
        assert captures["no labels"] > captures["mask"] > 1
        assert captures == {n: f["captures"] for n, f in two[0]["forms"].items()}


def test_training_logits_stay_split_until_all_ranks_gather(two: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two):
        forms, at = found["forms"], found["split"]
        assert forms["captured"]["kinds"] == ["Tensor", "ShardedOutput"]
        assert forms["evaluation"]["kinds"] == forms["no grad"]["kinds"] == ["Tensor", "Tensor"]
        assert (at["kind"], at["shape"]) == ("ShardedOutput", (3, 14, 257))
        assert at["local"] == (129, 128)[rank]
        assert_below(1e-5, at["gradients"])
        assert at["after"] == 2
    for name, text in two[0]["split"]["reads"].items():
        assert "output.logits.gather() on every rank" in text, name


def test_the_result_has_the_names_and_traits_of_the_source(two: list[dict[str, Any]]) -> None:
    for found in two:
        wrong = [name for name, holds in found["traits"].items() if not holds]
        assert not wrong, wrong
        assert found["unchanged"]


def test_dtypes_change_after_the_split(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["float64 parameters"] == {"torch.float64"}
        assert found["bfloat16 parameters"] == {"torch.bfloat16"}


def test_a_deep_copy_is_another_model(two: list[dict[str, Any]]) -> None:
    for found in two:
        twin = found["copy"]
        assert twin["same"] == twin["original"] == 0
        assert twin["other"] > 0.01
        assert all(twin[name] for name in ("tied", "types", "gradients", "separate"))
    assert_alike([found["copy"]["whole"] for found in two])
