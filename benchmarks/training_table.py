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
    """A row for each variant: the model and the peak of the steps above what was before."""
    lines = [f"{title}", f"  {'':<34}{'model MB':>10}{'peak MB':>10}{'x':>7}"]
    peaks = {name: max(r["model"] + r["steps"] for r in ranks) for name, ranks in rows.items()}
    for name, ranks in rows.items():
        ratio = f"{peaks[name] / peaks['megatron']:.2f}" if "megatron" in peaks else ""
        model = max(r["model"] for r in ranks)
        lines.append(f"  {name:<34}{model:>10.0f}{peaks[name]:>10.0f}{ratio:>7}")
    return "\n".join(lines) + "\n"


def _ratio(times: Mapping[str, Sequence[float]], name: str) -> str:
    return f"{median(times[name]) / median(times['megatron']):.3f}" if "megatron" in times else ""
