"""How much of the work of matrix products a plan splits, attention included."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import torch
from torch.fx import Node

from autotp import sizes
from autotp.placement import locate
from autotp.planning import Plan
from autotp.rules import matmul, reduction, rule_for

DYNAMIC = 8  # what a size that is not fixed counts as
PRODUCTS = (
    *(matmul.addmm, matmul.baddbmm, matmul.einsum, matmul.grouped, matmul.linear, matmul.matmul),
    reduction.attention,
)
CHOICES = {"topk", "sort", "argmax", "max"}  # of experts


def split_share(plan: Plan) -> float:
    """The share of the multiplications that no rank repeats, without those of routers."""
    total = split = 0
    for node in plan.program().graph.nodes:
        if rule_for(node) in PRODUCTS and not _is_router(node):
            count = multiplications(node)
            total += count
            split += count * (node.meta["placement"][0] in "SP")
    return round(split / total, 4) if total else 0.0


def whole_products(plan: Plan) -> list[str]:
    """The products of 1 % of the work and more that every rank repeats, with their source lines."""
    counts: Counter[str] = Counter()
    total = 0
    for node in plan.program().graph.nodes:
        if rule_for(node) in PRODUCTS and not _is_router(node):
            total += multiplications(node)
            if node.meta["placement"][0] not in "SP":
                counts[f"{_name(node)} ({locate(node)})"] += multiplications(node)
    return [f"{what} {n / total:.0%}" for what, n in counts.most_common() if n >= 0.01 * total]


def multiplications(node: Node) -> int:
    """Of one product, with whole operands."""
    shapes = [_shape(source) for source in node.all_input_nodes if _is_tensor(source)]
    if rule_for(node) is reduction.attention:
        q, k, v = (_shape(source) for source in node.args[:3])
        return prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    if rule_for(node) is matmul.einsum:
        letters = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
        pairs = zip("".join(letters), [n for shape in shapes for n in shape], strict=False)
        found = dict(pairs)
        return prod(found.values())
    at = 1 if rule_for(node) in (matmul.addmm, matmul.baddbmm) else 0
    return prod(_shape(node)) * _shape(node.args[at])[-1]


def _is_router(node: Node) -> bool:
    """Whether experts are chosen by the largest results of a product."""
    reached, seen = [node], {node}
    while reached:
        for user in reached.pop().users:
            if _name(user) in CHOICES:
                return True
            if user not in seen and rule_for(user) not in PRODUCTS and _like(user, node):
                seen.add(user)
                reached.append(user)
    return False


def _like(user: Node, node: Node) -> bool:
    """Whether a result still has the numbers of a product, perhaps in another shape."""
    return _is_tensor(user) and prod(_shape(user)) == prod(_shape(node))


def _name(node: Node) -> str:
    return str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _shape(node: Any) -> list[int]:
    found = sizes.shape_of(node.meta["val"])
    return [count * DYNAMIC ** len(symbols) for count, symbols in found]
