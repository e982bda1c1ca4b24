"""What `training.py` found, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any


def time_table(title: str, found: Mapping[str, Any]) -> str:
    """A row for each variant: times, ratios to hand-written Megatron, collectives, errors."""
    lines = [
        f"{title}; other work took {found['foreign']:.1f} CPU s meanwhile",
        f"  {'':<34}{'step ms':>9}{'(min)':>9}{'x':>7}{'cpu x':>7}{'forward':>9}{'x':>7}"
        f"{'large':>7}{'small':>6}{'MB':>7}{'aten':>6}{'error':>9}",
    ]
    step, infer = found["step"], found["infer"]
    for name, wall in step["wall"].items():
        counts = step["collectives"][name]
        error = found["errors"].get(name)
        lines.append(
            f"  {name:<34}{median(wall) * 1e3:>9.1f}{min(wall) * 1e3:>9.1f}"
            f"{_ratio(step['wall'], name):>7}{_ratio(step['cpu'], name):>7}"
            f"{median(infer['wall'][name]) * 1e3:>9.1f}{_ratio(infer['wall'], name):>7}"
            f"{counts['large']:>7}{counts['small']:>6}{counts['bytes'] / 1e6:>7.1f}"
            f"{counts['operators']:>6}{'' if error is None else f'{error:.0e}':>9}"
        )
    lines += [f"  {name:<34}{why}" for name, why in found["failed"].items()]
    return "\n".join(lines) + "\n"


def memory_table(title: str, rows: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """A row for each variant: the process's memory with the model and at the peak of a step, and
    its tensors at that peak, each above what was before."""
    head = f"{'model MB':>10}{'peak MB':>10}{'x':>7}{'tensors MB':>12}{'x':>7}"
    lines = [f"{title}", f"  {'':<34}{head}"]
    found = {
        name: (
            max(r["model"] for r in ranks),
            max(r["model"] + r["steps"] for r in ranks),
            max(r["tensors"] for r in ranks),
        )
        for name, ranks in rows.items()
    }
    for name, (model, peak, tensors) in found.items():
        ratios = ["", ""]
        if "megatron" in found:
            _, whole, base = found["megatron"]
            ratios = [f"{peak / whole:.2f}", f"{tensors / base:.3f}"]
        line = f"{model:>10.0f}{peak:>10.0f}{ratios[0]:>7}{tensors:>12.1f}{ratios[1]:>7}"
        lines.append(f"  {name:<34}{line}")
    return "\n".join(lines) + "\n"


def _ratio(times: Mapping[str, Sequence[float]], name: str) -> str:
    return f"{median(times[name]) / median(times['megatron']):.3f}" if "megatron" in times else ""
