"""Names for sizes that are not fixed: `batch` and `seq` instead of `s52` and `s27`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from autotp import sizes
from autotp.program import Program

_FIRST = ("batch", "seq")  # what dims 0 and 1 of inputs mostly are: a name to read, not a claim


def symbol_names(program: Program) -> tuple[dict[str, str], dict[str, str]]:
    """A display name for each symbol of the inputs' sizes, and where each of these comes from."""
    names: dict[str, str] = {}
    where: dict[str, str] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for at, (_, symbols) in enumerate(sizes.shape_of(value)):
            for symbol in symbols:
                if symbol in names:
                    continue
                name = _FIRST[at] if at < len(_FIRST) and _FIRST[at] not in where else ""
                names[symbol] = name or f"n{len(names)}"
                where[names[symbol]] = f"dim {at} of {node.name.removeprefix('kwargs_')}"
    return names, where


def display(size: Any, names: Mapping[str, str]) -> str:
    """A size with its symbols by name, in the order of the names."""
    count, symbols = sizes.size_of(size)
    order = {symbol: at for at, symbol in enumerate(names)}
    symbols = tuple(sorted(symbols, key=lambda symbol: (order.get(symbol, len(order)), symbol)))
    found = sizes.text((count, symbols))
    return re.sub(r"\bs\d+\b", lambda match: names.get(match.group(), match.group()), found)
