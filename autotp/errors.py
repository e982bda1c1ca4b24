"""The errors that a user can act on: what happened, with which values, why, and what to do."""

from __future__ import annotations


class AutoTPError(Exception):
    """What all errors of autotp have in common."""


class PlanError(AutoTPError, ValueError):
    """The arguments do not fit the model or the ranks."""


class InputError(AutoTPError, ValueError):
    """A file or an argument of a command is wrong."""


class CaptureError(AutoTPError):
    """The model cannot be captured as a graph."""


class GroupError(AutoTPError, RuntimeError):
    """The ranks are missing, cannot talk, or disagree."""


class CheckpointError(AutoTPError):
    """A checkpoint does not fit the model, or its files cannot be read or written."""


class CheckError(AutoTPError):
    """A transformed graph is not proved to compute what the original computed."""


class ShardError(AutoTPError, RuntimeError):
    """A shard was used as if it were the whole tensor."""


def message(what: str, values: str, because: str, try_: str | None = None) -> str:
    """The text of every error, one fact a line.

    cannot place tp groups of 4 on 6 ranks
      values   world size 6, tp=4
      because  6 is not a multiple of 4: 2 ranks would belong to no group
      try      tp=1, 2, 3 or 6, or start 4 or 8 processes
    """
    lines = [what, _line("values", values), _line("because", because)]
    return "\n".join(lines if try_ is None else [*lines, _line("try", try_)])


def _line(name: str, text: str) -> str:
    return f"  {name:<9}" + text.replace("\n", "\n" + " " * 11)
