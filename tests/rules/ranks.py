"""The ranks of a program side by side: their graphs are run call by call, on parts of operands.

Parts are taken and put together by positions, which share nothing with the product but `ranges`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autotp.axes import Dim, Shares, ranges

aten = torch.ops.aten
BIAS = {aten.addmm.default: 0, aten.baddbmm.default: 0, aten.linear.default: 2}


def run(
    graphs: Sequence[Graph], envs: Sequence[dict[str, Any]], contracts: Collection[str] = ()
) -> Iterator[Node]:
    """Run every rank's graph call by call; yields each call of the first once all have made it.

    A bias of a call that contracts belongs to the first rank alone: it is added once, behind g.
    """
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        if nodes[0].op != "call_function":
            continue
        for rank, (node, env) in enumerate(zip(nodes, envs, strict=True)):
            args, kwargs = torch.fx.map_arg(
                (node.args, dict(node.kwargs)), lambda n, env=env: copied(env[n.name])
            )
            at = BIAS.get(node.target, len(args))
            if rank and node.name in contracts and at < len(args):
                args = (*args[:at], torch.zeros_like(args[at]), *args[at + 1 :])
            env[node.name] = node.target(*args, **kwargs)
        yield nodes[0]


def reduce(node: Node, envs: list[dict[str, Any]]) -> None:
    """Sum a partial result over the ranks; a mean of a part counts as much as it has items."""
    parts = [env[node.name] for env in envs]
    if node.target is aten.mean.dim:
        source, dims = node.args[0].name, node.args[1]  # type: ignore[union-attr]
        counts = [torch.Size(env[source].shape[d] for d in dims).numel() for env in envs]  # type: ignore[union-attr]
        parts = [part * n / sum(counts) for part, n in zip(parts, counts, strict=True)]
    for env in envs:
        env[node.name] = torch.stack(parts).sum(0)


def positions(dim: Dim, shares: Shares, rank: int) -> Tensor:
    """Positions of the whole dim that a rank holds."""
    held = ranges(dim, shares, rank)
    return torch.tensor([i for start, stop in held for i in range(start, stop)], dtype=torch.long)


def joined(parts: Sequence[Tensor], held: tuple[int, Sequence[Tensor]]) -> Tensor:
    """Parts laid at their positions; each position is held once."""
    dim, places = held
    for part, own in zip(parts, places, strict=True):
        assert part.shape[dim] == len(own), f"{part.shape[dim]} items for {len(own)} positions"
    order = torch.cat(list(places))
    assert sorted(order.tolist()) == list(range(len(order))), f"positions {order.tolist()}"
    return torch.cat(list(parts), dim).index_select(dim, order.argsort())


def leaf(value: Tensor, fixed: bool) -> Tensor:
    """A copy; a leaf of autograd if it is of real or complex numbers, and not fixed."""
    copy = value.detach().clone()
    return copy.requires_grad_(not fixed and (copy.is_floating_point() or copy.is_complex()))


def copied(value: Any) -> Any:
    """A copy of a tensor, as an operator may write into its operand."""
    return pytree.tree_map_only(Tensor, torch.clone, value)
