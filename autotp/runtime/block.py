"""Block: what every module of the original becomes. Parameters under their names, and code per
call."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.fx import Graph

from autotp.runtime.group import Group
from autotp.runtime.native import native


class Code:
    """The compiled function of one graph. Equal functions are shared, so copying returns itself."""

    def __init__(self, graph: Graph, function: Callable[..., Any]) -> None:
        self.graph = graph
        self.function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> Code:
        return self


class Block(nn.Module):
    """One module of the original model, with this rank's shards.

    `forward` takes the values that flow into the module in the captured graph; the caller's code
    says which of the captured graphs it wants.
    """

    def __init__(self, kind: str, note: str = "") -> None:
        super().__init__()
        self._tp_codes: list[Code] = []
        self._tp_group: Group | None = None
        self._kind, self._note = kind, note

    def forward(self, *values: Any, _graph: int = 0) -> Any:
        """Run one captured call of this module."""
        return self._tp_codes[_graph].function(self, *values)

    def _get_name(self) -> str:
        return self._kind

    def extra_repr(self) -> str:
        """The local shapes of split parameters."""
        return self._note


class BlockList(Block):
    """A block that was a sequence of modules: it can be indexed as that."""

    def __getitem__(self, index: int) -> nn.Module:
        return list(self._modules.values())[index]  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(m for m in self._modules.values() if m is not None)


class Compiler:
    """Turns graphs into functions; graphs with the same text share one."""

    def __init__(self) -> None:
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, graph: Graph, name: str) -> Code:
        code = native(graph).python_code("self")
        key = (code.src, *sorted((k, id(v)) for k, v in code.globals.items()))
        if key not in self._functions:
            self._functions[key] = _function(code.src, code.globals, name)
        return Code(graph, self._functions[key])

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        return self

    def __len__(self) -> int:
        return len(self._functions)


_made = 0


def _function(src: str, names: Mapping[str, Any], name: str) -> Callable[..., Any]:
    global _made
    _made += 1
    file = f"<autotp {name or 'root'} {_made}>"
    linecache.cache[file] = (len(src), None, src.splitlines(True), file)  # for tracebacks
    scope = dict(names)
    exec(compile(src, file, "exec"), scope)
    found = scope["forward"]
    assert callable(found)
    return found  # type: ignore[no-any-return]
