"""A graph as DOT for graphviz, and as a networkx graph for GraphML and other tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import networkx as nx

from autotp.errors import PlanError, message
from autotp.graphs.select import Part
from autotp.graphs.text import placement_text
from autotp.graphs.values import NOTES, Value

COLOURS = {"attention": "#7aa6e8", "mlp": "#7cc48a", "vocabulary": "#e3b04b", "input": "#c39bd3"}
_FORWARD, _BACKWARD = "#eb7a5b", "#f2c94c"  # where messages are sent
COLLECTIVES = {"f": _BACKWARD, "scatter": _BACKWARD, "slice": _BACKWARD}
COLLECTIVES |= dict.fromkeys(NOTES.keys() - COLLECTIVES.keys(), _FORWARD)


def dot_text(chosen: Part) -> str:
    """The graph in DOT: products coloured by kind, f and g as circles, edges with shapes."""
    lines = [
        "digraph autotp {",
        f"  label={_quoted(chosen.title)} labelloc=t fontname=Helvetica",
        "  node [shape=box style=filled fillcolor=white fontname=Helvetica fontsize=10]",
        "  edge [fontname=Helvetica fontsize=8 color=gray50]",
    ]
    known = {value.name: value for value in chosen.values if value.role != "size"}
    lines += [f"  {_quoted(name)} [style=dashed]" for name in chosen.inputs]
    lines += [f"  {_quoted(v.name)} [{_looks(v, chosen.names[v.name])}]" for v in known.values()]
    for value in known.values():
        for name in value.operands:
            if name in known or name in chosen.inputs:
                source = known.get(name)
                label = edge_text(source) if source else ""
                lines.append(f"  {_quoted(name)} -> {_quoted(value.name)} [label={_quoted(label)}]")
    return "\n".join([*lines, "}"]) + "\n"


def edge_text(value: Value) -> str:
    """How a value lies, on an edge from it."""
    shape = f"[{', '.join(value.shape)}]" if value.dtype else ""
    return f"{placement_text(value)} {shape}".strip()


def _looks(value: Value, name: str) -> str:
    if value.role in COLLECTIVES:
        return f"label={_quoted(value.role)} shape=circle fillcolor={_quoted(_colour(value))}"
    shape = "shape=ellipse " if value.role in ("parameter", "buffer", "constant", "input") else ""
    label = name if shape else f"{name}\n{value.operator}"
    return f"{shape}label={_quoted(label)} fillcolor={_quoted(_colour(value))}"


def _colour(value: Value) -> str:
    return COLLECTIVES.get(value.role) or COLOURS.get(value.pair, "white")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def svg_text(chosen: Part) -> str:
    """The graph drawn by graphviz; PlanError if it is not installed or fails."""
    program = shutil.which("dot")
    if program is None:
        raise PlanError(
            message(
                "graphviz is not installed",
                values="no program `dot`",
                because="SVG is drawn by it",
                try_="apt-get install graphviz, or --format dot or html",
            )
        )
    source = dot_text(chosen)
    done = subprocess.run([program, "-Tsvg"], input=source, capture_output=True, text=True)
    if done.returncode:
        raise PlanError(
            message(
                "graphviz cannot draw this graph",
                values=f"{len(chosen.values)} values",
                because=done.stderr.strip() or f"exit code {done.returncode}",
                try_="one module: --module PATH",
            )
        )
    return done.stdout


def network_of(chosen: Part) -> Any:
    """A networkx graph: values as nodes with all that is known of them, uses as edges."""
    result = nx.DiGraph(title=_plain(chosen.title))
    for value in chosen.values:
        result.add_node(
            _plain(value.name),
            role=value.role,
            operator=_plain(value.operator),
            module=_plain(value.module),
            source=_plain(value.source),
            shape=f"[{', '.join(value.shape)}]" if value.dtype else "",
            dtype=value.dtype,
            axes=f"[{', '.join(map(str, value.dims))}]" if value.dims else "",
            placement=placement_text(value),
            pair=value.pair,
            part=value.part,
        )
        for name in value.operands:
            result.add_edge(_plain(name), _plain(value.name))
    return result


def graphml_text(chosen: Part) -> str:
    """GraphML, which Gephi, yEd and Cytoscape read."""
    return "\n".join(nx.generate_graphml(network_of(chosen))) + "\n"


def _plain(text: str) -> str:
    """Without characters that XML cannot hold."""
    return re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
