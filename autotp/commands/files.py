"""Files that a user names: read with an error that says where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotp.errors import InputError, message

LARGEST = 64 << 20  # bytes; the plan of 128 layers has 4 MB


def read_text(path: str | Path) -> str:
    """The text of a file; InputError if it is none."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise _wrong(path, f"{size:,} bytes", f"larger than {LARGEST:,} bytes")
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is not UTF-8"
        raise _wrong(path, f"{path.stat().st_size:,} bytes", found) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise _wrong(path, str(path), reason(error)) from error


def exists(path: str | Path) -> bool:
    """Whether there is such a file or directory; a name that can be none's is no error."""
    try:
        return Path(path).exists()
    except OSError:  # too long
        return False


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file; InputError with line and column if there is none."""
    text = read_text(path)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _wrong(path, where, f"{error.msg}: {_near(text, error.pos)}") from error
    except RecursionError as error:
        raise _wrong(path, f"{len(text):,} characters", "nested too deeply") from error
    except ValueError as error:  # a number with too many digits
        raise _wrong(path, f"{len(text):,} characters", str(error)) from error
    if not isinstance(data, dict):
        raise _wrong(path, "line 1, column 1", f"a {type(data).__name__}, not an object")
    return data


def write_text(path: str | Path, text: str) -> None:
    """Write a file; InputError if that is not possible."""
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        raise _wrong(path, str(path), reason(error)) from error


def reason(error: OSError | ValueError) -> str:
    """Why a path cannot be used: what the system says, or that a name has a null byte."""
    return getattr(error, "strerror", "") or str(error)


def _near(text: str, position: int) -> str:
    return repr(text[position : position + 24]) if position < len(text) else "the end of the file"


def _wrong(path: str | Path, values: str, because: str) -> InputError:
    return InputError(message(f"cannot use the file {path}", values=values, because=because))
