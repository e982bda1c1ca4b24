"""The graph as a networkx graph: regions of sharded computation, and GraphML for other tools."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import torch
from torch.fx import Graph, Node

from autotp.printing import target_text


def network(graph: Graph) -> nx.DiGraph:
    """Values as nodes (operator, placement, shape, module), uses as edges."""
    result = nx.DiGraph()
    for node in graph.nodes:
        value = node.meta.get("val")
        calls = node.meta.get("calls") or ()
        result.add_node(
            node.name,
            op=target_text(node.target),
            placement=node.meta.get("placement") or "",
            shape=str([*value.shape]) if isinstance(value, torch.Tensor) else "",
            module=calls[-1][0] if calls else "",
        )
        result.add_edges_from((source.name, node.name) for source in node.all_input_nodes)
    return result


def regions(graph: Graph) -> list[list[str]]:
    """Connected sets of values that differ between ranks, in graph order: from f to g."""
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    inside = [node.name for node in graph.nodes if _differs(node)]
    parts = nx.weakly_connected_components(network(graph).subgraph(inside))
    return sorted(
        (sorted(part, key=order.__getitem__) for part in parts), key=lambda p: order[p[0]]
    )


def write_graphml(graph: Graph, path: Path) -> None:
    """GraphML, which Gephi, yEd and Cytoscape read."""
    nx.write_graphml(network(graph), path)


def _differs(node: Node) -> bool:
    """Slices of the sequence aside, which lie between regions."""
    return str(node.meta.get("placement") or "I")[0] in "RSP" and "sliced" not in node.meta
