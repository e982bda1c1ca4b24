"""Block: what every module of the original becomes. Parameters under their names, and code per
call."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from autotp.runtime.group import Group
from autotp.runtime.native import native
from autotp.runtime.sharded import ShardedParameter, local, plain, sharded


class Code:
    """The compiled function of one graph. Equal functions are shared, so copying returns itself."""

    def __init__(self, graph: Graph, function: Callable[..., Any]) -> None:
        self.graph = graph
        self.function = function
        self.recompute = False  # in the backward, as torch.utils.checkpoint does

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
        code = self._tp_codes[_graph]
        if code.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, code, *values, use_reentrant=False)
        with plain():
            return code.function(self, *values)

    def _run(self, code: Code, *values: Any) -> Any:
        with plain():
            return code.function(self, *values)

    # nn.Module's own places to override what a module saves, loads and moves.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else self._parameters:
            if prefix + name in destination:
                destination[prefix + name] = local(destination[prefix + name])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        before = dict(self._parameters)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._keep_shards(before)

    def _apply(self, fn: Any, recurse: bool = True) -> Block:
        before = dict(self._parameters)
        super()._apply(fn, recurse)
        self._keep_shards(before)
        return self

    def _keep_shards(self, before: Mapping[str, nn.Parameter | None]) -> None:
        """A parameter that took the place of a shard is a shard."""
        for name, old in before.items():
            new = self._parameters[name]
            if isinstance(old, ShardedParameter) and type(new) is nn.Parameter:
                self._parameters[name] = sharded(new.data, new.requires_grad, old.shard)

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
    """Turns graphs into functions; graphs with the same text share one.

    `read` is called with each parameter and buffer that the code reads, and gives what it uses.
    """

    def __init__(self, read: Callable[[Any], Any] | None = None) -> None:
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._read = read

    def __call__(self, graph: Graph, name: str) -> Code:
        made = native(graph)
        if self._read is not None:
            _read_through(made, self._read)
        code = made.python_code("self")
        key = (code.src, *sorted((k, id(v)) for k, v in code.globals.items()))
        if key not in self._functions:
            self._functions[key] = _function(code.src, code.globals, name)
        return Code(graph, self._functions[key])

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        return self

    def __len__(self) -> int:
        return len(self._functions)


def _read_through(graph: Graph, read: Callable[[Any], Any]) -> None:
    for node in graph.find_nodes(op="get_attr"):
        if node.target != "_tp_group":
            with graph.inserting_after(node):
                used = graph.call_function(read, (node,))
            readers = [user for user in node.users if user is not used]
            for user in readers:
                user.replace_input_with(node, used)


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
