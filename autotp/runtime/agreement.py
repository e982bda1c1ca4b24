"""Whether all ranks give the same value: the same answer on every rank, within a time limit.

This talks through the store of torch.distributed, not through a collective: a collective that one
rank does not join hangs until the backend's own timeout and leaves its connections broken (NCCL
ends the process). The store has neither fault, so after an error the ranks can go on.

Every rank writes its value and waits for the others'. Whoever has them all, or runs out of time
first, writes the verdict, once and for all ranks; one that comes late reads it too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, get_process_group_ranks, get_rank
from torch.distributed.distributed_c10d import _get_default_store

from autotp.errors import GroupError, message


def agree(group: ProcessGroup, key: str, what: str, value: str, timeout: float) -> None:
    """Raise GroupError on every rank of the group if not all give this value in time.

    `key` is new for each exchange and the same on all ranks.
    """
    names = get_process_group_ranks(group)  # as the launcher calls them: numbered in the world
    try:
        store = prefixed_store(key)
        found = _verdict(store, get_rank(group), names, what, value, timeout)
    except RuntimeError as error:
        raise GroupError(
            message(
                f"the ranks cannot compare {what}",
                values=_short(str(error)),
                because="the store of torch.distributed does not answer, maybe its process ended",
                try_="look at the output of the first process that failed",
            )
        ) from error
    if found:
        raise GroupError(found)


def prefixed_store(key: str) -> PrefixStore:
    """The part of torch.distributed's store that belongs to `key`."""
    return PrefixStore(key, _get_default_store())


def _verdict(
    store: Store, rank: int, names: Sequence[int], what: str, value: str, timeout: float
) -> str:
    """The error that all ranks will see, or nothing."""
    text = _short(value)
    if text != value:
        text += f" ({hashlib.sha256(value.encode()).hexdigest()[:12]})"
    store.set(str(rank), json.dumps(text))
    deadline, pause = time.monotonic() + timeout, 0.001
    # Polled, as a blocking wait would keep others in this process (NCCL's watchdog) from the store.
    while missing := [r for r in range(len(names)) if not store.check([str(r)])]:
        if store.check(["verdict"]) or time.monotonic() > deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    if missing:
        found = _absence(what, [names[r] for r in missing], names, timeout)
    else:
        values = [json.loads(store.get(str(r))) for r in range(len(names))]
        found = difference(what, values, names)
    return str(json.loads(store.compare_set("verdict", "", json.dumps(found))))


def difference(what: str, values: Sequence[str], names: Sequence[int]) -> str:
    """The error for values that are not all the same, or nothing."""
    ranks: dict[str, list[int]] = {}
    for name, value in zip(names, values, strict=True):
        ranks.setdefault(value, []).append(name)
    if len(ranks) == 1:
        return ""
    usual = max(ranks.values(), key=len)  # the first one of the largest
    others = [name for name in names if name not in usual]
    return message(
        f"the ranks disagree about {what}",
        values="\n".join(f"{_called(held)}: {value}" for value, held in ranks.items()),
        because=f"{_called(others)} gave another value than {_called(usual)}",
        try_="run the same program, with the same model and versions, on every rank",
    )


def _absence(what: str, missing: Sequence[int], names: Sequence[int], timeout: float) -> str:
    return message(
        f"{_called(missing)} did not come to compare {what}",
        values=f"waited {timeout:g} s in the group of {_called(names)}",
        because="a rank has failed, hangs or takes another path than its peers",
        try_=f"look at the output of {_called(missing)} first",
    )


def listed(words: Sequence[object], last: str) -> str:
    """1, 2 and 3"""
    *head, tail = map(str, words)
    return f"{', '.join(head)} {last} {tail}" if head else tail


def _called(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, 'and')}"


def _short(value: str) -> str:
    text = " ".join(value.split())
    return text if len(text) <= 200 else f"{text[:197]}..."
