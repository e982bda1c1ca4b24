"""The one-line notation of rules: `... k, n k -> ... n`.

Operands are separated by commas, dims by blanks. The same letter is the same dim; `...` stands for
broadcast leading dims; a letter that is missing from the result is summed over (`contract`); a `!`
before a letter bars it, because the operator mixes the items of that dim in a non-linear way.
An operand that is not given (a bias of None) is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from autotp.rules.context import Context, Dims
from autotp.unify import Factors


def apply(ctx: Context, node: Node, text: str, operands: Sequence[Node | None]) -> Dims:
    """Carry out a rule's text on operands; returns the dims of the result."""
    left, right = text.split("->")
    letters: dict[str, Factors] = {}
    leading: list[Dims] = []
    for spec, operand in zip(left.split(","), operands, strict=False):
        if operand is None:
            continue
        dims, tokens = ctx.dims(operand), spec.split()
        if tokens[0] == "...":
            tokens = tokens[1:]
            leading.append(dims[: len(dims) - len(tokens)])
            dims = dims[len(dims) - len(tokens) :]
        if len(tokens) > len(dims):  # broadcast: a bias may have fewer dims than the result
            tokens = tokens[len(tokens) - len(dims) :]
        for token, dim in zip(tokens, dims, strict=True):
            letter = token.lstrip("!")
            if token.startswith("!"):
                ctx.table.bar(dim, f"{name(node)} mixes the items of this dim")
            if letters.get(letter) and dim:
                ctx.table.unify(letters[letter], dim)
            letters[letter] = letters.get(letter) or dim
    result: list[Factors] = []
    out = right.split()
    for token in out:
        if token == "...":
            result += ctx.broadcast(leading, max((len(d) for d in leading), default=0))
        else:
            result.append(letters[token.lstrip("!")])
    for letter, dim in letters.items():
        if dim and letter not in {token.lstrip("!") for token in out}:
            ctx.use("contract", node, dim)
    return tuple(result)


def name(node: Node) -> str:
    """`aten.softmax` for a node that calls `aten.softmax.int`."""
    target = node.target
    text = str(target) if not callable(target) or hasattr(target, "_schema") else target.__name__
    return ".".join(text.split(".")[:2])
