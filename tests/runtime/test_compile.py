"""torch.compile in one process; on real ranks: tests/distributed/test_compile.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autotp
from autotp.runtime.sharded import local
from tests.models import refill, tiny_gpt2


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(autotp.parallelize(model, tp=1), backend="eager", **options)


def test_a_call_form_that_comes_first_is_captured_between_compiled_graphs() -> None:
    model = refill(tiny_gpt2(n_layer=1)).eval()
    x = torch.arange(7)[None]  # a batch of one has a capture of its own
    fast = compiled(model)
    for _ in range(2):
        both = [m(x, labels=x, use_cache=False) for m in (fast, model)]
        torch.testing.assert_close(both[0].logits, both[1].logits)
        for found in both:
            found.loss.backward()
    wanted = dict(model.named_parameters())
    for name, parameter in fast._orig_mod.named_parameters():
        torch.testing.assert_close(local(parameter.grad), wanted[name].grad, msg=name)


def test_a_call_form_that_comes_first_is_refused_by_one_graph_with_what_to_do() -> None:
    fast = compiled(refill(tiny_gpt2(n_layer=1)).eval(), fullgraph=True)
    with pytest.raises(Exception, match="call the model in this form once before it is compiled"):
        fast(torch.arange(7)[None], use_cache=False)
