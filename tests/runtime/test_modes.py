"""Whether someone sees every operator's result: torch has no public function for it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autotp.runtime.modes import watched


def test_a_mode_that_is_on_is_seen() -> None:
    assert not watched(), "torch._C._len_torch_dispatch_stack has moved: every all-reduce copies"
    with FlopCounterMode(display=False):
        assert watched()
    assert not watched()


def test_where_torch_does_not_say_there_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    assert watched()
