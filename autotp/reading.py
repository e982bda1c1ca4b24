"""The data of a plan's JSON text is checked before a plan is made of it."""

from __future__ import annotations

from typing import Any

import torch

DIM = object()  # a dim's tree, which `autotp.axes.from_json` reads
_NAMES = [str]
_AXIS = {"name": str, "kind": str, "units": int, "bounds": [int], "columns": _NAMES, "rows": _NAMES}
_TENSOR = {"name": str, "kind": str, "dtype": str, "dims": [DIM]}
_KEPT = {"name": str, "reason": str, "node": str, "source": str}
_PLAN = {
    **{"format": int, "model": str, "tp": int, "axes": [_AXIS], "tensors": [_TENSOR]},
    **{"kept": [_KEPT], "collectives": dict},
}
_WORDS = {str: "text", int: "a whole number", dict: "an object"}


def check(data: Any) -> None:
    """Raise ValueError with the place, as `axes[0].bounds[2]`, if this is not a plan's data."""
    _check(data, _PLAN, "")
    if data["tp"] < 1:
        raise ValueError(f"tp: {data['tp']} ranks")
    for at, axis in enumerate(data["axes"]):
        bounds = axis["bounds"]
        if [bounds[:1], bounds[-1:]] != [[0], [axis["units"]]] or bounds != sorted(bounds):
            raise ValueError(f"axes[{at}].bounds: not from 0 to {axis['units']} in order")
        if len(bounds) != data["tp"] + 1:
            raise ValueError(f"axes[{at}].bounds: {len(bounds)} of them for tp={data['tp']}")
    for at, tensor in enumerate(data["tensors"]):
        if not isinstance(getattr(torch, tensor["dtype"], None), torch.dtype):
            raise ValueError(f"tensors[{at}].dtype: {_short(tensor['dtype'])} is none of torch's")
    for name, count in data["collectives"].items():
        _check(count, int, f"collectives.{name}")


def _check(data: Any, wanted: Any, at: str) -> None:
    if wanted is DIM:
        return
    if isinstance(wanted, dict):
        _check(data, dict, at)
        for key, inner in wanted.items():
            where = f"{at}.{key}" if at else key
            if key not in data:
                raise ValueError(f"{where}: missing")
            _check(data[key], inner, where)
    elif isinstance(wanted, list):
        if not isinstance(data, list):
            raise ValueError(f"{at}: {_short(data)}, not a list")
        for number, item in enumerate(data):
            _check(item, wanted[0], f"{at}[{number}]")
    elif not isinstance(data, wanted) or isinstance(data, bool):
        raise ValueError(f"{at or 'the whole'}: {_short(data)}, not {_WORDS[wanted]}")


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 40 else f"{text[:40]}..."
