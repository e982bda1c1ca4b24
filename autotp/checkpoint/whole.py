"""What a parallel model does with whole state dicts and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autotp.checkpoint.layout import part_shape
from autotp.checkpoint.names import some, tied
from autotp.checkpoint.saving import save_pretrained
from autotp.checkpoint.together import PATIENCE
from autotp.errors import CheckpointError, message
from autotp.runtime.weights import shard, unshard

if TYPE_CHECKING:
    from autotp.runtime.module import TensorParallel


MARK = "autotp"  # in the metadata of a local state dict


class Whole(nn.Module):
    """Saving and loading of a model whose parameters are spread over ranks."""

    def _tp_members(self) -> Sequence[TensorParallel]:
        """The ranks of the model that are in this process, in order."""
        raise NotImplementedError

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        max_shard_size: int | str = "50GB",
        timeout: float = PATIENCE,
    ) -> None:
        """Write an ordinary Hugging Face checkpoint, which `from_pretrained` loads to the bit.

        Every rank must call it. Rank 0 writes the files, tensor by tensor: no rank holds the whole
        model. The directory is replaced as a whole at the end: a crash leaves the old one. Raises
        on every rank if one fails, or does not come within `timeout` seconds.
        """
        save_pretrained(members_of(self), save_directory, max_shard_size, timeout)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The original's `state_dict()`: whole tensors, copies, on every rank.

        Every rank must call it, and has memory for the whole model (`save_pretrained` needs less).
        """
        first = members_of(self)[0]
        if first.group.process_group is not None:
            first.group.agree("full_state_dict", "called")
        found: dict[str, Tensor] = {}
        locals_ = [member.state_dict() for member in self._tp_members()]
        firsts = {name: key for key, names in tied(first.skeleton).items() for name in names}
        for name in first.skeleton.state_dict(keep_vars=True):
            key = firsts[name]
            made = next((found[n] for n in found if firsts[n] == key), None)
            found[name] = self._whole(key, [d[name] for d in locals_]) if made is None else made
        return found

    def _whole(self, key: str, parts: list[Tensor]) -> Tensor:
        first = self._tp_members()[0]
        plan, group = first.plan, first.group
        if not plan.is_sharded(key):
            return parts[0].detach().clone()
        ranges = [plan.ranges(key, rank) for rank in range(plan.tp)]
        if len(parts) < plan.tp:
            parts = group.all_gather(parts[0].detach(), [part_shape(held) for held in ranges])
        device = parts[0].device
        return unshard([part.detach().to(device) for part in parts], ranges).clone()


def members_of(model: nn.Module) -> Sequence[TensorParallel]:
    """The ranks of a parallel model in this process; CheckpointError for any other module.

    Parameters that FSDP2 has split once more are refused: their layout is not in the plan.
    """
    if not isinstance(model, Whole):
        raise CheckpointError(
            message(
                f"{type(model).__name__} is not a parallel model",
                values=type(model).__name__,
                because="what autotp.parallelize returned knows its layout, a wrapper does not",
                try_="the wrapper's .module; or parallelize(model, tp=1) for a single rank",
            )
        )
    members = model._tp_members()
    split = [name for m in members for name, p in m.named_parameters() if hasattr(p, "full_tensor")]
    if split:
        raise CheckpointError(
            message(
                "the parameters are split a second time",
                values=some(split),
                because="they are DTensors, of FSDP2 for example, whose layout is not in the plan",
                try_="save and load before fully_shard; torch.distributed.checkpoint after it",
            )
        )
    return members


def localize(
    member: TensorParallel, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]
) -> None:
    """Replace whole tensors in a state dict by the rank's parts; local ones stay.

    Raises CheckpointError that names each tensor with another shape than either.
    """
    writer, reader = metadata.get(MARK), mark(member)
    if writer not in (None, reader):
        raise _refused(
            member,
            f"written by {writer}, read by {reader}",
            "state_dict() holds the shards of one rank, which fit that rank only",
            "each rank its own state_dict(), or full_state_dict() everywhere",
        )
    plan = member.plan
    keys = {name: key for key, names in tied(member.skeleton).items() for name in names}
    wrong, kinds = [], dict[str, str]()
    for name, key in keys.items():
        tensor = state.get(prefix + name)
        if not isinstance(tensor, Tensor):
            continue
        found, whole = tuple(tensor.shape), plan.by_name[key].shape
        ranges = plan.ranges(key, member.rank)
        mine = part_shape(ranges)
        if found not in (whole, mine):
            also = "" if mine == whole else f", nor {list(mine)} as on rank {member.rank}"
            wrong.append(f"{name} is {list(found)}, not {list(whole)}{also}")
        elif mine != whole:
            kinds["whole" if found == whole else "local"] = name
            if found == whole:
                state[prefix + name] = shard(tensor, ranges)
    if wrong:
        because = "the tensors have other shapes than the model's"
        raise _refused(member, some(wrong), because, "a state dict of this model")
    if len(kinds) > 1:
        values = ", ".join(f"{name} is {kind}" for kind, name in kinds.items())
        raise _refused(member, values, "a state dict is whole or local", "one or the other")


def mark(member: TensorParallel) -> str:
    """Whose shards a local state dict holds."""
    return f"rank {member.rank} of {member.tp_size}"


def _refused(member: TensorParallel, values: str, because: str, try_: str) -> CheckpointError:
    what = f"this state dict does not fit {type(member.skeleton).__name__}"
    return CheckpointError(message(what, values, because, try_))
