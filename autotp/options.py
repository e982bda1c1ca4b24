"""Options: what a user asks of `parallelize` besides the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from autotp.errors import PlanError, message

_KNOWN = {
    "logits": (
        ("auto", "gather", "local"),
        "it says what happens to results that are split along the vocabulary",
    ),
    "random": (
        ("own", "whole"),
        "it says whether ranks draw random numbers for their own parts only, or for the whole",
    ),
}


@dataclass(frozen=True)
class Options:
    """`logits`, `random` and `sequence_parallel` as `parallelize` describes them. PlanError for an
    unknown word."""

    logits: str = "auto"
    random: str = "own"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name, (words, why) in _KNOWN.items():
            given = getattr(self, name)
            if given not in words:
                listed = ", ".join(map(repr, words))
                raise PlanError(
                    message(
                        f"{name}={given!r} is not known",
                        values=f"{name}={given!r}",
                        because=why,
                        try_=f"one of {listed}",
                    )
                )


DEFAULTS = Options()
