"""The program of a rank is proved (to come)."""

from __future__ import annotations

from autotp.planning import Plan
from autotp.program import Program


def check(program: Program, plan: Plan, *, rank: int) -> None:
    """To come."""
