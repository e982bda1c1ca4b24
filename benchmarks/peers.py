"""The same model under other ways of tensor parallelism, each behind the same three calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import megatron_layers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_gpt2 import MegatronGPT2
from megatron_llama import MegatronLlama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import autotp
from autotp.runtime.collectives import place
from autotp.runtime.sharded import local

MEGATRON: dict[str, Callable[[Any], nn.Module]] = {"gpt2": MegatronGPT2, "llama": MegatronLlama}


class Variant:
    """A way to run one model: a training step's loss, the logits, and gradients to check."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prepare(self, tokens: Tensor) -> None:
        """What is done once."""

    def loss(self, tokens: Tensor) -> Any:
        """The mean loss of predicting the next token."""
        return self.model(tokens, labels=tokens, use_cache=False).loss

    def logits(self, tokens: Tensor) -> Any:
        """A forward pass without a loss."""
        return self.model(tokens, use_cache=False).logits

    def around(self) -> AbstractContextManager[Any]:
        """What a step runs in."""
        return nullcontext()

    def step(self, tokens: Tensor) -> Tensor:
        """One training step without the optimizer."""
        with self.around():
            loss = self.loss(tokens)
            loss.backward()
        found = loss.detach()
        assert isinstance(found, Tensor)
        return found

    def infer(self, tokens: Tensor) -> None:
        """One forward pass."""
        with torch.no_grad():
            self.logits(tokens)

    def gradients(self, names: list[str]) -> dict[str, Tensor]:
        """Whole gradients by name."""
        every = dict(self.model.named_parameters())
        return {name: self.whole(name, every[name].grad) for name in names}

    def whole(self, name: str, grad: Any) -> Tensor:
        """A gradient put together."""
        assert isinstance(grad, Tensor)
        return grad.full_tensor() if isinstance(grad, DTensor) else grad


class Megatron(Variant):
    """By hand."""

    def loss(self, tokens: Tensor) -> Any:
        return self.model(tokens, tokens)

    def logits(self, tokens: Tensor) -> Any:
        return self.model(tokens)

    def gradients(self, names: list[str]) -> dict[str, Tensor]:
        return {n: _joined(*found) for n, found in self.model.gradients().items() if n in names}


class NoCommunication(Megatron):
    """The same without collectives: wrong numbers, the least possible time."""

    @contextmanager
    def around(self) -> Iterator[None]:
        megatron_layers.COMMUNICATE = False
        yield
        megatron_layers.COMMUNICATE = True

    def infer(self, tokens: Tensor) -> None:
        with self.around():
            super().infer(tokens)


class AutoTP(Variant):
    """autotp.parallelize."""

    def whole(self, name: str, grad: Any) -> Tensor:
        ranges = [self.model.plan.ranges(name, rank) for rank in range(self.model.tp_size)]
        shapes = [self.model.plan.local_shape(name, rank) for rank in range(self.model.tp_size)]
        if not self.model.plan.is_sharded(name):
            assert isinstance(grad, Tensor)
            return grad
        grad = local(grad)
        parts = self.model.group.all_gather(grad, shapes)
        dim = next(d for d in range(grad.dim()) if len({held[d] for held in ranges}) > 1)
        return place(parts, dim, [held[dim] for held in ranges])


class Compiled(AutoTP):
    """torch.compile of the parallel model."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.compiled = torch.compile(model, fullgraph=True, dynamic=False)

    def prepare(self, tokens: Tensor) -> None:
        """Capture both call forms, which cannot be done while they are compiled."""
        super().loss(tokens)
        with torch.no_grad():
            super().logits(tokens)

    def loss(self, tokens: Tensor) -> Any:
        return self.compiled(tokens, labels=tokens, use_cache=False).loss

    def logits(self, tokens: Tensor) -> Any:
        return self.compiled(tokens, use_cache=False).logits


class LossParallel(Variant):
    """DTensor with logits that stay split."""

    def loss(self, tokens: Tensor) -> Any:
        logits = self.model(tokens, use_cache=False).logits
        target = F.pad(tokens, (0, 1), value=-100)[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1), target)

    @contextmanager
    def around(self) -> Iterator[None]:
        with loss_parallel():
            yield


def make(name: str, kind: str, whole: Callable[[], Any], folder: Path) -> Variant:
    """A variant by its name; `whole` makes the model, which is also saved in a folder."""
    match name:
        case "single":
            return Variant(whole())
        case "megatron":
            return Megatron(MEGATRON[kind](whole()))
        case "no communication":
            return NoCommunication(MEGATRON[kind](whole()))
        case "autotp":
            return AutoTP(autotp.parallelize(whole()))
        case "autotp, local logits":
            return AutoTP(autotp.parallelize(whole(), logits="local"))
        case "autotp compiled":
            return Compiled(autotp.parallelize(whole()))
        case "dtensor":
            return Variant(_dtensor(whole(), Replicate(), blocks=False))
        case "dtensor, split loss":
            return LossParallel(_dtensor(whole(), Shard(-1), blocks=False))
        case "dtensor, split loss, block inputs":
            return LossParallel(_dtensor(whole(), Shard(-1), blocks=True))
        case "hf tp_plan":
            return Variant(type(whole()).from_pretrained(folder, tp_plan="auto").train())
    raise ValueError(f"no variant {name!r}")


def _dtensor(model: Any, logits: Any, blocks: bool) -> Any:
    """torch's parallelize_module, as torchtitan applies it."""
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=logits, use_local_output=logits == Replicate()),
    }
    for i in range(model.config.num_hidden_layers):
        at = f"model.layers.{i}"
        for linear in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"{at}.{linear}"] = ColwiseParallel()
        for linear in ("mlp.gate_proj", "mlp.up_proj"):
            plan[f"{at}.{linear}"] = ColwiseParallel()
        for linear in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{at}.{linear}"] = RowwiseParallel()
        if blocks:
            one: Any = {"hidden_states": Replicate()}
            plan[f"{at}.self_attn"] = PrepareModuleInput(
                input_kwarg_layouts=one, desired_input_kwarg_layouts=one
            )
            plan[f"{at}.mlp"] = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
            )
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def _joined(grad: Tensor | None, dim: int | None) -> Tensor:
    assert grad is not None
    if dim is None:
        return grad
    parts = [torch.empty_like(grad.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad.contiguous())
    return torch.cat(parts, dim)
