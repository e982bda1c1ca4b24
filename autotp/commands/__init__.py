"""The command `autotp`: plan and check a model from a shell.

Exit codes: 0 done; 1 the answer is no (`verify` found a difference, nothing fits); 2 wrong
arguments or files; 3 the model cannot be captured or planned; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from autotp.commands.arguments import parser
from autotp.commands.output import printable
from autotp.errors import AutoTPError, InputError

DONE, NO, USAGE, MODEL, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show is no error
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except InputError as error:
        return _failed(error, USAGE)
    except AutoTPError as error:
        return _failed(error, MODEL)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough: `autotp plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    return code


def _failed(error: Exception, code: int) -> int:
    print(f"autotp: {printable(str(error))}", file=sys.stderr)
    return code
