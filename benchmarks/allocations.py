"""What one process allocates on the CPU during a call, from torch's profiler.

The profiler notes allocations and releases, but not what gloo's threads release: so collectives
wait until these have let go of their tensors, and gloo's own copies are not counted.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from autotp.runtime import group

BEGIN = "the call begins"


def collectives_wait() -> None:
    """From now on every collective of this process takes two milliseconds more."""
    for place, name in ((dist, "all_reduce"), (dist, "all_gather"), (group, "_reduce_scatter")):
        setattr(place, name, _waiting(getattr(place, name)))


def allocated(call: Callable[[], Any]) -> dict[str, int]:
    """Bytes that the call holds above what was before: at its `peak`, and at the first of every
    `record_function` in it, by name."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with record_function(BEGIN):
            pass
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        return _held(json.loads(trace.read_text())["traceEvents"])


def _held(events: list[dict[str, Any]]) -> dict[str, int]:
    events = sorted(events, key=lambda event: event.get("ts", 0))
    inside = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("c10d::")]
    main = next(e["tid"] for e in events if e["name"] == BEGIN)
    live: dict[int, int] = {}
    found = {"peak": 0}
    now = 0
    for event in events:
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], now)
        if event["name"] != "[memory]":
            continue
        at, size = event["args"]["Addr"], event["args"]["Bytes"]
        now -= live.pop(at, 0)  # a release, or one that was not noted
        if size > 0 and event["tid"] == main:
            if not any(start <= event["ts"] <= end for start, end in inside):
                live[at] = size
                now += size
        found["peak"] = max(found["peak"], now)
    return found


def _waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        time.sleep(0.002)
        return result

    return call
