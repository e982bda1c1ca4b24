"""A picture of what `training.py --json` found: a step of each variant against Megatron's.

python benchmarks/training_plot.py found.json docs/training.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

WIDTH, LABEL, ROW, SCALE = 640, 230, 18, 150  # pixels; SCALE is the length of a ratio of 1


def picture(found: Mapping[str, Any]) -> str:
    """An SVG: for each model and shape a bar for each variant, its length the ratio of medians."""
    lines: list[str] = []
    y = 10
    for title, one in found.items():
        y += 2 * ROW
        lines.append(f'<text x="8" y="{y - 6}" font-weight="bold">{title}</text>')
        wall = one["step"]["wall"]
        base = median(wall["megatron"])
        for name, times in wall.items():
            ratio = median(times) / base
            color = "#2a6fbb" if name.startswith("autotp") else "#b8c2cc"
            length = ratio * SCALE
            lines += [
                f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{name}</text>',
                f'<rect x="{LABEL}" y="{y + 2}" width="{length:.0f}" height="13" fill="{color}"/>',
                f'<text x="{LABEL + length + 6:.0f}" y="{y + 13}">{ratio:.2f}</text>',
            ]
            y += ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 16}" '
    head += 'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text())))
