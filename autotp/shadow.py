"""Whether the package `passes` that Python found is autotp's own.

The name is general: a user's `passes.py` beside the script comes first on the path.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def require_own_passes() -> None:
    """Raise ImportError naming the file that shadows autotp's passes."""
    own = Path(__file__).resolve().parent.parent / "passes"
    found = sys.modules.get("passes") or importlib.import_module("passes")
    file = getattr(found, "__file__", None) or str(next(iter(getattr(found, "__path__", [])), ""))
    if Path(file).resolve().parent != own:
        raise ImportError(
            f"{file} shadows a package of autotp\n"
            f"  values   import passes found {file}, autotp's is {own}\n"
            "  because  a file or folder named 'passes' lies earlier on Python's path\n"
            "  try      rename that file or folder"
        )
