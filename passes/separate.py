"""A reshape that copies is a copy on every rank, where something writes to its memory later.

before  %many : reshape(expand(unsqueeze(%k, 2), [2, 3, 2, 5, 4]), [2, 6, 5, 4])
        %add_ : add_(%k, 1.0)
after   %clone : clone(expand(...), memory_format=contiguous)
        %many : reshape(%clone, [2, 6, 5, 4])

Whether `reshape` makes a copy or a view depends on sizes: with one head left on a rank, the reshape
above is a view, and the write would show in it. The model's own strides say which one is meant.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Node

from autotp.program import Program, copied, is_new, overwritten
from autotp.proof.shapes import example

aten = torch.ops.aten
_RESHAPES = {aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default}


def separate(program: Program) -> Program:
    """The program with such reshapes preceded by a copy."""
    if not _found(program):
        return program
    program = replace(program, graph=copied(program.graph))
    found = _found(program)
    for node in found:
        source = node.args[0]
        assert isinstance(source, Node)
        with program.graph.inserting_before(node):
            keep: dict[str, Any] = {"memory_format": torch.contiguous_format}
            made = program.graph.call_function(aten.clone.default, (source,), keep)
        value = source.meta["val"]
        made.meta = {**node.meta, "val": value.new_empty(value.shape)}
        node.args = (made, *node.args[1:])
    note = f"{len(found)} reshapes copy on every rank"
    return replace(program, provenance=(*program.provenance, note))


def _found(program: Program) -> list[Node]:
    """Reshapes that copy, of values whose memory is written to further on."""
    later: set[Node] = set()  # where the memory is that is written to from here on
    found = []
    for node in reversed(program.graph.nodes):
        later.update(_root(value) for value in overwritten(node))
        if node.target in _RESHAPES and _root(node) in later and _copies(node):
            found.append(node)
    return found


def _root(node: Node) -> Node:
    """A value in whose memory another may lie."""
    while node.args and isinstance(node.args[0], Node) and not is_new(node):
        node = node.args[0]
    return node


def _copies(node: Node) -> bool:
    """Whether a reshape of the whole model makes a copy."""
    source = node.args[0]
    assert isinstance(source, Node)
    given, made = source.meta["val"], node.meta["val"]
    sizes = [[example(size) for size in each] for each in (given.shape, given.stride(), made.shape)]
    if any(None in each for each in sizes):
        return False
    shape, strides, wanted = cast(list[list[int]], sizes)
    blank = torch.empty_strided(shape, strides, device="meta")
    if node.target is aten.contiguous.default:
        return not blank.is_contiguous()
    try:
        blank.view(wanted)
    except RuntimeError:
        return True
    return False
