"""`autotp coverage`: of several models, which are captured and how much of each is split."""

from __future__ import annotations

from argparse import Namespace
from math import prod
from typing import Any

from autotp.commands.output import show
from autotp.commands.plan import built, planned
from autotp.errors import AutoTPError, InputError
from autotp.planning import Plan

ENOUGH = 0.95  # of the work of matrix products


def run(arguments: Namespace) -> int:
    """Print a table; 1 if a model is not captured or less than 95 % of its work is split."""
    rows = [_row(arguments, name) for name in arguments.models]
    show(arguments, _table(rows), rows)
    return 0 if all(row["work_split"] >= ENOUGH for row in rows) else 1


def _row(arguments: Namespace, name: str) -> dict[str, Any]:
    """What became of one model. Wrong arguments are still errors."""
    tp = arguments.tp or 2
    one = Namespace(**{**vars(arguments), "model": name, "config": None, "tp": tp})
    source = built(one)
    row: dict[str, Any] = {"model": name, "class": type(source.model).__name__}
    try:
        made = planned(one, source)
    except InputError:
        raise
    except AutoTPError as error:
        return {**row, "captured": False, "work_split": 0.0, "why": [str(error)]}
    return {**row, "captured": True, **_shares(made)}


def _shares(plan: Plan) -> dict[str, Any]:
    from autotp.work import split_share, whole_products

    sizes = {t.name: prod(t.shape) for t in plan.tensors if t.kind == "parameter"}
    split = sum(count for name, count in sizes.items() if plan.is_sharded(name))
    return {
        "work_split": split_share(plan),
        "parameters_split": round(split / max(sum(sizes.values()), 1), 4),
        "why": [f"whole: {what}" for what in whole_products(plan)],
    }


def _table(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["model"]) for row in rows)
    lines = [f"{'model':<{width}}  work split  parameters split"]
    for row in rows:
        if row["captured"]:
            shares = f"{row['work_split']:10.1%}  {row['parameters_split']:16.1%}"
        else:
            shares = "not captured"
        lines.append(f"{row['model']:<{width}}  {shares}  {row['class']}")
        lines += [f"{'':<{width}}    {line}" for why in row["why"] for line in why.splitlines()]
    return "\n".join(lines)
