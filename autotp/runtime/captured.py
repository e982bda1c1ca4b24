"""One captured call form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotp.planning import Plan
from autotp.program import Signature
from autotp.runtime.outputs import LocalOutput


@dataclass(frozen=True)
class Capture:
    """One captured call form: its number among the root's graphs, what it serves, and why it was
    made."""

    number: int
    signature: Signature
    seconds: float
    plan: Plan
    outputs: Mapping[int, LocalOutput]
    assemble: Callable[[Sequence[Any], Sequence[Any]], Any]
    form: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.form.get('mode', '')}, {self.seconds:.1f} s: {self.reason}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        return self
