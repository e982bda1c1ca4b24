"""What commands print: text or JSON on standard output, progress on standard error."""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any


def show(arguments: Namespace, text: str, data: Any) -> None:
    """Print the text, or the data with --json."""
    print(json.dumps(data, indent=1) if arguments.json else printable(text))


def printable(text: str) -> str:
    """The text with control characters (of names and messages) written out: none steers the
    terminal."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


@contextmanager
def working(arguments: Namespace, what: str) -> Iterator[None]:
    """Say on a terminal what takes long, and in the end how long it took. What a model prints
    meanwhile goes to standard error: standard output holds the answer alone."""
    if arguments.quiet or not sys.stderr.isatty():
        with redirect_stdout(sys.stderr):
            yield
        return
    begun = time.perf_counter()
    with _spinner(what), redirect_stdout(sys.stderr):
        yield
    print(f"{what}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)


def _spinner(what: str) -> Any:
    try:
        from rich.console import Console
    except ImportError:
        print(f"{what} ...", file=sys.stderr)
        return nullcontext()
    return Console(stderr=True).status(what)
