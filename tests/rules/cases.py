"""A table of calls for every operator that has a rule: what tests/rules/test_truth.py proves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Sizes = tuple[int, int, int, int]
Call = Callable[[Sizes], tuple[Any, ...]]  # (overload, *arguments), last a dict of keywords


def x(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def bits(*shape: int, seed: int = 0) -> Tensor:
    return x(*shape, seed=seed) > 0


def fixed(value: Tensor) -> Tensor:
    """An operand by which the operator has no derivative."""
    value.fixed = True  # type: ignore[attr-defined]
    return value


def one_of(*shape: int) -> Tensor:
    """One item is true."""
    return x(*shape) == x(*shape).max()


def unary(op: Any, *rest: Any) -> Call:
    return lambda s: (op, x(s[0], s[1], s[2]), *rest)


def binary(op: Any, make: Callable[..., Tensor] = x) -> Call:
    """With broadcasting, as pointwise operators have it."""
    return lambda s: (op, make(s[0], 1, s[2]), make(s[1], s[2], seed=1))


def grouped(group: int, mask: bool = False) -> Call:
    """Attention in which several query heads read one key head."""

    def case(s: Sizes) -> tuple[Any, ...]:
        heads = group * s[1]
        q, k, v = x(s[0], heads, s[2], 4), x(s[0], s[1], s[3], 4), x(s[0], s[1], s[3], 2)
        given = x(heads, 1, s[3]) if mask else None
        op = aten.scaled_dot_product_attention.default
        return (op, q, k, v, given, {"enable_gqa": True})

    return case


# For each operator in the table: calls, from four sizes.
CASES: dict[str, list[Call]] = {
    "conv1d": [
        lambda s: (aten.conv1d.default, x(s[0], s[1], 7), x(s[2], s[1], 3), x(s[2])),
        lambda s: (aten.conv1d.default, x(s[0], s[1], 7), x(s[1], 1, 3), None, [1], [1], [1], s[1]),
        lambda s: (
            *(aten.conv1d.default, x(s[0], 2 * s[1], 7), x(2 * s[2], s[1], 3), x(2 * s[2])),
            *([1], [0], [1], 2),
        ),
    ],
    "conv2d": [
        lambda s: (aten.conv2d.default, x(s[0], s[1], 4, 5), x(s[2], s[1], 3, 2)),
        lambda s: (
            *(aten.conv2d.default, x(s[0], s[1], 4, 5), x(s[1], 1, 3, 2), x(s[1])),
            *([1, 1], [0, 0], [1, 1], s[1]),
        ),
    ],
    "conv3d": [lambda s: (aten.conv3d.default, x(s[0], s[1], 4, 3, 3), x(s[2], s[1], 3, 2, 2))],
    "gather": [lambda s: (aten.gather.default, x(s[0], s[1]), 1, ints(s[1], s[0], s[2]))],
    "index": [
        lambda s: (aten.index.Tensor, x(s[0], s[1], s[2]), [None, ints(s[1], s[3])]),
        lambda s: (
            aten.index.Tensor,
            x(s[0], s[1], s[2]),
            [ints(s[0], s[3], 1), None, ints(s[2], 2)],
        ),
        lambda s: (aten.index.Tensor, x(*s), [None, ints(s[1], s[3], 1), ints(s[2], 2)]),
        lambda s: (aten.index.Tensor, x(*s), [None, ints(s[1], 5), None, ints(s[3], 5)]),
        lambda s: (aten.index.Tensor, x(s[0], s[1]), [ints(s[0], s[2], s[3]) - s[0]]),
    ],
    "index_put": [
        lambda s: (
            aten.index_put.default,
            x(*s[:3]),
            [None, ints(s[1], s[3])],
            x(s[0], s[3], s[2]),
        ),
        lambda s: (
            aten.index_put.default,
            x(*s[:3]),
            [None, None, ints(s[2], 1)],
            x(s[0], s[1], 1),
        ),
        lambda s: (aten.index_put.default, x(*s[:3]), [None, ints(s[1], s[3])], x(s[2])),
        lambda s: (
            aten.index_put.default,
            x(*s[:3]),
            [ints(s[0], s[3]), None, ints(s[2], 1)],
            x(1),
        ),
    ],
    "index_copy": [
        lambda s: (
            *(aten.index_copy.default, x(s[0], s[1], s[2]), 1),
            *(torch.arange(s[1]).flip(0), x(s[0], s[1], s[2])),
        ),
    ],
    "index_copy_": [
        lambda s: (
            *(aten.index_copy_.default, x(s[0], s[1]), 0),
            *(torch.arange(s[0]).flip(0), x(s[0], s[1])),
        )
    ],
    "index_add": [
        lambda s: (aten.index_add.default, x(s[0], s[1]), -1, ints(s[1], s[2]), x(s[0], s[2]))
    ],
    "index_add_": [
        lambda s: (aten.index_add_.default, x(s[0], s[1]), 0, ints(s[0], s[2]), x(s[2], s[1]))
    ],
    "index_put_": [
        lambda s: (
            *(aten.index_put_.default, x(s[0], s[1], s[2])),
            *([None, torch.arange(s[1])], x(s[1], s[2])),
        )
    ],
    "scatter": [
        lambda s: (aten.scatter.value, x(s[0], s[1]), 1, ints(s[1], s[0], s[2]), 2.0),
        lambda s: (
            *(aten.scatter.src, x(s[0], s[1] + 1, s[2]), 1),
            *(torch.arange(s[1]).view(1, -1, 1).expand(s[0], s[1], s[2]), x(s[0], s[1], s[2])),
        ),
        lambda s: (
            *(aten.scatter.src, x(s[0] + 1, s[1]), -1),
            *(torch.arange(s[1]).expand(s[0], s[1]), x(s[0], s[1])),
        ),
    ],
    "scatter_": [lambda s: (aten.scatter_.value, x(s[0], s[1]), 0, ints(s[0], s[2], s[1]), 2.0)],
    "scatter_add": [
        lambda s: (
            *(aten.scatter_add.default, x(s[0], s[1]), 1),
            *(ints(s[1], s[0], s[2]), x(s[0], s[2])),
        )
    ],
    "scatter_add_": [
        lambda s: (
            *(aten.scatter_add_.default, x(s[0], s[1]), 0),
            *(ints(s[0], s[2], s[1]), x(s[2], s[1])),
        )
    ],
    "index_select": [lambda s: (aten.index_select.default, x(s[0], s[1]), 1, ints(s[1], s[2]))],
    "embedding": [lambda s: (aten.embedding.default, x(s[0], s[1]), ints(s[0], s[2], s[3]))],
    "cross_entropy_loss": [
        lambda s: (aten.cross_entropy_loss.default, x(s[0], s[1]), ints(s[1], s[0])),
        lambda s: (aten.cross_entropy_loss.default, x(s[0], s[1]), x(s[0], s[1]).softmax(1)),
        lambda s: (
            *(aten.cross_entropy_loss.default, x(s[0], s[1], s[2]), ints(s[1], s[0], s[2])),
            *(fixed(x(s[1]).exp()), 0),
        ),
        lambda s: (aten.cross_entropy_loss.default, x(s[1]), ints(s[1])),
    ],
    "addmm": [
        lambda s: (aten.addmm.default, x(s[0], 1), x(s[0], s[1]), x(s[1], s[2])),
        lambda s: (aten.addmm.default, x(s[2]), x(s[0], s[1]), x(s[1], s[2])),
        lambda s: (aten.addmm.default, x(s[0], s[2]), x(s[0], s[1]), x(s[1], s[2])),
    ],
    "baddbmm": [
        lambda s: (
            aten.baddbmm.default,
            x(s[3], s[0], s[2]),
            x(s[3], s[0], s[1]),
            x(s[3], s[1], s[2]),
        ),
        lambda s: (
            *(aten.baddbmm.default, x(1, s[0], s[2])),
            *(x(s[3], s[0], s[1]), x(s[3], s[1], s[2])),
        ),
    ],
    "einsum": [
        lambda s: (
            aten.einsum.default,
            "bhqd,bhkd->bhqk",
            [x(*s), x(s[0], s[1], s[2], s[3], seed=1)],
        ),
        lambda s: (aten.einsum.default, "bi,io->bo", [x(s[0], s[1]), x(s[1], s[2])]),
        lambda s: (aten.einsum.default, "a,b->ba", [x(s[0]), x(s[1])]),
        lambda s: (aten.einsum.default, "aab->ba", [x(s[0], s[0], s[1])]),
        lambda s: (
            *(aten.einsum.default, "ab, bc, cd -> ad"),
            [x(s[0], s[1]), x(s[1], s[2]), x(s[2], s[3])],
        ),
        lambda s: (aten.einsum.default, "...a,ab->...b", [x(s[0], s[1]), x(s[1], s[2])]),
    ],
    "linear": [
        lambda s: (aten.linear.default, x(s[0], s[1], s[2]), x(s[3], s[2]), x(s[3])),
        lambda s: (aten.linear.default, x(s[0], s[2]), x(s[3], s[2])),
        lambda s: (aten.linear.default, x(s[2]), x(s[3], s[2]), x(s[3])),
    ],
    "matmul": [
        lambda s: (aten.matmul.default, x(*s), x(s[0], s[1], s[3], s[2])),
        lambda s: (aten.matmul.default, x(s[0], s[1], s[2]), x(s[2], s[3])),
        lambda s: (aten.matmul.default, x(s[0], s[1]), x(s[1])),
        lambda s: (aten.matmul.default, x(s[1]), x(s[0], s[1], s[2])),
        lambda s: (aten.matmul.default, x(s[1]), x(s[1], seed=1)),
        lambda s: (aten.matmul.default, x(s[0], 1, s[1], s[2]), x(s[3], s[2], s[1])),
    ],
    "mm": [lambda s: (aten.mm.default, x(s[0], s[1]), x(s[1], s[2]))],
    "bmm": [lambda s: (aten.bmm.default, x(s[0], s[1], s[2]), x(s[0], s[2], s[3]))],
    "isin": [lambda s: (aten.isin.Tensor_Tensor, ints(9, s[0], s[1]), ints(9, s[2]))],
    "polar": [binary(aten.polar.default)],
    "prelu": [
        lambda s: (aten.prelu.default, x(s[0], s[1]), x(1)),
        lambda s: (aten.prelu.default, x(s[0], s[1]), x(s[1])),
        lambda s: (aten.prelu.default, x(s[0], s[1], s[2]), x(s[1])),
        lambda s: (aten.prelu.default, x(s[0], s[1], s[1]), x(s[1])),
        lambda s: (aten.prelu.default, x(s[0]), x(1)),
    ],
    "where": [lambda s: (aten.where.self, bits(s[1], 1), x(s[0], s[1], s[2]), x(s[2]))],
    "copy_": [lambda s: (aten.copy_.default, x(s[0], s[1]), x(s[1], seed=1))],
    "floor_divide": [binary(aten.floor_divide.default)],
    "masked_fill": [
        lambda s: (aten.masked_fill.Scalar, x(s[0], s[1], s[2]), bits(s[1], 1), 2.0),
        lambda s: (aten.masked_fill.Tensor, x(s[0], s[1]), bits(s[1]), torch.tensor(2.0).double()),
    ],
    "masked_fill_": [lambda s: (aten.masked_fill_.Scalar, x(s[0], s[1]), bits(s[1]), 2.0)],
    "scaled_dot_product_attention": [
        lambda s: (aten.scaled_dot_product_attention.default, x(*s), x(*s, seed=1), x(*s, seed=2)),
        lambda s: (
            *(aten.scaled_dot_product_attention.default, x(*s), x(*s, seed=1), x(*s, seed=2)),
            *(None, 0.0, True),
        ),
        lambda s: (
            *(aten.scaled_dot_product_attention.default, x(*s), x(s[0], s[1], 5, s[3])),
            *(x(s[0], s[1], 5, 3), x(1, s[1], s[2], 5)),
        ),
        lambda s: (
            *(aten.scaled_dot_product_attention.default, x(s[0], s[1], s[2]), x(s[0], s[3], s[2])),
            *(x(s[0], s[3], 2), x(s[1], s[3], seed=4) > -1),
        ),
        grouped(2),
        grouped(3, mask=True),
        lambda s: (
            *(aten.scaled_dot_product_attention.default, x(1, s[1], s[2], s[3])),
            *(x(s[0], s[1], s[2], s[3]), x(1, s[1], s[2], s[3], seed=2)),
        ),
    ],
    "layer_norm": [
        lambda s: (aten.layer_norm.default, x(s[0], s[1], s[2]), [s[2]], x(s[2]), x(s[2], seed=1)),
        lambda s: (aten.layer_norm.default, x(s[0], s[1], s[2]), [s[1], s[2]]),
        lambda s: (aten.layer_norm.default, x(*s), [s[2], s[3]], x(s[2], s[3])),
    ],
    "rms_norm": [lambda s: (aten.rms_norm.default, x(s[0], s[1], s[2]), [s[2]], x(s[2]))],
    "mean": [
        unary(aten.mean.dim, [1]),
        unary(aten.mean.dim, [0, -1], True),
        unary(aten.mean.default),
    ],
    "sum": [
        unary(aten.sum.dim_IntList, [1]),
        unary(aten.sum.dim_IntList, [-1], True),
        unary(aten.sum.dim_IntList, [0, 2]),
        unary(aten.sum.dim_IntList, []),
        unary(aten.sum.default),
    ],
    "all": [lambda s: (aten.all.dim, bits(s[0], s[1]), 1)],
    "any": [
        lambda s: (aten.any.dim, bits(s[0], s[1]), 1, True),
        lambda s: (aten.any.default, one_of(s[0], s[1])),
    ],
    "amax": [unary(aten.amax.default, [1])],
    "amin": [unary(aten.amin.default, [1], True)],
    "argmax": [unary(aten.argmax.default, 1)],
    "argmin": [unary(aten.argmin.default, -1, True)],
    "argsort": [unary(aten.argsort.default, 1), unary(aten.argsort.default)],
    "linalg_vector_norm": [
        unary(aten.linalg_vector_norm.default, 2, [1]),
        unary(aten.linalg_vector_norm.default),
    ],
    "logsumexp": [unary(aten.logsumexp.default, [1])],
    "max": [unary(aten.max.dim, 1), unary(aten.max.default)],
    "median": [unary(aten.median.dim, 1)],
    "min": [unary(aten.min.dim, 1, True)],
    "norm": [unary(aten.norm.ScalarOpt_dim, 2, [1]), unary(aten.norm.Scalar, 2)],
    "prod": [unary(aten.prod.dim_int, 1)],
    "sort": [unary(aten.sort.default, 1), unary(aten.sort.default)],
    "std": [unary(aten.std.correction, [1]), unary(aten.std.dim, [0], True)],
    "var": [unary(aten.var.correction, [1]), unary(aten.var.default)],
    "topk": [
        lambda s: (aten.topk.default, x(s[0], s[1] + 1, s[2]), 2, 1),
        lambda s: (aten.topk.default, x(s[0], s[1] + 1), 1),
        lambda s: (aten.topk.default, x(s[0], s[1] + 1), s[1] + 1),
    ],
    "diff": [
        unary(aten.diff.default, 1, 1),
        lambda s: (aten.diff.default, x(s[0], s[1]), 1, 0, x(1, s[1]), x(s[2], s[1])),
    ],
    "histc": [unary(aten.histc.default, 5)],
    "bincount": [lambda s: (aten.bincount.default, ints(s[0], s[1]))],
    "tril": [unary(aten.tril.default)],
    "triu": [unary(aten.triu.default, 1)],
    "cumprod": [unary(aten.cumprod.default, 1)],
    "cumsum": [unary(aten.cumsum.default, 1)],
    "logcumsumexp": [unary(aten.logcumsumexp.default, 1)],
    "flip": [unary(aten.flip.default, [1]), unary(aten.flip.default, [0, -1])],
    "roll": [unary(aten.roll.default, [1], [1]), unary(aten.roll.default, [1])],
    "softmax": [unary(aten.softmax.int, 1)],
    "log_softmax": [unary(aten.log_softmax.int, -1)],
    "_softmax": [unary(aten._softmax.default, 1, False)],
    "_log_softmax": [unary(aten._log_softmax.default, 1, False)],
    "view_as_complex": [lambda s: (aten.view_as_complex.default, x(s[0], s[1], 2))],
    "view_as_real": [
        lambda s: (aten.view_as_real.default, torch.complex(x(s[0], s[1]), x(s[0], s[1])))
    ],
    "mT": [lambda s: (aten.mT.default, x(s[0], s[1], s[2]))],
    "adjoint": [lambda s: (aten.adjoint.default, x(s[0], s[1], s[2]))],
    "matrix_H": [lambda s: (aten.matrix_H.default, x(s[0], s[1]))],
    "cat": [
        lambda s: (aten.cat.default, [x(s[0], s[1]), x(s[0], s[2], seed=1)], 1),
        lambda s: (aten.cat.default, [x(0), x(s[0], s[1]), x(s[0], s[1], seed=1)], -1),
    ],
    "concat": [lambda s: (aten.concat.default, [x(s[0], s[1]), x(s[2], s[1], seed=1)])],
    "concatenate": [
        lambda s: (aten.concatenate.default, [x(s[0], s[1]), x(s[0], s[2], seed=1)], 1)
    ],
    "log_sigmoid": [unary(aten.log_sigmoid.default)],
    "expand": [lambda s: (aten.expand.default, x(s[0], 1, s[2]), [s[3], -1, s[1], s[2]])],
    "expand_as": [lambda s: (aten.expand_as.default, x(s[0], 1), x(s[0], s[1]))],
    "broadcast_to": [lambda s: (aten.broadcast_to.default, x(1, s[1]), [s[0], s[1]])],
    "pad": [lambda s: (aten.pad.default, x(s[0], s[1]), [0, 1])],
    "constant_pad_nd": [
        lambda s: (aten.constant_pad_nd.default, x(s[0], s[1], s[2]), [1, 0, 0, 0]),
        lambda s: (aten.constant_pad_nd.default, x(s[0], s[1] + 2), [0, -1]),
    ],
    "permute": [unary(aten.permute.default, [2, 0, 1])],
    "transpose": [unary(aten.transpose.int, 0, -1)],
    "t": [lambda s: (aten.t.default, x(s[0], s[1]))],
    "numpy_T": [lambda s: (aten.numpy_T.default, x(s[0], s[1]))],
    "swapaxes": [unary(aten.swapaxes.default, 0, 1)],
    "swapdims": [unary(aten.swapdims.default, 1, 2)],
    "view": [
        lambda s: (aten.view.default, x(s[0], s[1] * s[2], s[3]), [s[0], s[1], s[2] * s[3]]),
        lambda s: (aten.view.default, x(s[0], s[1], s[2]), [s[0] * s[1], -1]),
        lambda s: (aten.view.default, x(s[0], s[1] * s[2] * s[3]), [s[0], -1, s[3]]),
        lambda s: (aten.view.default, x(s[0], 4, 6, s[1]), [s[0], 3, 8, s[1]]),
    ],
    "reshape": [lambda s: (aten.reshape.default, x(s[0], s[1] * s[2]), [s[0] * s[1], s[2]])],
    "_unsafe_view": [lambda s: (aten._unsafe_view.default, x(s[0], s[1]), [s[0] * s[1]])],
    "flatten": [unary(aten.flatten.using_ints, 1, 2)],
    "unflatten": [
        lambda s: (aten.unflatten.int, x(s[0], s[1] * s[2]), 1, [s[1], s[2]]),
        lambda s: (aten.unflatten.int, x(s[0], s[1] * s[2], s[3]), -2, [-1, s[2]]),
    ],
    "squeeze": [
        lambda s: (aten.squeeze.dim, x(s[0], 1, s[2]), 1),
        lambda s: (aten.squeeze.default, x(s[0] + 1, 1, s[2] + 1)),
    ],
    "unsqueeze": [unary(aten.unsqueeze.default, 1)],
    "view_as": [lambda s: (aten.view_as.default, x(s[0], s[1]), x(s[0], s[1], seed=1))],
    "reshape_as": [lambda s: (aten.reshape_as.default, x(s[0], s[1]), x(s[0], s[1], seed=1))],
    "repeat": [
        lambda s: (aten.repeat.default, x(s[0], s[1]), [s[2], 1, s[3]]),
        lambda s: (aten.repeat.default, x(s[0], s[1]), [s[2], s[3]]),
    ],
    "tile": [
        lambda s: (aten.tile.default, x(s[0], s[1]), [1, s[2]]),
        lambda s: (aten.tile.default, x(s[0], s[1]), [s[2]]),
        lambda s: (aten.tile.default, x(s[0], s[1]), [s[2], 1, s[3]]),
    ],
    "repeat_interleave": [
        unary(aten.repeat_interleave.self_int, 2, 1),
        lambda s: (aten.repeat_interleave.self_int, x(s[0], s[1]), s[2], -1),
        lambda s: (aten.repeat_interleave.self_int, x(s[0], s[1]), s[2]),  # not known
    ],
    "select": [lambda s: (aten.select.int, x(s[0], s[1], s[2]), 1, -1)],
    "slice": [
        lambda s: (aten.slice.Tensor, x(s[0], s[1] + s[2]), 1, s[1], s[1] + s[2]),
        lambda s: (aten.slice.Tensor, x(s[0], 2 * s[1]), 1, 1, 2**63 - 1, 2),
        lambda s: (aten.slice.Tensor, x(s[0], 3 * s[1] + 2), -1, -3, -1),
        lambda s: (aten.slice.Tensor, x(s[0], 2 * s[1] + 1), 1, 0, 2**63 - 1, 2),
    ],
    "narrow": [
        lambda s: (aten.narrow.default, x(s[0], s[1] + s[2]), 1, s[1], s[2]),
        lambda s: (aten.narrow.default, x(s[0], s[1]), 1, 0, s[1]),
    ],
    "split": [
        lambda s: (aten.split.Tensor, x(s[0], 3 * s[1]), s[1], 1),
        lambda s: (aten.split.sizes, x(s[0] + s[1], s[2]), [s[0], s[1]]),
    ],
    "split_with_sizes": [
        lambda s: (aten.split_with_sizes.default, x(s[0], s[1] + s[2]), [s[1], s[2]], 1)
    ],
    "chunk": [lambda s: (aten.chunk.default, x(s[0], s[1] + 2), 2, 1)],
    "tensor_split": [
        lambda s: (aten.tensor_split.sections, x(s[0], s[1] + 3), 3, 1),
        lambda s: (aten.tensor_split.indices, x(s[0], s[1] + 3), [1, s[1]], 1),
    ],
    "unsafe_chunk": [lambda s: (aten.unsafe_chunk.default, x(s[0], s[1] + 2), 2, 1)],
    "unsafe_split": [lambda s: (aten.unsafe_split.Tensor, x(s[0], 2 * s[1]), s[1], 1)],
    "stack": [lambda s: (aten.stack.default, [x(s[0], s[1]), x(s[0], s[1], seed=1)], 1)],
    "unbind": [unary(aten.unbind.int, 1)],
    "full": [lambda s: (aten.full.default, [s[0], s[1]], 3.0)],
    "empty": [lambda s: (aten.empty.memory_format, [s[0], s[1]])],
    "new_empty": [lambda s: (aten.new_empty.default, x(2), [s[0], s[1]])],
    "empty_like": [unary(aten.empty_like.default)],
    "rand_like": [unary(aten.rand_like.default)],
    "randn_like": [unary(aten.randn_like.default)],
    "ones": [lambda s: (aten.ones.default, [s[0], s[1]])],
    "zeros": [lambda s: (aten.zeros.default, [s[0], s[1]])],
    "scalar_tensor": [lambda s: (aten.scalar_tensor.default, 3.0)],
    "new_full": [lambda s: (aten.new_full.default, x(2), [s[0], s[1]], 3.0)],
    "new_ones": [lambda s: (aten.new_ones.default, x(2), [s[0], s[1]])],
    "new_zeros": [lambda s: (aten.new_zeros.default, x(2), [s[0], s[1]])],
    "alias": [unary(aten.alias.default)],
    "_to_copy": [unary(aten._to_copy.default)],
    "alpha_dropout": [unary(aten.alpha_dropout.default, 0.5, False)],
    "bernoulli": [lambda s: (aten.bernoulli.default, bits(s[0], s[1]).double())],
    "celu": [unary(aten.celu.default)],
    "contiguous": [unary(aten.contiguous.default)],
    "detach": [unary(aten.detach.default)],
    "detach_": [unary(aten.detach_.default)],
    "dropout": [unary(aten.dropout.default, 0.5, False)],
    "native_dropout": [unary(aten.native_dropout.default, 0.5, False)],
    "full_like": [unary(aten.full_like.default, 2.0)],
    "ones_like": [unary(aten.ones_like.default)],
    "zeros_like": [unary(aten.zeros_like.default)],
    "lift_fresh_copy": [unary(aten.lift_fresh_copy.default)],
    "to": [unary(aten.to.dtype, torch.float32)],
    "type_as": [lambda s: (aten.type_as.default, x(s[0], s[1]), x(2).float())],
    **{op: [binary(getattr(aten, op).Tensor, bits)] for op in ["__and__", "__or__", "__xor__"]},
    **{
        op: [lambda s, op=op: (getattr(aten, op).Tensor, bits(s[0], s[1]), bits(s[1], seed=1))]  # type: ignore[misc]
        for op in ["__iand__", "__ior__"]
    },
}
