"""What commands print: text or JSON on standard output, progress on standard error."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


def show(arguments: Namespace, text: str, data: Any) -> None:
    """Print the text, or the data with --json."""
    print(json.dumps(data, indent=1) if arguments.json else text)


@contextmanager
def working(arguments: Namespace, what: str) -> Iterator[None]:
    """Say on a terminal what takes long, and in the end how long it took."""
    if arguments.quiet or not sys.stderr.isatty():
        yield
        return
    begun = time.perf_counter()
    with _spinner(what):
        yield
    print(f"{what}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)


def _spinner(what: str) -> Any:
    try:
        from rich.console import Console
    except ImportError:
        print(f"{what} ...", file=sys.stderr)
        return nullcontext()
    return Console(stderr=True).status(what)
