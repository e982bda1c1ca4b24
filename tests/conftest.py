"""What all tests share: golden texts, rewritten by `pytest --update-golden`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with `tests/golden/NAME.txt`, or write it there with `--update-golden`."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: pytest --update-golden writes it"
        assert text == path.read_text(encoding="utf-8"), "pytest --update-golden, if this is meant"

    return compare
