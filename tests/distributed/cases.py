"""What a spawned rank finds when it compares its part of a model with the whole model.

Ranks return numbers and the tests judge them: a rank that stopped at a failed assertion would leave
its peers in a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.runtime.sharded import local

Step: TypeAlias = Callable[[nn.Module], tuple[Tensor, Tensor]]  # loss and logits of a model
RATE = 0.05


def tokens(batch: int, seq: int, vocabulary: int = 257, seed: int = 1) -> Tensor:
    """A batch, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, seq), generator=generator)


def targets(x: Tensor) -> Tensor:
    """Labels for a batch, of which a few are ignored."""
    return x.masked_fill(torch.arange(x.shape[1]) % 5 == 3, -100)


def labelled(x: Tensor, **kwargs: Any) -> Step:
    """The model's own loss; Hugging Face computes it in float32."""

    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        out = model(x, labels=targets(x), use_cache=False, **kwargs)
        return out.loss, out.logits

    return step


def own_loss(x: Tensor) -> Step:
    """A loss outside the model, in the dtype of its logits."""

    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        logits = model(x, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets(x)[:, 1:].flatten()), logits

    return step


def parity(model: nn.Module, tp: Any, step: Step, steps: int = 10) -> dict[str, Any]:
    """How a rank's loss, logits, gradients and parameters after SGD steps differ from the model's.

    Also what was communicated, and the parameters that all ranks hold, after the steps.
    """
    found = facts(tp)
    loss, logits = step(model)
    loss.backward()
    with Counts() as forward:
        own_loss, own_logits = step(tp)
    with Counts() as backward:
        own_loss.backward()
    errors = {"loss": error(own_loss, loss), "logits": error(own_logits, logits)}
    errors |= differences(model, tp, gradients=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, step, steps)
    losses = train(tp, step, steps)
    after = differences(model, tp)
    return found | {
        "errors": errors,
        "after": after,
        "moved": min(error(p, before[name]) for name, p in model.named_parameters()),
        "losses": [own_loss.item(), *losses],
        "forward": forward.found,
        "backward": backward.found,
        "whole": whole_parameters(tp),
        "dtypes": {str(x.dtype) for x in (own_loss, own_logits)},
    }


def facts(tp: Any) -> dict[str, Any]:
    """Of the plan and the parameters that a rank holds."""
    return {
        "rank": (tp.rank, tp.tp_size),
        "kinds": [axis.kind for axis in tp.plan.axes],
        "widths": {axis.name: axis.widths for axis in tp.plan.axes},
        "planned": vars(tp.plan.collectives),
        "bytes": (sum(p.nbytes for p in tp.parameters()), tp.plan.parameter_bytes(tp.rank)),
    }


def train(model: nn.Module, step: Step, steps: int) -> list[float]:
    """SGD, the first step with the gradients that are there; returns the losses of the others."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for number in range(steps):
        if number:
            loss, _ = step(model)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differences(model: nn.Module, tp: Any, *, gradients: bool = False) -> dict[str, float]:
    """Of each parameter, or its gradient, from the same part of the model's."""
    own = dict(tp.named_parameters())
    found = {}
    for name, parameter in model.named_parameters():
        if not gradients:
            whole, mine = parameter.detach(), own.pop(name).detach()
        elif parameter.grad is not None:
            whole, mine = parameter.grad, own.pop(name).grad
        else:
            found[name] = float(own.pop(name).grad is not None)
            continue
        expected = part(whole, tp.plan, name, tp.rank)
        found[name] = float("inf") if mine is None else error(mine, expected, whole)
    assert not own, f"the model has no {list(own)}"
    return found


def part(whole: Tensor, plan: Any, name: str, rank: int) -> Tensor:
    """A rank's part of a tensor, picked place by place."""
    for dim, held in enumerate(plan.ranges(name, rank)):
        places = [place for start, stop in held for place in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(places, dtype=torch.long))
    return whole


def error(found: Any, wanted: Tensor, whole: Tensor | None = None) -> float:
    """The largest difference, relative to the largest value of the whole reference."""
    found = local(found)
    if not isinstance(found, Tensor) or found.shape != wanted.shape or found.isnan().any():
        return float("inf")
    if not wanted.numel():
        return 0.0
    scale = (wanted if whole is None else whole).detach().abs().max().double()
    return float((found.detach().double() - wanted.detach().double()).abs().max() / scale)


def whole_parameters(tp: Any) -> dict[str, Tensor]:
    """Parameters that are the same on every rank."""
    own = tp.named_parameters()
    return {name: p.detach().clone() for name, p in own if not tp.plan.is_sharded(name)}


class Counts(TorchDispatchMode):
    """Collectives that torch runs in the block, by name; those of backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = str(func.overloadpacket).rpartition(".")[2].strip("_").removesuffix("_base")
            self.found[name] = self.found.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def assert_alike(tensors: list[dict[str, Tensor]]) -> None:
    """Every rank holds the same bits."""
    assert tensors[0]
    for rank, held in enumerate(tensors):
        assert held.keys() == tensors[0].keys()
        for name, tensor in held.items():
            assert torch.equal(tensor, tensors[0][name]), f"{name} on rank {rank}"


def assert_below(limit: float, errors: dict[str, float]) -> None:
    """No error is above the limit."""
    above = {name: f"{value:.1e}" for name, value in errors.items() if not value <= limit}
    assert not above, f"above {limit:.0e}: {above}"
