"""Parameters that know that they are shards: ordinary tools get the whole model's numbers.

    torch.nn.utils.clip_grad_norm_(tp_model.parameters(), 1.0)      the norm over all ranks
    torch.amp.GradScaler().step(optimizer)                          all ranks skip, or none
    torch.nn.utils.parameters_to_vector(tp_model.parameters())      ShardError

Element by element a shard is as good as the whole, so optimizers work on it as they are. Numbers
made of all elements (norm, sum, mean, max, ...) are reduced over the ranks. Whatever else computes
a tensor from a shard would mean something else on each rank, and raises. `to_local()` gives the
plain tensor. The emitted code reads parameters with this switched off, at no cost.

Plain local tensors were preferred to DTensor, see docs/parameters.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autotp.errors import ShardError, message
from autotp.runtime.collectives import reduce_from_region
from autotp.runtime.foreach import supported
from autotp.runtime.group import Group

plain = torch._C.DisableTorchFunctionSubclass  # public: torch's notes on extending name it

_OPERATORS = {"add", "and", "div", "mul", "or", "pow", "sub", "truediv", "xor"}
_KEPT = {"requires_grad_", "data", "grad", "real"}
_EACH = {  # besides what torch tags as pointwise
    *("alias", "clone", "contiguous", "copy_", "detach", "detach_", "dropout", "empty_like"),
    *("fill_", "full_like", "masked_fill_", "ones_like", "rand_like", "randn_like", "to"),
    *("type_as", "where", "zero_", "zeros_like"),
}
_PRODUCTS = {"addmm", "baddbmm", "bmm", "mm"}
_SHAPED = {"expand", "expand_as", "flatten", "reshape", "reshape_as", "squeeze", "view", "view_as"}
_REFUSED = {"H", "T", "mH", "mT", "__contains__", "__getitem__", "__iter__"}


@dataclass(frozen=True)
class Shard:
    """Which parameter a tensor is a part of, its whole shape, and the ranks that hold the rest."""

    name: str
    whole: tuple[int, ...]
    group: Group


class _Sharded:
    """What parameters and tensors have in common that are shards."""

    shard: Shard

    def to_local(self) -> Tensor:
        """This rank's part as a plain tensor with the same storage."""
        with plain():
            return self.as_subclass(Tensor)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with plain():
            return _call(func, tuple(args), dict(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_local().detach().__reduce_ex__(protocol)  # a file holds tensors


class ShardedTensor(_Sharded, Tensor):
    """A gradient or another tensor that lies as a sharded parameter does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) not in memo:
            memo[id(self)] = _wrap(self.to_local().detach().clone(), self.shard)
        return memo[id(self)]  # type: ignore[no-any-return]


class ShardedParameter(_Sharded, nn.Parameter):
    """This rank's part of a parameter. Its `grad` is a ShardedTensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if id(self) not in memo:
            memo[id(self)] = sharded(
                self.to_local().detach().clone(), self.requires_grad, self.shard
            )
        return memo[id(self)]  # type: ignore[no-any-return]


def sharded(part: Tensor, requires_grad: bool, shard: Shard) -> ShardedParameter:
    """A parameter that is a shard."""
    made = ShardedParameter(part, requires_grad)
    made.shard = shard
    return made


def local(tensor: Any) -> Any:
    """The plain tensor of a shard; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, _Sharded) else tensor


def _wrap(value: Tensor, shard: Shard) -> ShardedTensor:
    made = value.as_subclass(ShardedTensor)
    made.shard = shard
    return made


# ---- what a call means


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a torch function some of whose operands are shards."""
    if _is_compiled(func, kwargs):
        return func(*args, **kwargs)
    name = _name(func)
    if name == "_foreach_norm":
        return _norms(args[0], *args[1:], **kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(func, *args, **kwargs)
    first = _first((*args, *kwargs.values()))
    if name in ("linalg_vector_norm", "norm", "linalg_norm"):
        return _norm(name, first, args, kwargs)
    if name in _REDUCED and isinstance(args[0], _Sharded) and len(args) == 1 and _no_dim(kwargs):
        return _REDUCED[name](first, func, kwargs)
    if name in _REFUSED or _kind(name) == "other":
        raise _refused(name, first)
    if name == "__setitem__" and not _is_mask(args[1], first):
        raise _refused(name, first)
    result = func(*args, **kwargs)
    if name == "_base":
        return result  # of a view: another tensor, which would be a view again if it were wrapped
    if isinstance(result, Tensor):
        return _like(name, result, first)
    if isinstance(result, (list, tuple)) and name.startswith("_foreach"):
        return [
            _like(name, value, _first(row)) for value, row in zip(result, _rows(args), strict=True)
        ]
    return result


def _is_compiled(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is one that torch.compile makes: an overload by its name, or a product into
    memory that is there. Both belong to a graph that computes with the part."""
    product = getattr(func, "__name__", "") in _PRODUCTS and isinstance(kwargs.get("out"), Tensor)
    return product or isinstance(func, torch._ops.OpOverload)


def _like(name: str, result: Tensor, first: Any) -> Tensor:
    """A result that lies as its operand does; anything else is not what it seems."""
    if isinstance(result, _Sharded) or first is None:
        return result  # written in place
    if result.shape == first.shape:
        return _wrap(result, first.shard)
    raise _refused(name, first)


def _is_mask(index: Any, first: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool and index.shape == first.shape


def _name(func: Any) -> str:
    """`add_` for Tensor.add_ and Tensor.__iadd__, `grad` for reading Tensor.grad."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = str(func.__self__.__name__)
        return attribute if name == "__get__" else f"set {attribute}"
    stem = name.strip("_")
    if name.startswith("__") and stem not in _OPERATORS and stem[1:] in _OPERATORS:
        return f"{stem[1:]}_" if stem[0] == "i" else stem[1:]
    return stem if name.startswith("__") and stem in _OPERATORS else str(name)


@functools.cache
def _kind(name: str) -> str:
    """What a function does: "fact" (no tensor of data), "each" (element by element), or "other"."""
    if name.startswith("_fused_") or name in _KEPT or name in _SHAPED:
        return "each"  # of shapes: the result's is looked at
    stem = name.removeprefix("_foreach_")
    stem = "div" if stem == "truediv" else stem
    packet = getattr(torch.ops.aten, stem, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return "fact"
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    if not any("Tensor" in str(out.type) for op in overloads for out in op._schema.returns):
        return "fact"
    each = stem in _EACH or any(torch.Tag.pointwise in op.tags for op in overloads)
    return "each" if each else "other"


def _first(values: Any) -> Any:
    """The first shard among values and lists of values."""
    for value in values:
        if isinstance(value, _Sharded):
            return value
        if isinstance(value, (list, tuple)):
            found = _first(value)
            if found is not None:
                return found
    return None


def _rows(args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Operands of a foreach function by tensor."""
    count = len(args[0])
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == count]
    return list(zip(*lists, strict=True))


def _no_dim(kwargs: Mapping[str, Any]) -> bool:
    return set(kwargs) <= {"dtype"}


# ---- numbers of all elements

_Reduce: TypeAlias = Callable[[Any, Any, Mapping[str, Any]], Tensor]


def _group(first: Any) -> Group:
    group: Group = first.shard.group
    if group.size > 1 and group.process_group is None:
        raise ShardError(
            message(
                f"{first.shard.name} is reduced over ranks that run in lockstep",
                values=f"{group.size} ranks in one process",
                because="each of them would wait for the others",
                try_="real ranks (torchrun), or full_state_dict()",
            )
        )
    return group


def _sum(first: Any, func: Any, kwargs: Mapping[str, Any]) -> Tensor:
    here: Tensor = func(first, **kwargs)
    return reduce_from_region(here, _group(first))


def _mean(first: Any, func: Any, kwargs: Mapping[str, Any]) -> Tensor:
    total = _sum(first, torch.sum, kwargs)
    return total.div(prod(first.shard.whole))


def _max(first: Any, func: Any, kwargs: Mapping[str, Any]) -> Tensor:
    data = first.detach()
    lowest = float("-inf") if data.is_floating_point() else torch.iinfo(data.dtype).min
    here = data.max() if data.numel() else data.new_full((), lowest)
    return _group(first).all_reduce(here, "max")


def _min(first: Any, func: Any, kwargs: Mapping[str, Any]) -> Tensor:
    return -_max(_wrap(-first.detach(), first.shard), func, kwargs)


def _any(first: Any, func: Any, kwargs: Mapping[str, Any]) -> Tensor:
    here = first.detach().any()
    return _group(first).all_reduce(here.to(torch.uint8), "max").bool()


def _all(first: Any, func: Any, kwargs: Mapping[str, Any]) -> Tensor:
    fails: Tensor = first.detach().all().logical_not()
    return _group(first).all_reduce(fails.to(torch.uint8), "max").bool().logical_not()


_REDUCED: dict[str, _Reduce] = {
    "all": _all,
    "amax": _max,
    "amin": _min,
    "any": _any,
    "count_nonzero": _sum,
    "max": _max,
    "mean": _mean,
    "min": _min,
    "sum": _sum,
}


def _norm(name: str, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The norm of a whole tensor, as a vector."""
    given = dict(zip(("x", "p", "dim", "keepdim"), args, strict=False)) | kwargs
    order = next((given[key] for key in ("p", "ord") if given.get(key) is not None), 2)
    flat = given.get("dim") is None and not given.get("keepdim")
    matrix = name == "linalg_norm" and first.dim() > 1 and order not in (2, "fro")
    spectral = name == "linalg_norm" and first.dim() > 1 and given.get("p", given.get("ord")) == 2
    if not flat or matrix or spectral or order == "nuc":
        raise _refused(name, first)
    (found,) = _norms([first], 2 if order == "fro" else order, given.get("dtype"))
    return found


def _norms(
    tensors: Sequence[Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The norms of several tensors; those of shards in one all-reduce."""
    order = float(ord)
    here = list(torch._foreach_norm(list(tensors), order, dtype=dtype))
    shards = [i for i, x in enumerate(tensors) if isinstance(x, _Sharded)]
    group = _group(tensors[shards[0]])
    if order == float("inf"):
        whole = group.all_reduce(torch.stack([here[i].detach() for i in shards]), "max")
    else:
        powers = [here[i].double() ** order if order else here[i].double() for i in shards]
        whole = reduce_from_region(torch.stack(powers), group)
        whole = whole ** (1 / order) if order else whole
    for i, value in zip(shards, whole.unbind(), strict=True):
        here[i] = value.to(here[i].dtype)
    return here


def _unscale(func: Any, grads: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """All ranks see what one of them has found, so that they skip the step together."""
    func(grads, found_inf, inv_scale)
    found_inf.copy_(_group(_first(grads)).all_reduce(found_inf, "max"))


def _refused(name: str, first: Any) -> ShardError:
    shard: Shard = first.shard
    return ShardError(
        message(
            f"{name} of a shard is not {name} of the whole tensor",
            values=f"{shard.name}: {[*first.shape]} of {[*shard.whole]} on rank "
            f"{shard.group.rank} of {shard.group.size}",
            because="it mixes elements, of which this rank has a part",
            try_="an optimizer that works element by element (SGD, Adam, AdamW), full_state_dict() "
            "for whole tensors, as_dtensors() before fully_shard, to_local() if the part is meant",
        )
    )


supported(ShardedParameter, ShardedTensor)
