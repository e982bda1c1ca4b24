"""One HTML page with a plan's graph: data, styles and scripts in the file, nothing is fetched."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

from autotp.explaining import explain
from autotp.graphs.alike import modules, tree
from autotp.graphs.arguments import Operand
from autotp.graphs.text import placement_text
from autotp.graphs.values import NOTES, Value, view
from autotp.planning import Plan

_SCRIPTS = ("dagre.min.js", "data.js", "graph.js", "draw.js", "panel.js", "page.js")


def page(plan: Plan) -> str:
    """The text of the page."""
    files = resources.files("autotp.graphs").joinpath("assets")

    def read(name: str) -> str:
        text = files.joinpath(name).read_text(encoding="utf-8")
        return text.partition("//# sourceMappingURL")[0]

    data = json.dumps(page_data(plan), separators=(",", ":"), ensure_ascii=True)
    scripts = [f"<script>\n{read(name)}\n</script>" for name in _SCRIPTS]
    parts = {
        "TITLE": html.escape(f"{plan.model}, tp={plan.tp}"),
        "STYLE": read("page.css"),
        "DATA": data.replace("<", "\\u003c"),  # no text in it can end the element
        "LICENSE": read("dagre.LICENSE").strip(),
        "SCRIPTS": "\n".join(scripts),
    }
    pieces = read("page.html").split("@@")  # text, name, text, name, ... (data is not searched)
    return "".join(parts[p] if at % 2 else p for at, p in enumerate(pieces))


class _Table:
    """Texts that occur often, by number."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self._numbers: dict[str, int] = {}

    def __call__(self, item: Any) -> int:
        key = json.dumps(item)
        if key not in self._numbers:
            self._numbers[key] = len(self.texts)
            self.texts.append(item)
        return self._numbers[key]


def page_data(plan: Plan) -> dict[str, Any]:
    """What the page shows, as plain lists and dicts. A value is a list in the order of `FIELDS`;
    fields that begin with `#` are numbers in the table of texts."""
    seen = view(plan, "after")
    table = _Table()
    numbers = {value.name: at for at, value in enumerate(seen.values)}
    values = [_value(value, numbers, table, plan) for value in seen.values]
    return {
        "model": plan.model,
        "tp": plan.tp,
        "plan": str(plan),
        "symbols": dict(seen.symbols),
        "notes": NOTES,
        "axes": {
            axis.name: [axis.kind, axis.units, axis.bounds, axis.columns, axis.rows]
            for axis in plan.axes
        },
        "collectives": vars(plan.collectives),
        "parameters": [plan.parameters(rank) for rank in range(plan.tp)],
        "modules": [[m.path, m.kind, m.run] for m in modules(seen)],
        "returned": [numbers[name] for name in seen.returned if name in numbers],
        "fields": list(FIELDS),
        "texts": table.texts,
        "values": values,
    }


FIELDS = (
    *("name", "#role", "#operator", "arguments", "operands", "#module", "#kind", "#source"),
    *("#dtype", "#shape", "#dims", "results", "#placement", "#where", "#axis", "#pair", "#part"),
    *("#rule", "#bars", "#whole", "#slice", "explained"),
)


def _value(value: Value, numbers: dict[str, int], table: _Table, plan: Plan) -> list[Any]:
    tensor = value.role in ("parameter", "buffer")
    arguments = [
        numbers.get(p.name, p.name) if isinstance(p, Operand) else [p] for p in value.arguments
    ]
    split = value.placement == "S" and value.slice is None
    dims = [tree(dim, plan.shares) for dim in value.dims] if split else []
    return [
        value.name,
        table(value.role),
        table(value.operator),
        arguments,
        [numbers[name] for name in value.operands if name in numbers],
        table(value.module),
        table(value.kind),
        table(value.source),
        table(value.dtype),
        table(list(value.shape)),
        table(dims),
        value.results,
        table(value.placement),
        table(placement_text(value)),
        table(value.axis),
        table(value.pair),
        table(value.part),
        table(value.rule),
        table(_distinct(value.bars)),
        table(_distinct(value.whole)),
        table(value.slice),
        explain(plan, value.operator, chain=False) if tensor else "",
    ]


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
