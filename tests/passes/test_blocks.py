"""Repeated blocks: what is written out for a block is what a trace of it would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from autotp.program import Program
from autotp.skeleton import skeleton_of
from passes.capture import capture
from tests.oneprocess import assert_same, parallels, refill

DEPTH = 8
TRACED = 3  # the first, the second and the last
STATE: dict[str, Any] = {}  # what blocks see that is no attribute of theirs
WIDTH = 4


class Block(nn.Module):
    """Adds a product to its operand; the subclasses differ in what else they look at."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x + torch.tanh(self.inner(x) + self.shift).view(x.shape[0], -1, WIDTH)


class Stack(nn.Module):
    """Starts with a parameter, so that the first block's operand has a gradient like the others."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(kind(number) for number in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        STATE.update(calls=0, read=x * 2)
        x = x + self.start
        for block in self.blocks:
            x = block(x)
        return x


class ReadsItsNumber(Block):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return super().forward(x) * self.number


class TwoKinds(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = 2.0 if number % 2 else 3.0

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return super().forward(x) * self.scale


class Counts(Block):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        STATE["calls"] += 1
        return super().forward(x) * STATE["calls"]


class ReadsOutside(Block):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return super().forward(x) + STATE["read"]


class WritesAttribute(Block):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.last = torch.relu(x)
        return super().forward(x) + self.last


class Checkpointed(Block):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Passing(Stack):
    """Calls with a mask of another sort every second time, and blocks that give it back."""

    class Block(Block):
        def forward(self, x: Tensor, mask: Any = None, **_: Any) -> Any:
            return super().forward(x).masked_fill(mask, 0.0), mask, {"extra": x.sum()}

    def __init__(self) -> None:
        super().__init__(Passing.Block)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start
        mask, total = x > 0, x.sum()
        for number, block in enumerate(self.blocks):
            given = mask if number % 2 else mask[:1]
            x, back, extra = block(x, mask=given)
            assert back is given
            total = total + extra["extra"]
        return x * total


class GivesToAList(Block):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        STATE["given"].append(torch.relu(x))
        return super().forward(x)


class Gathering(Stack):
    """Reads what its blocks leave in a list, as losses of routers are passed on."""

    def __init__(self) -> None:
        super().__init__(GivesToAList)

    def forward(self, x: Tensor) -> Tensor:
        STATE["given"] = []
        return super().forward(x) + torch.stack(STATE["given"]).sum(0)


class GivesItsResult(Block):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        result = super().forward(x)
        STATE["given"].append(result)
        return result


class GatheringResults(Gathering):
    def __init__(self) -> None:
        Stack.__init__(self, GivesItsResult)


class WritesItsOperand(Block):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x.add_(self.inner(x))


class Overwritten(Stack):
    """Reads an operand again that a block wrote to."""

    def __init__(self) -> None:
        super().__init__(WritesItsOperand)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start
        for block in self.blocks:
            y = x * 2
            block(y)
            x = x + y
        return x


class GivesANumber(Block):
    def forward(self, x: Tensor, **_: Any) -> Any:
        STATE["calls"] += 1
        return super().forward(x), STATE["calls"]


class Numbered(Stack):
    def __init__(self) -> None:
        super().__init__(GivesANumber)

    def forward(self, x: Tensor) -> Tensor:
        STATE["calls"] = 0
        x = x + self.start
        for block in self.blocks:
            x, number = block(x)
            x = x * number
        return x


class Unread(Stack):
    """Operands that blocks do not read, and results that nobody reads."""

    class Block(Block):
        def forward(self, x: Tensor, y: Any = None, **_: Any) -> Any:
            return torch.relu(x), super().forward(x)

    def __init__(self) -> None:
        super().__init__(Unread.Block)

    def forward(self, x: Tensor) -> Tensor:
        y, x = x * 2, x + self.start
        for block in self.blocks:
            _, x = block(x, y=y)
        return x


class CallsInside(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[4].inner(super().forward(x))


class OutOfOrder(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start
        for block in reversed(self.blocks):
            x = block(x)
        return x


def operand() -> Tensor:
    return torch.zeros(3, 5, WIDTH)


def both(model: nn.Module, **inputs: Any) -> tuple[Program, Program]:
    """The programs of a capture with and without stamping."""
    skeleton = skeleton_of(model)
    made = capture(skeleton, (), inputs)
    return made, capture(skeleton, (), inputs, stamp=False)


def written_like_others(program: Program) -> int:
    """How many blocks were not traced."""
    note = program.provenance[0]
    return int(note.rpartition(" nodes, ")[2].split(" ")[0]) if "written like" in note else 0


def require_same(left: Program, right: Program) -> None:
    """Node for node: operators, operands, shapes, module calls, source lines."""
    mapped: dict[Node, Node] = {}

    def facts(node: Node, renamed: dict[Node, Node]) -> tuple[Any, ...]:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: renamed.get(n, n))
        meta = [node.meta.get(key) for key in ("calls", "stack_trace")]
        return node.op, node.target, args, kwargs, str(node.meta.get("val")), meta

    for ours, theirs in zip(left.graph.nodes, right.graph.nodes, strict=True):
        assert facts(ours, mapped) == facts(theirs, {})
        mapped[ours] = theirs
    assert left.signature == right.signature
    assert left.aliases == right.aliases
    assert list(left.tensors) == list(right.tensors)
    assert left.recomputed == right.recomputed


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: Stack(), DEPTH - TRACED),
        (lambda: Stack(ReadsItsNumber), 0),
        (lambda: Stack(TwoKinds), DEPTH - 2 * TRACED),
        (lambda: Stack(Counts), 0),
        (lambda: Stack(ReadsOutside), 0),
        (lambda: Stack(WritesAttribute), 0),
        (lambda: Stack(Checkpointed), DEPTH - TRACED),
        (lambda: Passing(), 3),
        (lambda: Twice(), 0),
        (lambda: CallsInside(), 0),
        (lambda: Gathering(), 0),
        (lambda: GatheringResults(), 0),
        (lambda: Overwritten(), 0),
        (lambda: Numbered(), 0),
        (lambda: Unread(), DEPTH - TRACED),
        (lambda: OutOfOrder(), DEPTH - TRACED),
    ],
    ids=[
        "alike",
        "reads its number",
        "two kinds",
        "counts calls",
        "reads a tensor from outside",
        "writes an attribute",
        "checkpointed inside",
        "two forms of call",
        "called twice",
        "called inside",
        "gives to a list",
        "gives its result to a list",
        "writes its operand",
        "gives a number",
        "operands and results unread",
        "out of order",
    ],
)
def test_written_blocks_are_what_a_trace_gives(model: Any, count: int) -> None:
    made, traced = both(model(), x=operand())
    require_same(made, traced)
    assert written_like_others(made) == count


def test_ties_between_blocks_are_kept() -> None:
    model = Stack()
    model.blocks[3].inner.weight = model.blocks[1].inner.weight
    made, traced = both(model, x=operand())
    require_same(made, traced)
    assert written_like_others(made) == DEPTH - TRACED


def test_a_hook_inside_of_a_block_is_traced() -> None:
    model = Stack()
    model.blocks[2].inner.register_forward_hook(lambda module, args, result: result * 7)
    made, traced = both(model, x=operand())
    require_same(made, traced)
    assert written_like_others(made) == DEPTH - 1 - TRACED


def test_another_class_is_traced() -> None:
    model = Stack()
    model.blocks[2] = TwoKinds(2)
    made, traced = both(model, x=operand())
    require_same(made, traced)
    assert written_like_others(made) == DEPTH - 1 - TRACED


def test_frozen_blocks_are_apart() -> None:
    model = Stack()
    model.blocks[0].requires_grad_(False)
    made, traced = both(model, x=operand())
    require_same(made, traced)
    assert written_like_others(made) == DEPTH - 1 - TRACED


def test_the_skeleton_is_as_before() -> None:
    skeleton = skeleton_of(Stack(TwoKinds))
    before = [(type(module), sorted(vars(module))) for module in skeleton.modules()]
    capture(skeleton, (), {"x": operand()})
    assert [(type(m), sorted(vars(m))) for m in skeleton.modules()] == before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"n_embd": 24, "n_head": 4}),
        ("llama", {"num_key_value_heads": 2}),
        ("gpt_neox", {}),
        ("bert", {}),
        ("mixtral", {"num_key_value_heads": 2}),
        ("bloom", {"n_head": 4}),
        ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 8}),
    ],
)
def test_models_of_transformers(name: str, options: dict[str, Any]) -> None:
    model, inputs = of_transformers(name, options)
    made, traced = both(model, **inputs)
    require_same(made, traced)
    assert written_like_others(made) == (0 if name == "gemma3_text" else 5 - TRACED)


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", {"n_embd": 24, "n_head": 4}), ("llama", {"num_key_value_heads": 2})],
)
def test_written_blocks_train_as_the_model(name: str, options: dict[str, Any]) -> None:
    model, inputs = of_transformers(name, options)
    refill(model.eval()).double()
    for lockstep in parallels(model, (2, 3), inputs):
        assert written_like_others(lockstep.plan.stages[0][1]) == 5 - TRACED
        assert_same(model, lockstep, inputs, tol=1e-6)  # loss and norms are float32 in any model


def of_transformers(name: str, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A model of five blocks, and a call with a loss."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        name, **{**sizes, "num_hidden_layers": 5, "vocab_size": 51, "pad_token_id": 0, **options}
    )
    kind = (
        transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    )
    model = kind.from_config(config).train()
    tokens = torch.randint(51, (3, 5), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone()}
    if name != "bert":
        inputs["use_cache"] = False
    return model, inputs
