"""transformers.Trainer and accelerate for a parallel model, under torchrun.

    from autotp.trainer import Trainer
    trainer = Trainer(autotp.parallelize(model, tp=2), TrainingArguments(...), train_dataset=data)
    trainer.train(resume_from_checkpoint=...)

As they come, both take every process for one of data parallelism: another batch for each, and
rank 0's weights for all. Here the processes that share a model get the same batches, a checkpoint
is that of the whole model, and groups that share no model are data-parallel (DDP).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import recursively_apply
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import can_return_loss, find_labels

from autotp.checkpoint.names import tied
from autotp.checkpoint.training import load, save
from autotp.errors import AutoTPError, PlanError, message
from autotp.runtime.module import TensorParallel

STATE, SCHEDULER = "training_state", "scheduler.pt"  # in a checkpoint of the trainer
_REPLACED = (  # methods of transformers.Trainer that are not its public interface
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_save_optimizer_and_scheduler",
)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An Accelerator that knows which processes share a model: give `prepare` all at once."""

    _mesh: DeviceMesh | None = None
    _once = False  # one result for each model, not for each process

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """What accelerate shards data by: batches differ over all dims but tp."""
        return self._mesh or super().torch_device_mesh

    def share(self, model: TensorParallel) -> None:
        """Take the ranks of `model` for one data-parallel process. Every process must call it."""
        peers = model.group.process_group
        if peers is None or self._mesh is not None:
            return
        ranks, size = dist.get_process_group_ranks(peers), model.tp_size
        if ranks != [*range(ranks[0], ranks[0] + size)] or ranks[0] % size:
            raise PlanError(
                message(
                    "accelerate cannot serve the ranks that share this model",
                    values=f"ranks {ranks} of {self.num_processes}",
                    because="it gives the same batch to consecutive processes",
                    try_='a mesh whose last dim is "tp", or parallelize(model, tp=...)',
                )
            )
        sizes = (self.num_processes // size, size)
        names = ("dp_replicate", "tp")  # accelerate's
        self._mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's; data loaders may stand before the model."""
        for one in args:
            if isinstance(one, TensorParallel):
                self.share(one)
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As accelerate's, with DDP over the processes that hold the same shards only."""
        if not isinstance(model, TensorParallel) or model.tp_size == 1:
            return super().prepare_model(model, device_placement, evaluation_mode)
        self.share(model)
        assert self._mesh is not None
        ready = super().prepare_model(model, device_placement, evaluation_mode=True)
        copies = self._mesh["dp_replicate"]
        if evaluation_mode or copies.size() == 1:
            return ready
        options = self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}
        wrapped = DistributedDataParallel(ready, process_group=copies.get_group(), **options)
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models[-1] = wrapped
        return wrapped

    def gather(self, tensor: Any) -> Any:
        """As accelerate's: of every process."""
        found = super().gather(tensor)
        if self._mesh is None or not self._once:
            return found
        world, size = self.num_processes, self._mesh["tp"].size()
        return recursively_apply(lambda x: x.unflatten(0, (world, -1))[::size].flatten(0, 1), found)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's: every sample once."""
        if use_gather_object and self._mesh is not None:
            raise AutoTPError(
                message(
                    "objects cannot be gathered for metrics",
                    values=f"{type(input_data).__name__}, {self._mesh}",
                    because="each of the ranks that share a model would count them once more",
                    try_="tensors",
                )
            )
        self._once = True
        try:
            return super().gather_for_metrics(input_data)
        finally:
            self._once = False


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer for a model that `autotp.parallelize` has made.

    Checkpoints hold the whole model as `from_pretrained` reads it, and `training_state`, which
    `autotp.load` reads: a run can be resumed on another number of processes.
    """

    model: TensorParallel

    def __init__(self, model: TensorParallel, *args: Any, **kwargs: Any) -> None:
        if not isinstance(model, TensorParallel):
            raise PlanError(
                message(
                    "this Trainer is for parallel models",
                    values=type(model).__name__,
                    because="others are trained by transformers.Trainer",
                    try_="Trainer(autotp.parallelize(model), ...)",
                )
            )
        super().__init__(model, *args, **kwargs)
        kind = type(model.skeleton)
        self.label_names = self.args.label_names or find_labels(kind)
        self.can_return_loss = can_return_loss(kind)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator that knows which processes share the model."""
        model, self.model = self.model, None  # type: ignore[assignment]
        super().create_accelerator_and_postprocess()  # a model's tp_size would ask for GPUs
        self.model = model
        self.accelerator.__class__ = Accelerator
        self.accelerator.share(model)
        self.gather_function = self.accelerator.gather_for_metrics

    def get_tp_size(self) -> int:
        """How many processes see the same batch."""
        return self.model.tp_size

    @property
    def _writes(self) -> bool:
        """Whether this process is of the first group, which writes for all."""
        mesh = self.accelerator.torch_device_mesh
        if mesh is None:
            return bool(self.args.should_save)
        return bool(mesh["dp_replicate"].get_local_rank() == 0)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write an ordinary Hugging Face checkpoint of the whole model. Every rank calls it."""
        folder = Path(output_dir or self.args.output_dir)
        if self._writes:
            self.model.save_pretrained(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._writes:
            save(Path(output_dir) / STATE, self.model, _inner(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / STATE).is_dir():
            return  # as transformers does for checkpoints without an optimizer
        load(Path(checkpoint) / STATE, self.model, _inner(self.optimizer))
        state = torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        files = sorted(Path(resume_from_checkpoint).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no .safetensors file in {resume_from_checkpoint}")
        state = {name: value for file in files for name, value in load_file(file).items()}
        for names in tied(self.model.skeleton).values():  # a tied tensor is stored once
            state |= {name: state[key] for name in names for key in names if key in state}
        self.model.load_state_dict(state)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that accelerate has wrapped."""
    while isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


for _name in _REPLACED:
    if not hasattr(transformers.Trainer, _name):
        raise ImportError(
            message(
                "autotp.trainer does not know this version of transformers",
                values=f"transformers {transformers.__version__}",
                because=f"its Trainer has no {_name}, which is replaced here",
                try_="transformers 5.24, or a newer autotp",
            )
        )
