"""A call through the frame with room is a plain call."""

from __future__ import annotations

import pytest

from autotp.frames import with_room


def test_result_passes_through() -> None:
    found = object()
    assert with_room(lambda: found) is found


def test_deep_calls_and_calls_within_calls() -> None:
    def depth(left: int) -> int:
        return 1 + with_room(lambda: depth(left - 1)) if left else 0

    assert depth(50) == 50


def test_exception_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 // 0)
