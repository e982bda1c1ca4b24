"""Operators together: axes that pass through several views are split in all of them alike."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node

from autotp.axes import leaves
from tests.rules.cases import bits, x
from tests.rules.harness import Case, Trace, prove

aten = torch.ops.aten
HEADS, SIZE, WIDTH, LENGTH = 5, 4, 3, 2


def lettered(case: Case, node: Node) -> str:
    """The dims of a value, axes lettered as they first occur."""
    letters: dict[str, str] = {}
    text = ", ".join(str(dim) for dim in case.inferred.dims[node])
    return re.sub(r"a\d+", lambda m: letters.setdefault(m[0], "abcdefgh"[len(letters)]), text)


def is_free(case: Case, node: Node, dim: int, leaf: int = 0) -> bool:
    """Whether an axis of a value is split by `prove`."""
    axis = list(leaves(case.inferred.dims[node][dim]))[leaf]
    return axis.name not in case.inferred.bars and not case.refused(axis.name)


def heads(t: Trace, value: Node, size: int = SIZE) -> Node:
    """[length, heads*size] as [heads, length, size]."""
    count = value.meta["val"].shape[-1] // size
    return t.call(aten.transpose.int, t.call(aten.view.default, value, [LENGTH, count, size]), 0, 1)


def attended(t: Trace, q: Node, k: Node, v: Node) -> Node:
    """Attention written out, [heads, length, size], and its output projection."""
    scores = t.call(aten.matmul.default, q, t.call(aten.transpose.int, k, -1, -2))
    mixed = t.call(aten.matmul.default, t.call(aten.softmax.int, scores, -1), v)
    width = math.prod(mixed.meta["val"].shape) // LENGTH
    flat = t.call(aten.reshape.default, t.call(aten.transpose.int, mixed, 0, 1), [LENGTH, width])
    return t.call(aten.linear.default, flat, x(WIDTH, width), x(WIDTH))


@pytest.mark.parametrize("cut", ["split", "split_with_sizes", "chunk", "slice"])
def test_a_fused_projection_is_split_by_heads_in_all_its_parts(cut: str) -> None:
    t, wide = Trace(), HEADS * SIZE
    weight, bias = t.input(x(3 * wide, WIDTH)), t.input(x(3 * wide))
    made = t.call(aten.linear.default, x(LENGTH, WIDTH), weight, bias)
    if cut == "slice":
        ends = (0, wide, 2 * wide), (wide, -wide, 2**63 - 1)
        parts = [t.call(aten.slice.Tensor, made, -1, a, b) for a, b in zip(*ends, strict=True)]
    else:
        args: dict[str, tuple[Any, Any]] = {
            "split": (aten.split.Tensor, wide),
            "split_with_sizes": (aten.split_with_sizes.default, [wide] * 3),
            "chunk": (aten.chunk.default, 3),
        }
        several = t.call(args[cut][0], made, args[cut][1], -1)
        parts = [t.call(operator.getitem, several, i) for i in range(3)]
    case = t.case(attended(t, *(heads(t, part) for part in parts)))
    prove(case)
    assert lettered(case, weight) == "a*b + a*b + a*c, d"
    assert is_free(case, weight, 0, 0) and is_free(case, bias, 0, 0)
    # of the last part alone the size could be split, but the weight would be split in part
    assert not is_free(case, weight, 0, 1) and not is_free(case, weight, 0, 5)


def test_an_interleaved_projection_is_split_by_heads() -> None:
    t = Trace()
    weight = t.input(x(HEADS * 3 * SIZE, WIDTH))
    made = t.call(aten.linear.default, x(LENGTH, WIDTH), weight)
    grouped = t.call(aten.view.default, made, [LENGTH, HEADS, 3 * SIZE])
    several = t.call(aten.split.Tensor, grouped, SIZE, -1)
    parts = [t.call(operator.getitem, several, i) for i in range(3)]
    case = t.case(attended(t, *(t.call(aten.transpose.int, part, 0, 1) for part in parts)))
    prove(case)
    assert lettered(case, weight) == "a*(b + b + c), d"
    assert is_free(case, weight, 0)


def test_parts_numbered_by_a_dim_of_their_own_bar_it_alone() -> None:
    t = Trace()
    weight = t.input(x(HEADS * 3 * SIZE, WIDTH))
    made = t.call(aten.linear.default, x(LENGTH, WIDTH), weight)
    grouped = t.call(aten.view.default, made, [LENGTH, HEADS, 3, SIZE])
    parts = [t.call(aten.select.int, grouped, 2, i) for i in range(3)]
    case = t.case(attended(t, *(t.call(aten.transpose.int, part, 0, 1) for part in parts)))
    prove(case)
    assert is_free(case, weight, 0)


@pytest.mark.parametrize("how", ["expand", "repeat_interleave", "enable_gqa"])
@pytest.mark.parametrize(("key_heads", "group"), [(3, 2), (5, 3), (2, 1)])
def test_key_heads_are_split_with_the_groups_of_query_heads(
    how: str, key_heads: int, group: int
) -> None:
    t, count = Trace(), key_heads * group
    weight = t.input(x(key_heads * SIZE, WIDTH))
    k, v = (
        heads(t, t.call(aten.linear.default, x(LENGTH, WIDTH), w))
        for w in (weight, x(key_heads * SIZE, WIDTH, seed=1))
    )
    queries = t.input(x(count * SIZE, WIDTH, seed=2))
    q = heads(t, t.call(aten.linear.default, x(LENGTH, WIDTH), queries))
    if how == "enable_gqa":
        op = aten.scaled_dot_product_attention.default
        q, k, v = (t.call(aten.unsqueeze.default, part, 0) for part in (q, k, v))
        case = t.case(t.call(op, q, k, v, enable_gqa=True))
    else:
        k, v = (several(t, part, how, group) for part in (k, v))
        case = t.case(attended(t, q, k, v))
    prove(case)
    assert is_free(case, weight, 0) and is_free(case, queries, 0)


def several(t: Trace, value: Node, how: str, group: int) -> Node:
    count, length, size = value.meta["val"].shape
    if how == "repeat_interleave":
        return t.call(aten.repeat_interleave.self_int, value, group, 0)
    wide = t.call(
        aten.expand.default, t.call(aten.unsqueeze.default, value, 1), [-1, group, -1, -1]
    )
    return t.call(aten.reshape.default, wide, [count * group, length, size])


def test_heads_pass_through_a_dim_of_batch_times_heads() -> None:
    t = Trace()
    wide = t.input(x(2, HEADS, LENGTH, SIZE))
    joined = t.call(aten.view.default, wide, [2 * HEADS, LENGTH, SIZE])
    slopes = t.call(aten.repeat.default, x(HEADS, 1, LENGTH), [2, 1, 1])
    scores = t.call(aten.baddbmm.default, slopes, joined, x(2 * HEADS, SIZE, LENGTH))
    case = t.case(t.call(aten.view.default, scores, [2, HEADS, LENGTH, LENGTH]))
    assert prove(case).sharded
    assert is_free(case, wide, 1) and is_free(case, wide, 0)


def test_rotary_embeddings_pass_heads_and_bar_halves() -> None:
    t = Trace()
    q = t.input(x(HEADS, LENGTH, 2 * SIZE))
    halves = t.call(aten.chunk.default, q, 2, -1)
    one, other = (t.call(operator.getitem, halves, i) for i in range(2))
    turned = t.call(aten.cat.default, [t.call(aten.neg.default, other), one], -1)
    result = t.call(aten.add.Tensor, q, t.call(aten.mul.Tensor, turned, x(LENGTH, 2 * SIZE)))
    case = t.case(result)
    prove(case)
    assert lettered(case, q) == "a, b, c + c"
    assert all(is_free(case, q, dim) for dim in range(3))  # the halves are alike


def test_every_second_item_is_taken_from_pairs() -> None:
    t = Trace()
    q = t.input(x(HEADS, 2 * SIZE))
    even, odd = (t.call(aten.slice.Tensor, q, 1, i, 2**63 - 1, 2) for i in range(2))
    pairs = t.call(aten.stack.default, [t.call(aten.neg.default, odd), even], -1)
    case = t.case(t.call(aten.flatten.using_ints, pairs, -2, -1), even, odd)
    prove(case)
    assert is_free(case, q, 0) and is_free(case, q, 1)


@pytest.mark.parametrize("sizes", [(5, 5), (4, 5), (1, 6)])
def test_parts_that_are_joined_and_cut_elsewhere_are_exact(sizes: tuple[int, int]) -> None:
    t = Trace()
    one, other = (t.input(x(2, size, seed=size)) for size in sizes)
    whole = t.call(aten.cat.default, [one, other, one], 1)
    again = t.call(aten.split_with_sizes.default, whole, [3, 2 * sizes[0] + sizes[1] - 3], 1)
    parts = [t.call(operator.getitem, again, i) for i in range(2)]
    prove(t.case(whole, *parts))


def test_a_mask_and_a_causal_order_leave_heads_free() -> None:
    t = Trace()
    q, k, v = (t.input(x(1, HEADS, 4, SIZE, seed=i)) for i in range(3))
    op = aten.scaled_dot_product_attention.default
    mask = t.call(
        aten.expand.default, bits(1, 1, 4, 4) | torch.eye(4, dtype=torch.bool), [1, HEADS, 4, 4]
    )
    case = t.case(t.call(op, q, k, v, mask), t.call(op, q, k, v, None, 0.0, True))
    prove(case)
    assert is_free(case, q, 1) and not is_free(case, q, 2) and not is_free(case, q, 3)
    assert is_free(case, v, 3)


def test_an_axis_that_is_summed_and_normalized_leaves_the_rest_free() -> None:
    t = Trace()
    value = t.input(x(4, 3, 5))
    normed = t.call(aten.layer_norm.default, value, [5], x(5), x(5, seed=1))
    case = t.case(t.call(aten.relu.default, t.call(aten.sum.dim_IntList, normed, [0], True)))
    prove(case)
    assert [is_free(case, value, dim) for dim in range(3)] == [True, True, False]


# ---- random chains


class Chain:
    """Random views and joins of one value whose items are all different."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.trace = draw, Trace()
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
        count = math.prod(shape)
        first = self.trace.input(torch.arange(count, dtype=torch.float64).reshape(shape))
        self.values = [first]

    @property
    def shape(self) -> list[int]:
        return list(self.values[-1].meta["val"].shape)

    def pick(self, high: int, low: int = 0) -> int:
        return self.draw(st.integers(low, high))

    def add(self, op: Any, *args: Any) -> None:
        self.values.append(self.trace.call(op, *args))

    def step(self) -> None:
        """One more call."""
        steps = [self.permute, self.reshape, self.merge, self.divide, self.cut, self.stride]
        steps += [self.copies, self.select, self.roll, self.join, self.plus, self.expand]
        self.draw(st.sampled_from(steps))()

    def permute(self) -> None:
        order = self.draw(st.permutations(range(len(self.shape))))
        self.add(aten.permute.default, self.values[-1], order)

    def reshape(self) -> None:
        """Into any shape of as many items."""
        rest, shape = math.prod(self.shape), []
        while rest > 1 and len(shape) < 3:
            shape.append(
                self.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
            )
            rest //= shape[-1]
        self.add(aten.reshape.default, self.values[-1], [*shape, rest])

    def merge(self) -> None:
        if len(self.shape) > 1:
            at = self.pick(len(self.shape) - 2)
            self.add(aten.flatten.using_ints, self.values[-1], at, at + 1)

    def divide(self) -> None:
        at = self.pick(len(self.shape) - 1) if self.shape else 0
        if self.shape and len(self.shape) < 5:
            size = self.shape[at]
            outer = self.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
            self.add(aten.unflatten.int, self.values[-1], at, [outer, size // outer])

    def cut(self) -> None:
        """Cut a dim in two, and keep one part or join both the other way round."""
        if self.shape:
            at = self.pick(len(self.shape) - 1)
            mark = self.pick(self.shape[at])
            source, rest = self.values[-1], self.shape[at] - mark
            both = self.trace.call(aten.split_with_sizes.default, source, [mark, rest], at)
            one, other = (self.trace.call(operator.getitem, both, i) for i in range(2))
            self.values += [one] if mark else []
            self.values += [other] if rest else []
            if mark and rest and self.draw(st.booleans()):
                self.add(aten.cat.default, [other, one], at)

    def stride(self) -> None:
        if self.shape:
            at = self.pick(len(self.shape) - 1)
            step, start = self.pick(3, 1), self.pick(self.shape[at] - 1)
            self.add(aten.slice.Tensor, self.values[-1], at, start, 2**63 - 1, step)

    def copies(self) -> None:
        if self.shape and math.prod(self.shape) < 100:
            count, at = self.pick(3, 1), self.pick(len(self.shape) - 1)
            if self.draw(st.booleans()):
                self.add(aten.repeat_interleave.self_int, self.values[-1], count, at)
            else:
                times = [count if i == at else 1 for i in range(len(self.shape))]
                self.add(aten.repeat.default, self.values[-1], times)

    def expand(self) -> None:
        if math.prod(self.shape) < 100 and len(self.shape) < 4:
            at, count = self.pick(len(self.shape)), self.pick(3, 1)
            self.add(aten.unsqueeze.default, self.values[-1], at)
            wide = [count if i == at else -1 for i in range(len(self.shape))]
            self.add(aten.expand.default, self.values[-1], wide)

    def select(self) -> None:
        if self.shape:
            at = self.pick(len(self.shape) - 1)
            self.add(aten.select.int, self.values[-1], at, self.pick(self.shape[at] - 1))

    def roll(self) -> None:
        if self.shape:
            self.add(aten.roll.default, self.values[-1], [1], [self.pick(len(self.shape) - 1)])

    def join(self) -> None:
        """Behind an earlier value that fits."""
        for at in range(len(self.shape)):
            fits = [v for v in self.values if _fits(list(v.meta["val"].shape), self.shape, at)]
            if math.prod(self.shape) < 100 and fits:
                other = self.draw(st.sampled_from(fits))
                return self.add(aten.cat.default, [other, self.values[-1]], at)
        return None

    def plus(self) -> None:
        """Added to an earlier value of the same shape."""
        fits = [v for v in self.values if list(v.meta["val"].shape) == self.shape]
        self.add(aten.add.Tensor, self.values[-1], self.draw(st.sampled_from(fits)))


def _fits(one: list[int], other: list[int], at: int) -> bool:
    return len(one) == len(other) and one[:at] + one[at + 1 :] == other[:at] + other[at + 1 :]


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_a_random_chain_of_views_is_the_same_on_shards(data: st.DataObject) -> None:
    chain = Chain(data.draw)
    for _ in range(data.draw(st.integers(1, 6))):
        chain.step()
    prove(chain.trace.case(*chain.values[1:]))
