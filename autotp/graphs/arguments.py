"""The arguments of a call as pieces of text, with operands apart, so that they can be renamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autotp.printing import target_text

_END = 9223372036854775807  # "to the end", in slices
_SHORT = 60  # characters: a literal of many numbers (ranges of every rank) is cut


@dataclass(frozen=True)
class Operand:
    """A value by name."""

    name: str


def arguments_of(node: Node, names: Mapping[Node, str]) -> tuple[Any, ...]:
    """Texts and `Operand`s; joined they are what stands between the parentheses of the call."""
    if node.op != "call_function":
        return ()
    args = list(node.args)
    if getattr(node.target, "__name__", "") == "draw":  # operator, stream, seed, number, ...
        args = [*args[4:], f"stream={args[1]}"]
    pieces: list[Any] = []
    for key, value in [*((None, arg) for arg in args), *node.kwargs.items()]:
        pieces.append(", " if pieces else "")
        pieces.append(f"{key}=" if key else "")
        pieces += _pieces(value, names)
    return _joined(pieces)


def _pieces(value: Any, names: Mapping[Node, str]) -> list[Any]:
    if isinstance(value, Node):
        return [Operand(names[value])]
    if isinstance(value, (list, tuple)) and any(isinstance(item, Node) for item in value):
        inner: list[Any] = []
        for item in value:
            inner += [", " if inner else "", *_pieces(item, names)]
        return ["[", *inner, "]"]
    if isinstance(value, torch.dtype):
        return [str(value).removeprefix("torch.")]
    if value == _END:
        return ["end"]
    text = target_text(value) if callable(value) else str(value)
    return [text if len(text) <= _SHORT else text[:_SHORT] + "..."]


def _joined(pieces: list[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif piece != "":
            found.append(piece)
    return tuple(found)
